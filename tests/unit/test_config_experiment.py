"""Validation of experiments, run ids and the order of trials."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from kvladder.config.experiment import kv_bytes_per_token, plan, run_id, validate
from kvladder.config.yaml import ConfigError, load_file

ROOT = Path(__file__).parents[2]


@pytest.fixture
def data() -> dict[str, Any]:
    return load_file(ROOT / "config" / "config.yaml")


def refused(data: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        validate(data)
    return str(caught.value)


@pytest.mark.parametrize(
    "path",
    # The truth bench is an experiment of another kind: tests/unit/test_bench_truth.py.
    sorted(set((ROOT / "config").glob("*.yaml")) - {ROOT / "config" / "client-truth.yaml"}),
    ids=lambda path: path.name,
)
def test_every_shipped_config_is_valid(path: Path) -> None:
    assert validate(load_file(path)).setups


def test_unknown_key_is_named(data: dict[str, Any]) -> None:
    data["setups"]["lmcache-mp"]["cpu_byte"] = 1
    message = refused(data)
    assert "setups.lmcache-mp.cpu_byte: unknown key 'cpu_byte'" in message


def test_wrong_type_shows_key_and_value(data: dict[str, Any]) -> None:
    data["engine"]["max_model_len"] = "many"
    assert "engine.max_model_len:" in refused(data)
    assert "'many'" in refused(data)


@pytest.mark.parametrize(
    ("size", "value"), [("1e9", 10**9), (1e9, 10**9), ("8GiB", 8 * 2**30), ("147.4GB", 147_400_000_000), (64, 64)]
)
def test_sizes(data: dict[str, Any], size: Any, value: int) -> None:
    data["setups"]["native-host"]["cpu_bytes"] = size
    assert validate(data).setups["native-host"].cpu_bytes == value


@pytest.mark.parametrize("size", ["8 bananas", "GiB", 0.5, "1.5B", -1])
def test_bad_sizes_are_refused_with_the_key(data: dict[str, Any], size: Any) -> None:
    data["setups"]["native-host"]["cpu_bytes"] = size
    assert "setups.native-host.cpu_bytes" in refused(data)


@pytest.mark.parametrize("name", ["port", "--host", "served_model_name", "api-key", "model"])
def test_arguments_that_are_our_own_are_refused(data: dict[str, Any], name: str) -> None:
    data["setups"]["plain"]["args"] = {name: 1}
    assert f"setups.plain.args: {name!r} is set by kvladder" in refused(data)


def test_unknown_kind_lists_what_there_is(data: dict[str, Any]) -> None:
    data["setups"]["x"] = {"kind": "nativ"}
    assert "unknown kind 'nativ'" in refused(data)
    assert "lmcache-mp, lmcache-v1, mooncake-store, native" in refused(data)
    data["setups"]["x"] = {"kind": "base"}
    assert "unknown kind 'base'" in refused(data)


def test_unknown_workload_in_a_suite(data: dict[str, Any]) -> None:
    data["suites"] = {"main": ["repeat", "brust"]}
    assert "suites.main: unknown workload 'brust'; workloads are: repeat, burst" in refused(data)


def test_prompt_longer_than_the_model(data: dict[str, Any]) -> None:
    data["workloads"]["repeat"]["prompt_tokens"] = 4096
    assert "workloads.repeat: prompt and output are 4097 tokens, engine.max_model_len is 4096" in refused(data)


def test_pool_too_small_for_one_prompt(data: dict[str, Any]) -> None:
    data["engine"]["kv_pool_bytes"] = "8MiB"
    assert "workloads.repeat: one request needs 3081 tokens of KV, the pool holds 2048" in refused(data)


def test_the_folder_of_published_results_is_no_experiment(data: dict[str, Any]) -> None:
    data["experiment"] = "published"
    assert "experiment: 'published' is the folder of published results" in refused(data)


def test_the_gate_on_raw_files_cannot_be_switched_off(data: dict[str, Any]) -> None:
    data["gates"] = {"off": ["raw-files-intact"]}
    assert "gates.off: raw-files-intact always decides" in refused(data)


def test_baseline_must_be_a_setup(data: dict[str, Any]) -> None:
    del data["setups"]["plain"]
    assert "baseline: 'plain' is no setup" in refused(data)


@pytest.mark.parametrize("name", ["native+fs", "v1.0", "a_b-c", "x" * 100, "9"])
def test_setup_names_that_work(data: dict[str, Any], name: str) -> None:
    data["setups"][name] = {"kind": "plain"}
    assert name in validate(data).setups


@pytest.mark.parametrize(
    "name", ["fp8(e4m3)", "org/model", "..", ".", "a b", "x{y}", "[1-K_9-2]", "", "-a", "a.", "x" * 101, "é"]
)
def test_setup_names_that_are_refused(data: dict[str, Any], name: str) -> None:
    data["setups"][name] = {"kind": "plain"}
    assert "setups" in refused(data)


def test_run_id_changes_with_what_defines_the_trial_and_nothing_else(data: dict[str, Any]) -> None:
    base = validate(data)
    ids = {setup: run_id(base, setup, "main") for setup in base.setups}
    assert len(set(ids.values())) == len(ids)
    other = copy.deepcopy(data)
    other["setups"]["lmcache-mp"]["chunk_tokens"] = 512
    other["title"] = "Another heading"
    other["setups"]["plain"]["title"] = "No cache at all"
    other["setups"]["native-host"]["eviction"] = "lru"  # the default, said aloud
    other["repeats"] = 9
    other["gates"] = {"advisory": ["quiet-host"]}
    changed = validate(other)
    assert {setup for setup in ids if run_id(changed, setup, "main") != ids[setup]} == {"lmcache-mp"}
    other["engine"]["max_num_seqs"] = 4
    assert all(run_id(validate(other), setup, "main") != ids[setup] for setup in ids)


def test_client_processes(data: dict[str, Any]) -> None:
    base = validate(data)
    data["load"] = {"processes": 2, "cores": [3, 5]}
    assert run_id(validate(data), "plain", "main") != run_id(base, "plain", "main")
    data["load"] = {"processes": 1, "cores": []}  # the default, said aloud
    assert run_id(validate(data), "plain", "main") == run_id(base, "plain", "main")
    for load in ({"cores": [3, 5]}, {"processes": 2, "cores": [3, 3]}, {"processes": 3, "cores": [1, 2]}):
        data["load"] = load
        assert "client processes need as many different cores" in refused(data)
    data["load"] = {"processes": 0}
    assert "load.processes" in refused(data)


def test_plan_is_blocked_seeded_and_stable_under_more_repeats(data: dict[str, Any]) -> None:
    three = plan(validate(data))
    data["repeats"] = 5
    five = plan(validate(data))
    assert five[: len(three)] == three
    assert [trial.order for trial in five] == list(range(len(five)))
    setups = sorted(data["setups"])
    for block in range(5):
        assert sorted(trial.setup for trial in five if trial.repeat == block) == setups
    orders = {tuple(trial.setup for trial in five if trial.repeat == block) for block in range(5)}
    assert len(orders) > 1
    data["seed"] = 1
    assert [trial.setup for trial in plan(validate(data))] != [trial.setup for trial in five]


def test_kv_bytes_of_nested_and_unknown_shapes() -> None:
    nested = {
        "vision_config": {"num_hidden_layers": 24},
        "text_config": {
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "hidden_size": 1024,
            "head_dim": 128,
        },
    }
    assert kv_bytes_per_token(nested, "bfloat16") == 114_688
    assert kv_bytes_per_token({"n_layer": 12, "n_head": 12, "n_embd": 768}, "float32") == 2 * 12 * 768 * 4
    assert kv_bytes_per_token({"vision_config": {"num_hidden_layers": 24}}, "bfloat16") is None


@pytest.mark.parametrize(
    "shape",
    [
        {"text_config": [28]},
        {"num_hidden_layers": "28", "num_attention_heads": 16, "hidden_size": 1024},
        {"num_hidden_layers": -28, "num_attention_heads": 16, "hidden_size": 1024},
        {"num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": "8", "hidden_size": 1024},
        {"num_hidden_layers": 28, "num_attention_heads": 0, "hidden_size": 1024},
    ],
)
def test_kv_bytes_of_sizes_that_are_none(shape: dict[str, Any]) -> None:
    """C22's kind: a size of another type is unknown, no crash and no number made of text."""
    assert kv_bytes_per_token(shape, "bfloat16") is None


@pytest.mark.parametrize("where", ["load.drain_s", "load.stall_s", "engine.ready_s", "gates.right_kv_control"])
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_numbers_without_end_are_refused(data: dict[str, Any], where: str, value: float) -> None:
    part, key = where.split(".")
    data.setdefault(part, {})[key] = value
    message = refused(data)
    assert where in message
    assert str(value) in message


def test_right_kv_output_longer_than_the_model(data: dict[str, Any]) -> None:
    """The engine would refuse it when everything else is measured."""
    longest = data["engine"]["max_model_len"]
    data["right_kv"] = {"output_tokens": longest}
    message = refused(data)
    assert f"right_kv.output_tokens: {longest}, at most" in message


def test_prompts_that_nothing_can_hit_are_said_before_anything_runs(data: dict[str, Any]) -> None:
    """C23: blocks of 2,768 tokens, prompts of 2,000 and 6,000."""
    data["engine"].update(block_size=2768, max_model_len=8192, kv_pool_bytes="1TB")
    data["setups"] = {"plain": {"kind": "plain"}, "prefix-cache": {"kind": "prefix-cache"}}
    data["workloads"] = {
        name: {"kind": "repeat", "prompt_tokens": tokens} for name, tokens in (("short", 2000), ("long", 6000))
    }
    data["suites"] = None
    (warning,) = validate(data).short_prompts()
    assert warning.startswith(
        "workloads.short: its prompts have 2000 tokens at most and prefix-cache hits in units of 2768: nothing"
    )


@pytest.mark.parametrize("name", ["config.yaml", "offload.yaml"])
def test_shipped_prompts_can_be_hit(name: str) -> None:
    assert validate(load_file(ROOT / "config" / name)).short_prompts() == []


def test_weights_and_their_source_go_together(data: dict[str, Any]) -> None:
    data["model"]["path"] = "some/model"
    assert "`path` goes with weights: checkpoint" in refused(data)
    data["model"] = {"weights": "seeded"}
    assert "`shape` goes with weights: seeded or dummy" in refused(data)
