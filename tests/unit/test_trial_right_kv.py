"""The right-kv passes: how long their prompts are, that they overlap nothing and are no part of a run's id."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from kvladder.config.experiment import effective, run_id, validate
from kvladder.config.traffic import TrafficContext
from kvladder.config.yaml import ConfigError
from kvladder.trial.right_kv import passes

CONFIG: dict[str, Any] = {
    "experiment": "tiny",
    "stack": "stub",
    "model": {
        "shape": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 1000},
    },
    "engine": {"max_model_len": 2048, "kv_pool_bytes": "64MiB"},
    "setups": {"plain": {"kind": "plain"}},
    "workloads": {"repeat": {"kind": "repeat", "prompt_tokens": 200}},
}
PER_TOKEN = 2 * 2 * 64 * 2
"""Bytes of KV a token in that model."""


def config(engine: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    data = copy.deepcopy(CONFIG) | changes
    data["engine"] |= engine or {}
    return data


@pytest.mark.parametrize(
    ("engine", "tokens"),
    [
        ({}, 521),
        ({"max_model_len": 522}, 265),
        ({"max_model_len": 523}, 521),
        ({"max_model_len": 256}, 137),
        ({"kv_pool_bytes": 9 * 523 * PER_TOKEN}, 521),
        ({"kv_pool_bytes": 9 * 523 * PER_TOKEN - 1}, 265),
        ({"kv_pool_blocks": 46, "block_size": 128, "kv_pool_bytes": None}, 521),
        ({"kv_pool_blocks": 44, "block_size": 128, "kv_pool_bytes": None}, 265),
        ({"kv_pool_blocks": 2, "kv_pool_bytes": None}, 521),
    ],
)
def test_unset_length_is_whole_chunks_and_a_tail_as_far_as_there_is_room(engine: dict[str, Any], tokens: int) -> None:
    assert validate(config(engine)).right_kv_tokens() == tokens


def test_short_models_get_what_fits() -> None:
    small = config({"max_model_len": 40}, workloads={"repeat": {"kind": "repeat", "prompt_tokens": 20}})
    assert validate(small).right_kv_tokens() == 25
    tiny = config({"max_model_len": 20}, workloads={"repeat": {"kind": "repeat", "prompt_tokens": 10}})
    assert validate(tiny).right_kv_tokens() == 18


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"right_kv": {"prompt_tokens": 2047}}, "right_kv.prompt_tokens: 2047, at most 2046"),
        ({"right_kv": {"prompts": 7}}, "greater than or equal to 8"),
        ({"right_kv": {"top": 21}}, "less than or equal to 20"),
        ({"right_kv": {"prompt": 8}}, "right_kv.prompt"),
        ({"workloads": {"right-kv": {"kind": "repeat", "prompt_tokens": 200}}}, "the name is taken"),
        ({"gates": {"right_kv_factor": 0.5}}, "right_kv_factor"),
    ],
)
def test_what_can_not_be_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        validate(config(**change))


def test_it_is_no_part_of_what_defines_a_trial_but_is_on_record() -> None:
    on, other, off = (validate(config(**change)) for change in ({}, {"right_kv": {"prompts": 16}}, {"right_kv": None}))
    assert run_id(on, "plain", "repeat") == run_id(other, "plain", "repeat") == run_id(off, "plain", "repeat")
    recorded = effective(on, "plain", "repeat")["right_kv"]
    assert recorded == {"prompts": 8, "prompt_tokens": 521, "output_tokens": 2, "top": 20}
    assert effective(other, "plain", "repeat")["right_kv"]["prompts"] == 16
    assert effective(off, "plain", "repeat")["right_kv"] is None


def test_the_same_prompts_three_times_and_none_of_a_workload() -> None:
    experiment = validate(config(workloads={"repeat": {"kind": "repeat", "prompt_tokens": 521, "prompts": 8}}))
    assert experiment.right_kv is not None
    context = TrafficContext(seed=1, namespace="main/r0", vocab_size=1000, block_size=16)
    plans = passes(experiment.right_kv, experiment.right_kv_tokens(), context)
    assert [(plan.workload, plan.name, plan.round, plan.concurrency) for plan in plans] == [
        ("right-kv", "cold", 0, 1),
        ("right-kv", "first-hit", 1, 1),
        ("right-kv", "warm", 2, 1),
    ]
    assert plans[0].requests == plans[1].requests == plans[2].requests
    assert [(len(r.prompt), r.output_tokens) for r in plans[0].requests] == [(521, 2)] * 8
    timed = experiment.workloads["repeat"].passes("repeat", context)[0].requests
    first_blocks = {bytes(request.prompt[:16]) for request in [*plans[0].requests, *timed]}
    assert len(first_blocks) == 16
