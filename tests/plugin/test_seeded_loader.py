"""The load format ``seeded``: same seed, same bits; scales that keep activations alive."""

import pytest
import torch
from torch import nn
from vllm.config.load import LoadConfig
from vllm.model_executor.model_loader import get_model_loader

from kvladder_engine_plugin import register, seeded_loader


class TinyModel(nn.Module):
    """Two matrices that span several slices in total, a norm, a bias and a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(1024, 1500, dtype=torch.bfloat16)
        self.second = nn.Linear(1024, 1500, bias=False, dtype=torch.bfloat16)
        self.tied = nn.Linear(1024, 1500, bias=False)
        self.tied.weight = self.second.weight
        self.norm = nn.LayerNorm(64)


@pytest.fixture(autouse=True)
def _one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seeded_loader, "get_tensor_model_parallel_rank", lambda: 0)


def weights(seed: int, threads: int = 1) -> dict[str, torch.Tensor]:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        model = TinyModel()
        register()
        load_config = LoadConfig(load_format="seeded", model_loader_extra_config={"seed": seed})
        get_model_loader(load_config).load_weights(model, None)
        return {name: p.detach() for name, p in model.named_parameters()}
    finally:
        torch.set_num_threads(before)


def test_same_seed_gives_the_same_bits_whatever_the_thread_count() -> None:
    one, two = weights(7, threads=1), weights(7, threads=2)
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_another_seed_or_name_gives_other_weights() -> None:
    seven = weights(7)
    assert not torch.equal(seven["first.weight"], weights(8)["first.weight"])
    assert not torch.equal(seven["first.weight"], seven["second.weight"])


def test_scales_are_those_of_a_trained_model() -> None:
    tensors = weights(7)
    matrix = tensors["first.weight"].float()
    assert matrix.std().item() == pytest.approx(1024**-0.5, rel=0.01)
    assert matrix.mean().item() == pytest.approx(0.0, abs=1e-4)
    assert matrix.abs().max().item() > 4 * 1024**-0.5  # tails are not clipped
    assert torch.equal(tensors["norm.weight"], torch.ones(64))
    assert torch.equal(tensors["norm.bias"], torch.zeros(64))
    assert not tensors["first.bias"].any()


@pytest.mark.parametrize("extra", [{"sede": 7}, {"seed": "7"}, {"seed": True}])
def test_a_wrong_extra_config_is_refused(extra: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="'seed'"):
        seeded_loader.SeededModelLoader(LoadConfig(load_format="seeded", model_loader_extra_config=extra))
