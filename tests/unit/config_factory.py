"""A small experiment for tests that need one, whatever it measures."""

from __future__ import annotations

from typing import Any

from kvladder.config.experiment import ExperimentConfig, validate


def experiment(stack: str = "cpu", **setups: Any) -> ExperimentConfig:
    """One workload `repeat`, the setup `plain` and those given."""
    shape = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64}
    return validate(
        {
            "experiment": "x",
            "stack": stack,
            "model": {"shape": shape},
            "engine": {"max_model_len": 1024, "kv_pool_blocks": 64, "block_size": 128},
            "setups": {"plain": {"kind": "plain"}, **setups},
            "workloads": {"repeat": {"kind": "repeat", "prompt_tokens": 500}},
        }
    )
