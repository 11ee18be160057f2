"""The whole pipeline on real vLLM: a tiny model, two setups, one of them with a tier. Nothing here is simulated."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
STAMP = ROOT / "envs" / "cpu" / ".venv" / "kvladder-stamp.json"
PROMPT, HIT = 1032, 1024

CONFIG: dict[str, Any] = {
    "experiment": "tiny-engine",
    "stack": "cpu",
    "repeats": 1,
    "start": "folded",
    "model": {
        "seed": 7,
        "shape": {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": 256,
            "intermediate_size": 512,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "vocab_size": 4096,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "hidden_act": "silu",
            "bos_token_id": 0,
            "eos_token_id": 1,
        },
    },
    "engine": {
        "max_model_len": 2048,
        "max_num_batched_tokens": 2048,
        "max_num_seqs": 4,
        "kv_pool_bytes": "8MiB",
        "cpu_threads": "0-1",
        "env": {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
    },
    # A test machine is busy with other tests: what only judges its speed must not decide here.
    "gates": {"advisory": ["client-not-saturated", "quiet-host", "concurrency-held"]},
    "setups": {
        "plain": {"kind": "plain"},
        "native-host-fs": {"kind": "native", "copier": "host", "cpu_bytes": "16MiB", "files": {}},
    },
    "workloads": {
        "repeat": {"kind": "repeat", "prompt_tokens": PROMPT, "warm_passes": 2},
        "burst": {"kind": "burst", "requests": 3, "prompt_tokens": PROMPT, "warm_passes": 1},
    },
    "suites": {"main": ["repeat", "burst"]},
}


def run_pipeline(config: dict[str, Any], folder: Path, *targets: str, timeout: float) -> None:
    """Run an experiment in this folder to its end, or to the ``targets``."""
    if not STAMP.is_file():
        pytest.fail("the cpu stack isn't installed: run `make setup`")
    (folder / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    argv = [sys.executable, "-m", "snakemake", *targets, "--snakefile", str(ROOT / "workflow" / "Snakefile")]
    argv += ["--directory", str(folder), "--configfile", str(folder / "config.yaml"), "--cores", "2"]
    done = subprocess.run(
        argv, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout, check=False
    )
    assert done.returncode == 0, done.stdout[-6000:]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The finished run's working folder."""
    folder = tmp_path_factory.mktemp("engine")
    run_pipeline(CONFIG, folder, timeout=900)
    return folder


def trial(run: Path, setup: str) -> Path:
    (folder,) = (run / "results" / "tiny-engine" / "trials" / setup / "main").iterdir()
    return folder


def verdict(run: Path, setup: str) -> dict[str, Any]:
    return json.loads((trial(run, setup) / "verdict.json").read_text(encoding="utf-8"))


def sources(by_source: dict[str, int]) -> dict[str, int]:
    """Where tokens came from, without the tiers that gave none."""
    return {tier: count for tier, count in by_source.items() if count}


@pytest.mark.engine
def test_both_trials_are_valid(run: Path) -> None:
    for setup in CONFIG["setups"]:
        found = verdict(run, setup)
        assert found["status"] == "valid", found["reason"]


@pytest.mark.engine
def test_hits_come_from_the_tier_and_nowhere_else(run: Path) -> None:
    windows = {(w["workload"], w["name"]): w["by_source"] for w in verdict(run, "native-host-fs")["windows"]}
    assert windows["repeat", "cold"]["computed"] == PROMPT
    # Host memory is emptied before the first hit, so that one comes from disk and the next from host memory.
    assert sources(windows["repeat", "first-hit"]) == {"nvme": HIT, "computed": PROMPT - HIT}
    assert sources(windows["repeat", "warm"]) == {"cpu": HIT, "computed": PROMPT - HIT}
    assert sources(windows["burst", "first-hit"]) == {"nvme": 3 * HIT, "computed": 3 * (PROMPT - HIT)}
    plain = verdict(run, "plain")["windows"]
    assert all(window["by_source"]["computed"] == window["prompt_tokens"] for window in plain)


@pytest.mark.engine
def test_a_hit_is_faster_than_computing(run: Path) -> None:
    lines = (trial(run, "native-host-fs") / "repeat.requests.jsonl").read_text(encoding="utf-8").splitlines()
    ttft: dict[str, list[int]] = {}
    for record in map(json.loads, lines):
        ttft.setdefault(record["pass"], []).append(record["first_token_ns"] - record["send_ns"])
    # A single hit may have waited for a processor.
    assert 0 < min(ttft["warm"]) < min(ttft["cold"])


@pytest.mark.engine
def test_report_is_built_and_names_what_is_ours(run: Path) -> None:
    html = (run / "reports" / "tiny-engine.html").read_text(encoding="utf-8")
    assert "own host copier" in html
    assert (run / "reports" / "tiny-engine.pdf").read_bytes().startswith(b"%PDF")


@pytest.mark.engine
def test_nothing_is_left(run: Path) -> None:
    record = json.loads((trial(run, "native-host-fs") / "trial.json").read_text(encoding="utf-8"))
    assert not (trial(run, "native-host-fs") / "tier").exists()
    pids = [server["pid"] for server in record["servers"]]
    assert pids
    assert not any(Path("/proc", str(pid)).exists() for pid in pids)
    assert not [name for name in os.listdir("/dev/shm") if "tiny-engine" in name]  # noqa: PTH208
