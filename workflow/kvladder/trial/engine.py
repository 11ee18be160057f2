"""The engine's command line: what every setup shares, plus what the setup adds."""

from __future__ import annotations

import json
from collections.abc import Mapping

from kvladder.config.experiment import Scalar
from kvladder.serving.process import ProcessSpec, Readiness
from kvladder.setups.base import HASH_SEED, SetupConfig, SetupContext

GPU_SHARE = 0.9
"""Of the device's memory, what the engines of a trial may take together: each checks at its start that its share is
free (vLLM's ``request_memory``), also where the pool's size is given in bytes."""

SERVED_NAME = "kvladder"
"""Name that requests use: equal for every model, so that no path of a machine gets into a request."""

ENGINE_ENV = {
    **HASH_SEED,
    # Otherwise the first start compiles FlashInfer's sampler for minutes before /health answers.
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    # /server_info and /reset_prefix_cache; the listener is on loopback and wants the trial's key.
    "VLLM_SERVER_DEV_MODE": "1",
}


def cores(binding: str) -> list[int]:
    """``"0-3,6"`` to [0, 1, 2, 3, 6]. Raises ValueError for anything else."""
    numbers: list[int] = []
    for part in binding.split(","):
        first, _, last = part.partition("-")
        numbers += range(int(first), int(last or first) + 1)
    return numbers


def flags(arguments: Mapping[str, Scalar]) -> list[str]:
    """``{"max-num-seqs": 4, "enforce-eager": true}`` to argv; false and null leave the flag out."""
    argv: list[str] = []
    for name, value in arguments.items():
        flag = "--" + name.removeprefix("--").replace("_", "-")
        if value is True:
            argv.append(flag)
        elif value is not None and value is not False:
            argv += [flag, str(value)]
    return argv


def arguments(setup: SetupConfig, context: SetupContext) -> dict[str, Scalar]:
    """vLLM arguments of a trial's engine by flag name; the setup's own `args` win, then the experiment's."""
    engine, model = context.engine, context.model
    result: dict[str, Scalar] = {
        "model": str(context.model_dir),
        "served-model-name": SERVED_NAME,
        "host": "127.0.0.1",
        "port": context.port("engine"),
        "skip-tokenizer-init": True,
        "dtype": model.dtype,
        "seed": 0,
        "max-model-len": engine.max_model_len,
        "tensor-parallel-size": engine.tensor_parallel if engine.tensor_parallel > 1 else None,
        "max-num-seqs": engine.max_num_seqs,
        "max-num-batched-tokens": engine.max_num_batched_tokens,
        "block-size": engine.block_size,
        "kv-cache-memory-bytes": engine.kv_pool_bytes,
        "num-gpu-blocks-override": engine.kv_pool_blocks,
        "enforce-eager": engine.eager,
        "enable-prefix-caching" if setup.prefix_caching else "no-enable-prefix-caching": True,
    }
    if context.engines > 1 and context.stack.device == "cuda":
        result["gpu-memory-utilization"] = GPU_SHARE / context.engines
    if model.weights != "checkpoint":
        result["load-format"] = model.weights
    if model.weights == "seeded":
        result["model-loader-extra-config"] = json.dumps({"seed": model.seed})
    connector = setup.connector(context)
    if connector is not None:
        result["kv-transfer-config"] = json.dumps(connector)
    for extra in (engine.args, setup.args):
        result.update({name.removeprefix("--").replace("_", "-"): value for name, value in extra.items()})
    return result


def engine_spec(setup: SetupConfig, context: SetupContext, api_key: str) -> ProcessSpec:
    """The engine as a process: argv, environment, readiness."""
    env = {**ENGINE_ENV, **context.stack.env, "VLLM_API_KEY": api_key, **setup.engine_env(context)}
    if context.engine.cpu_threads is not None:
        # vLLM's automatic binding depends on the connector and makes setups unequal.
        env["VLLM_CPU_OMP_THREADS_BIND"] = context.engine.cpu_threads
        env["OMP_NUM_THREADS"] = str(len(cores(context.engine.cpu_threads)))
    env |= {**context.engine.env, **setup.env}
    port = context.port("engine")
    # An engine that computes on the host's cores would keep the client from the one it needs to read the clock.
    yielding = ["nice", "-n", "10"] if context.stack.device == "cpu" else []
    return ProcessSpec(
        name=context.server,
        argv=[*yielding, str(context.python), *context.stack.api_server, *flags(arguments(setup, context))],
        env=env,
        cwd=context.folder,
        log=context.log,
        ready=Readiness(port=port, http_path="/health", key=api_key, deadline_s=context.engine.ready_s),
        metrics_url=f"http://127.0.0.1:{port}/metrics",
        secrets=frozenset({"VLLM_API_KEY"}),
        # An engine that sizes its pool by what it finds free on the GPU must find the others' in place.
        beside=context.number > 0 and (context.stack.device != "cuda" or context.engine.kv_pool_bytes is not None),
    )
