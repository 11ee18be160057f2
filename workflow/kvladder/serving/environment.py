"""The environment that servers start with: inherited, minus what would silently change a trial, plus what must hold."""

from __future__ import annotations

import os
import pwd
from collections.abc import Mapping
from pathlib import Path

LOOPBACK = ("127.0.0.1", "localhost", "::1")

_PROXIES = ("http_proxy", "https_proxy", "ftp_proxy", "all_proxy", "no_proxy", "grpc_proxy", "no_grpc_proxy")
# Settings of the engines, of another interpreter, or of the workflow: a trial takes them from its config only.
_IGNORED_PREFIXES = ("VLLM_", "LMCACHE_", "MOONCAKE_", "MC_", "PYTHON", "KVLADDER_")
_IGNORED_NAMES = ("VIRTUAL_ENV", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HUGGINGFACE_HUB_TOKEN")

_FIXED = {
    "PYTHONHASHSEED": "0",  # KV block hashes have to agree between the processes of a setup
    "PYTHONUTF8": "1",
    "PYTHONUNBUFFERED": "1",  # a crash must not take the last log lines along
    "PYTHONNOUSERSITE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
    "DO_NOT_TRACK": "1",
    "LMCACHE_TRACK_USAGE": "false",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}

_CACHES = {
    "XDG_CACHE_HOME": "xdg",
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "torchinductor",
    "VLLM_CACHE_ROOT": "vllm",
    "VLLM_CONFIG_ROOT": "vllm-config",
    "MPLCONFIGDIR": "matplotlib",
    "CUDA_CACHE_PATH": "cuda",
    "NUMBA_CACHE_DIR": "numba",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
}


def ignored_variables(inherited: Mapping[str, str] | None = None) -> list[str]:
    """Return the names of inherited variables that servers don't get, sorted; for a note to the user."""
    source = os.environ if inherited is None else inherited
    return sorted(
        name
        for name in source
        if name.startswith(_IGNORED_PREFIXES) or name in _IGNORED_NAMES or name.lower() in _PROXIES
    )


def child_env(
    caches: Path, extra: Mapping[str, str] | None = None, inherited: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return the full environment of a server.

    ``caches`` is a folder for every compile and download cache (made if missing; one a stack, so that trials share
    warm caches); ``extra`` wins over everything but the loopback exemption from proxies; ``inherited`` is this
    process's environment by default. Works for a user without name, home or a home that can be written.
    Raises OSError when ``caches`` can't be made.
    """
    source = dict(os.environ if inherited is None else inherited)
    env = {name: value for name, value in source.items() if name not in set(ignored_variables(source))}
    caches = caches.absolute()
    home = _home(source, caches)
    env |= {"HOME": str(home), "HF_HOME": str(_hf_home(source, home, caches))}
    user = source.get("USER") or source.get("LOGNAME") or _user_name()
    env |= {"USER": user, "LOGNAME": source.get("LOGNAME") or user}
    for variable, folder in _CACHES.items():
        path = caches / folder
        path.mkdir(parents=True, exist_ok=True)
        env[variable] = str(path)
    env.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")  # so that ids mean what NVML means by them
    env |= _FIXED
    env |= extra or {}
    # Programs read one case or the other, so both get the same.
    named = [source.get("NO_PROXY"), source.get("no_proxy"), env.get("NO_PROXY"), env.get("no_proxy"), *LOOPBACK]
    hosts = [host.strip() for text in named if text for host in text.split(",")]
    env["NO_PROXY"] = env["no_proxy"] = ",".join(dict.fromkeys(host for host in hosts if host))
    return env


def _user_name() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return f"uid{os.getuid()}"


def _home(source: Mapping[str, str], caches: Path) -> Path:
    name = source.get("HOME")
    if not name:
        try:
            name = pwd.getpwuid(os.getuid()).pw_dir
        except KeyError:
            name = ""
    home = Path(name)
    if name and home != Path("/") and home.is_dir() and os.access(home, os.W_OK | os.X_OK):
        return home
    made = caches / "home"
    made.mkdir(parents=True, exist_ok=True)
    return made


def _hf_home(source: Mapping[str, str], home: Path, caches: Path) -> Path:
    """Keep the user's own Hugging Face folder in sight: a local model may lie there, and nothing is downloaded."""
    if named := source.get("HF_HOME"):
        return Path(named)
    xdg = source.get("XDG_CACHE_HOME")
    own = (Path(xdg) if xdg else home / ".cache") / "huggingface"
    return own if os.access(own, os.R_OK | os.X_OK) else caches / "huggingface"
