"""Servers start with what a trial needs, for every kind of user."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvladder.serving import environment
from kvladder.serving.environment import child_env, ignored_variables


def test_user_without_name_and_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment.os, "getuid", lambda: 424242)
    inherited = {"PATH": os.environ["PATH"], "HOME": "/nonexistent"}
    env = child_env(tmp_path / "caches", inherited=inherited)
    assert env["USER"] == env["LOGNAME"] == "uid424242"
    assert Path(env["HOME"]).is_dir() and os.access(env["HOME"], os.W_OK)
    for name in ("XDG_CACHE_HOME", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "VLLM_CACHE_ROOT", "MPLCONFIGDIR"):
        assert Path(env[name]).is_dir() and Path(env[name]).is_relative_to(tmp_path), name
    # What raised inside `import torch`, in a process that really has this environment.
    code = "import getpass, pathlib; p = pathlib.Path.home() / 'x'; p.touch(); print(getpass.getuser(), p)"
    out = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True).stdout
    assert out.split() == ["uid424242", f"{env['HOME']}/x"]


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become a user without passwd entry")
def test_really_another_uid(tmp_path: Path) -> None:
    code = (
        "import os, sys, pathlib\n"
        "from kvladder.serving.environment import child_env\n"
        "from kvladder.serving import locks\n"
        "os.setgid(424242); os.setuid(424242)\n"
        "env = child_env(pathlib.Path(sys.argv[1]), inherited={'HOME': '/'})\n"
        "locks._BASES = (sys.argv[1],)\n"
        "print(env['USER'], env['HOME'], locks.runtime_folder('ports'))\n"
    )
    folder = tmp_path / "results"
    folder.mkdir()
    folder.chmod(0o777)
    for parent in list(folder.parents)[:-2]:
        parent.chmod(parent.stat().st_mode | 0o005)
    out = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=True).stdout
    assert out.split() == ["uid424242", f"{folder}/home", f"{folder}/kvladder-424242/ports"]


def test_a_real_home_is_kept_with_its_models(tmp_path: Path) -> None:
    home = tmp_path / "home"
    (home / ".cache" / "huggingface").mkdir(parents=True)
    env = child_env(tmp_path / "caches", inherited={"HOME": str(home), "USER": "ann"})
    assert env["HOME"] == str(home) and env["USER"] == "ann"
    assert env["HF_HOME"] == str(home / ".cache" / "huggingface"), "XDG_CACHE_HOME is moved, local models aren't"
    assert child_env(tmp_path / "caches", inherited={"HF_HOME": "/models"})["HF_HOME"] == "/models"


def test_settings_of_the_shell_do_not_leak_into_trials(tmp_path: Path) -> None:
    inherited = {
        "VLLM_ATTENTION_BACKEND": "X",
        "LMCACHE_CHUNK_SIZE": "1",
        "PYTHONPATH": "/x",
        "HF_TOKEN": "hf_secret",
        "Https_Proxy": "http://p:1",
        "HTTP_PROXY": "http://p:1",
        "LD_LIBRARY_PATH": "/cuda/lib",
        "no_proxy": "intranet, 10.0.0.1",
    }
    env = child_env(tmp_path, {"VLLM_SERVER_DEV_MODE": "1", "HTTPS_PROXY": "http://asked:1"}, inherited)
    for name in ("VLLM_ATTENTION_BACKEND", "LMCACHE_CHUNK_SIZE", "PYTHONPATH", "HF_TOKEN", "Https_Proxy", "HTTP_PROXY"):
        assert name not in env
    assert env["LD_LIBRARY_PATH"] == "/cuda/lib"
    assert env["VLLM_SERVER_DEV_MODE"] == "1" and env["HTTPS_PROXY"] == "http://asked:1"
    assert env["NO_PROXY"] == env["no_proxy"] == "intranet,10.0.0.1,127.0.0.1,localhost,::1"
    assert "HF_TOKEN" in ignored_variables(inherited) and "LD_LIBRARY_PATH" not in ignored_variables(inherited)


def test_no_telemetry_and_equal_hash_seeds(tmp_path: Path) -> None:
    env = child_env(tmp_path, inherited={"PYTHONHASHSEED": "random", "DO_NOT_TRACK": "0"})
    assert env["VLLM_NO_USAGE_STATS"] == env["DO_NOT_TRACK"] == env["HF_HUB_OFFLINE"] == env["PYTHONUTF8"] == "1"
    assert env["LMCACHE_TRACK_USAGE"] == "false" and env["PYTHONHASHSEED"] == "0"
