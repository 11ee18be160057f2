"""Load format ``seeded``: random weights of a normal scale, the same for the same seed.

vLLM's own ``dummy`` format draws tiny uniform numbers: logits are nearly flat and the output hardly depends
on the prompt, so wrong KV goes unnoticed. Here activations keep unit scale through the network, and a
changed KV block changes the logprobs.

Usage: ``--load-format seeded --model-loader-extra-config '{"seed": 7}'`` with a model folder that holds
only ``config.json`` (and ``--skip-tokenizer-init``). Floating-point, unquantized parameters only.
"""

import hashlib
import math

import torch
from torch import nn
from vllm.config import ModelConfig
from vllm.config.load import LoadConfig
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)
from vllm.model_executor.model_loader import _LOAD_FORMAT_TO_MODEL_LOADER, register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

LOAD_FORMAT = "seeded"

_SLICE_ELEMENTS = 1 << 20
"""Numbers drawn at once: the float32 scratch (4 MiB) stays in a CPU's cache, and an 8B model needs only
some thousand kernel launches on a GPU. Part of the weights' definition: another size gives other weights."""


class SeededModelLoader(BaseModelLoader):
    """Fills each parameter in place, on its own device, from a generator seeded by (seed, rank, name)."""

    def __init__(self, load_config: LoadConfig) -> None:
        super().__init__(load_config)
        extra = dict(load_config.model_loader_extra_config or {})
        seed = extra.pop("seed", 0)
        if extra or not isinstance(seed, int) or isinstance(seed, bool):
            raise ValueError(
                f"load format {LOAD_FORMAT!r} takes one integer key, 'seed'; "
                f"got {load_config.model_loader_extra_config!r}"
            )
        self.seed = seed

    def download_model(self, model_config: ModelConfig) -> None:
        """Nothing to fetch: the weights come from the seed."""

    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        """Fill every parameter of `model`; ``model_config`` is part of vLLM's interface and not needed."""
        rank = get_tensor_model_parallel_rank()
        filled: set[int] = set()
        for module_name, module in model.named_modules():
            for name, parameter in module.named_parameters(recurse=False):
                if id(parameter) in filled:  # tied weights: the first owner decides the scale
                    continue
                filled.add(id(parameter))
                key = f"{self.seed}/{rank}/{module_name}.{name}"
                fill_parameter(parameter.data, standard_deviation(module, name, parameter), key)


def standard_deviation(module: nn.Module, name: str, parameter: torch.Tensor) -> float | None:
    """Scale of a parameter, or None where it is a constant (norms 1, biases 0).

    Matrices get 1/sqrt(fan-in). A row-parallel layer holds only a slice of its inputs, so its fan-in is the
    whole layer's ``input_size``, not the width of the slice. An LM head is a matrix although it subclasses
    the embedding.
    """
    if parameter.dim() < 2:
        return None
    if isinstance(module, VocabParallelEmbedding) and not isinstance(module, ParallelLMHead):
        return 1.0
    fan_in: int = getattr(module, "input_size", parameter.shape[-1])
    return 1.0 / math.sqrt(fan_in)


def fill_parameter(tensor: torch.Tensor, std: float | None, key: str) -> None:
    """Write seeded numbers (or the constant of a norm or bias) into `tensor`.

    Numbers are drawn in float32 and then rounded: drawing in bfloat16 takes its uniforms from 256 values
    and clips the tails. torch's CPU generator is sequential, so the thread count doesn't matter; slices of
    a fixed size keep the sequence the same on a given device type.
    """
    if std is None:
        tensor.fill_(0.0 if key.endswith("bias") else 1.0)
        return
    generator = torch.Generator(device=tensor.device)
    generator.manual_seed(int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") >> 1)
    flat = tensor.view(-1)
    for piece in torch.split(flat, _SLICE_ELEMENTS):
        numbers = torch.empty(piece.shape, dtype=torch.float32, device=tensor.device)
        piece.copy_(numbers.normal_(0.0, std, generator=generator))


def register_seeded_loader() -> None:
    """Make ``--load-format seeded`` known; calling it again changes nothing."""
    if _LOAD_FORMAT_TO_MODEL_LOADER.get(LOAD_FORMAT) is not SeededModelLoader:
        register_model_loader(LOAD_FORMAT)(SeededModelLoader)
