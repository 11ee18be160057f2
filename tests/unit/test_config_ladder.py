"""Sizes that follow from others, a device cache above a tier, GPUs that share a model; the ladders that come along."""

from __future__ import annotations

import math
import shutil
from array import array
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from kvladder.config.experiment import EngineConfig, ExperimentConfig, plan, run_id, validate
from kvladder.config.stack import StackConfig
from kvladder.config.traffic import PassName, PassPlan, Prefix, Request
from kvladder.config.yaml import ConfigError, load_file
from kvladder.setups.base import SetupConfig, SetupContext
from kvladder.trial.engine import arguments
from kvladder.trial.session import Session

CONFIGS = Path(__file__).parents[2] / "config"
POOL_BYTES = 32 * 128 * 4096
"""Of the demo ladder: 32 blocks of 128 tokens, 4 KiB of KV each."""


@pytest.fixture
def data() -> dict[str, Any]:
    return load_file(CONFIGS / "demo-ladder.yaml")


def refused(data: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        validate(data)
    return str(caught.value)


def setup(config: ExperimentConfig, name: str) -> SetupConfig:
    made = config.setups[name]
    assert isinstance(made, SetupConfig)
    return made


def test_a_tier_as_a_multiple_of_the_device_pool(data: dict[str, Any]) -> None:
    config = validate(data)
    assert setup(config, "gpu-cpu").capacity_bytes() == {"cpu": 2 * POOL_BYTES}
    assert config.model_dump(mode="json")["setups"]["gpu-cpu"]["cpu_bytes"] == 2 * POOL_BYTES
    # The number counts, however it was written.
    written = {**data, "setups": {**data["setups"], "gpu-cpu": {**data["setups"]["gpu-cpu"]}}}
    written["setups"]["gpu-cpu"]["cpu_bytes"] = "32MiB"
    assert run_id(validate(written), "gpu-cpu", "ladder") == run_id(config, "gpu-cpu", "ladder")


@pytest.mark.parametrize(
    ("size", "message"),
    [
        ({"gpu": 0}, "X above 0"),
        ({"gpu": "2"}, "X above 0"),
        ({"gpu": True}, "X above 0"),
        ({"gpu": math.inf}, "X above 0"),
        ({"gpu": math.nan}, "X above 0"),
        ({"cpu": 2.0}, "`{gpu: X}`"),
        ({"gpu": 1.0, "cpu": 1.0}, "`{gpu: X}`"),
        ("2 pools", "a size is a number"),
    ],
)
def test_sizes_that_are_none(data: dict[str, Any], size: Any, message: str) -> None:
    data["setups"]["gpu-cpu"]["cpu_bytes"] = size
    text = refused(data)
    assert "setups.gpu-cpu.cpu_bytes" in text and message in text


def test_a_multiple_of_a_pool_that_only_the_engine_knows(data: dict[str, Any]) -> None:
    del data["engine"]["block_size"]
    assert "the device pool's bytes aren't known here" in refused(data)


def test_a_pool_in_bytes_is_that_of_all_gpus(data: dict[str, Any]) -> None:
    del data["engine"]["kv_pool_blocks"]
    one = validate(data)
    two = validate({**data, "engine": {**data["engine"], "tensor_parallel": 2}})
    assert one.pool_tokens() == (64 << 20) // 4096 and two.pool_tokens() == 2 * (64 << 20) // 4096
    assert setup(two, "gpu-cpu").capacity_bytes()["cpu"] == 4 * (64 << 20)


def test_a_pool_of_conversations_needs_one_size_of_the_tier(data: dict[str, Any]) -> None:
    """Every setup of a block is sent the same: what is a multiple of one setup's tier must be one of the others'."""
    data["workloads"]["pool-4x"] = {**data["workloads"]["pool-4x"], "pool": {"cpu": 2.0}}
    config = validate(data)
    assert config.host_tier_bytes() == {2 * POOL_BYTES}
    data["setups"]["gpu-cpu"]["cpu_bytes"] = "64MiB"
    message = refused(data)
    assert "workloads.pool-4x" in message and "33554432 B, 67108864 B" in message
    for name in ("gpu-cpu", "gpu-cpu-nvme", "lmcache-cpu-nvme"):
        del data["setups"][name]
    assert "there are: none" in refused(data)


@pytest.mark.parametrize(
    ("name", "more", "resets"),
    [
        ("gpu", {}, {}),
        ("gpu-apc", {}, {}),
        ("gpu-cpu", {}, {"first-hit": "device", "warm": "device"}),
        ("gpu-cpu", {"prefix_caching": False}, {}),
        ("gpu-cpu-nvme", {}, {"first-hit": "device", "warm": "device"}),
        ("gpu-cpu-nvme", {"files": {}}, {"first-hit": "host", "warm": "device"}),
    ],
)
def test_what_is_emptied_so_that_the_tier_is_hit(
    data: dict[str, Any], name: str, more: dict[str, Any], resets: dict[str, str]
) -> None:
    """Nothing before a mixed pass: all tiers serve it."""
    data["setups"][name] |= more
    made = setup(validate(data), name)
    names: tuple[PassName, ...] = ("cold", "first-hit", "warm", "mixed")
    assert {each: reset for each in names if (reset := made.reset_before(each)) is not None} == resets
    tiers = made.hierarchy(128, {"gpu": 4096, "cpu": 8192}, "0.32.0")
    assert (tiers.device is not None) == (name == "gpu-apc" or (name != "gpu" and made.prefix_caching))


@pytest.mark.parametrize(("name", "value"), [("gpu", True), ("gpu-apc", False)])
def test_a_device_cache_that_is_what_a_setup_is(data: dict[str, Any], name: str, value: bool) -> None:
    data["setups"][name]["prefix_caching"] = value
    assert f"setups.{name}.prefix_caching" in refused(data)


def test_engines_get_the_cache_and_the_gpus(tmp_path: Path) -> None:
    config = validate(load_file(CONFIGS / "ladder-qwen35b.yaml"))
    context = SetupContext(
        engine=config.engine,
        model=config.model,
        model_dir=tmp_path,
        stack=StackConfig(python="3.12", device="cuda", engine="vllm", engine_version="0.26.0"),
        python=tmp_path / "python",
        bin_dir=tmp_path,
        folder=tmp_path,
        namespace="n",
        port=lambda _: 21000,
        kv_bytes_per_token=None,
    )
    told = arguments(setup(config, "gpu-cpu"), context)
    assert told["tensor-parallel-size"] == 2 and "enable-prefix-caching" in told
    assert told["kv-cache-memory-bytes"] == 36_850_000_000
    alone = EngineConfig(max_model_len=16, kv_pool_bytes=1)
    assert arguments(setup(config, "gpu"), replace(context, engine=alone))["tensor-parallel-size"] is None


def test_a_trial_whose_files_may_not_fit_the_disk_does_not_start(tmp_path: Path, data: dict[str, Any]) -> None:
    text = array("I", range(1000))
    requests = [Request(turn, f"c0-t{turn}", Prefix(text, 500 * (turn + 1)), 1) for turn in range(2)]
    requests.append(Request(2, "p", array("I", range(99)), 1))
    free = shutil.disk_usage(tmp_path).free
    for per_token, fits in ((free // 1200, True), (free // 1000, False), (None, True)):
        session = Mock(spec=Session)
        session.setup = setup(validate(data), "gpu-cpu-nvme")
        session.context = SimpleNamespace(folder=tmp_path / "not" / "yet", kv_bytes_per_token=per_token)
        session.failed = RuntimeError
        plans = [PassPlan("w", "mixed", 0, 1, requests)]
        if fits:
            Session.check_room(session, plans)
            continue
        with pytest.raises(RuntimeError, match=f"may need .* MiB, and {tmp_path} has"):
            # 1,002 tokens of the conversation and 100 of the other prompt: ids of both turns once, each one's answer.
            Session.check_room(session, plans)


@pytest.mark.parametrize(("shared", "tokens"), [(False, 2 * 110), (True, 110)])
def test_each_engine_fills_the_disk_with_what_it_is_sent(tmp_path: Path, shared: bool, tokens: int) -> None:
    requests = [Request(0, "p0", array("I", range(100)), 10)]
    plans = [PassPlan("w", name, 0, 1, requests, engine=engine) for name, engine in (("cold", 0), ("warm", 1))]
    session = Mock(spec=Session)
    session.setup = Mock(shares_pool=shared, disk_folder=lambda context: tmp_path)
    session.context = SimpleNamespace(kv_bytes_per_token=10**12)
    session.failed = RuntimeError
    with pytest.raises(RuntimeError, match=f"may need {tokens * 10**12 >> 20:,} MiB"):
        Session.check_room(session, plans)


@pytest.mark.parametrize(
    ("name", "trials", "pools"),
    [
        ("ladder", 3 * 4 * 5, [{"gpu": 0.6}, {"gpu": 1.2}, {"gpu": 1.8}, {"gpu": 4.0}]),
        ("demo-ladder", 5, [{"gpu": 0.6}, {"gpu": 1.6}, {"gpu": 4.0}]),
        ("ladder-qwen35b", 4 * 11, [16, 32, 48, 64, 96, 128, 192, 256, 384, 448, 512]),
    ],
)
def test_ladders_that_come_along(name: str, trials: int, pools: list[Any]) -> None:
    """What the seed ran is there as it ran it, and every trial is known before a capacity is."""
    config = validate(load_file(CONFIGS / f"{name}.yaml"))
    assert len(plan(config)) == trials
    assert [workload.pool for workload in config.workloads.values()] == pools
    assert [each.prefix_caching for each in config.setups.values()][:4] == [False, True, True, True]
    assert all(each.prefix_caching for name, each in config.setups.items() if name.startswith("lmcache"))
    if name == "ladder-qwen35b":
        (size,) = config.host_tier_bytes()
        assert size == 147_400_000_000 == pytest.approx(2 * (config.engine.pool_bytes(config.model) or 0))
        assert {workload.conversation_tokens for workload in config.workloads.values()} == {40_967}
        assert config.engine.tensor_parallel == 2
