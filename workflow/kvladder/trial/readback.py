"""What running servers say of themselves: the evidence behind config-readback, equal-kv-pool and native-code-loaded."""

from __future__ import annotations

import http.client
import json
import re
from pathlib import Path
from typing import Any

from kvladder.config.records import EffectiveConfig
from kvladder.counters.reading import engine_name
from kvladder.serving.process import ManagedProcess, ServerGroup
from kvladder.serving.readback import mapped_modules
from kvladder.setups.base import SetupConfig, SetupContext

_POOL = re.compile(r"\b[CG]PU KV cache size: ([\d,]+) tokens")
_CREATED = re.compile(r"Creating v1 connector with name: (\w+)")
_THREADS = re.compile(r"leaving Torch threads at (\d+) for serving")
_TIMEOUT_S = 60


def kv_pool_tokens(log: str) -> int | None:
    """Device KV pool in tokens, from the engine's own log line; the last one counts, None where there is none."""
    sizes = _POOL.findall(log)
    return int(sizes[-1].replace(",", "")) if sizes else None


def engine_version(log: str) -> str | None:
    """vLLM's version, from its own log line; None where there is none."""
    match = re.search(r"Initializing a V1 LLM engine \(v([^)\s]+)\)", log)
    return match[1] if match else None


def connectors_created(log: str) -> list[str]:
    """Connectors that the engine says it made, sorted, each once."""
    return sorted(set(_CREATED.findall(log)))


def server_info(port: int, api_key: str) -> dict[str, Any] | None:
    """The engine's effective configuration (development endpoint); None where it doesn't answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_TIMEOUT_S)
    try:
        connection.request("GET", "/server_info?config_format=json", headers={"Authorization": f"Bearer {api_key}"})
        response = connection.getresponse()
        body = response.read()
        info = json.loads(body) if response.status == http.client.OK else None
    except (OSError, http.client.HTTPException, ValueError):
        return None
    finally:
        connection.close()
    return info if isinstance(info, dict) else None


def read_back(
    setup: SetupConfig, context: SetupContext, group: ServerGroup, info: dict[str, Any] | None
) -> EffectiveConfig:
    """Effective configuration of the context's engine and the setup's side processes; what can't be read is None.

    ``info`` is the engine's answer to `server_info`.
    """
    config = (info or {}).get("vllm_config", {})
    if not isinstance(config, dict):
        config = {}
    cache = config.get("cache_config") or {}
    transfer = config.get("kv_transfer_config") or {}
    log = _text(context.log)
    pool = kv_pool_tokens(log)
    block = cache.get("block_size")
    per_token = context.kv_bytes_per_token
    capacity = {} if pool is None else {"gpu": pool}
    if per_token:
        capacity |= {tier: size // per_token for tier, size in setup.capacity_bytes().items()}
    wanted = [re.compile(text) for text in context.stack.native_patterns(setup.native_modules())]
    return EffectiveConfig(
        kv_pool_tokens=pool,
        block_size=block if isinstance(block, int) else None,
        connector=transfer.get("kv_connector"),
        connector_config=transfer.get("kv_connector_extra_config"),
        prefix_caching=cache.get("enable_prefix_caching"),
        engine_version=engine_version(log),
        modules=mapped_modules(_own_tree(context, group), wanted),
        capacity_tokens=capacity,
        details={
            "settings": _settings(setup, "\n".join([log, *(_text(each.spec.log) for each in _beside(context, group))])),
            "connectors_created": connectors_created(log),
            "threads": _threads(log),
            "num_gpu_blocks": cache.get("num_gpu_blocks"),
            "kv_cache_memory_bytes": cache.get("kv_cache_memory_bytes"),
            "max_model_len": (config.get("model_config") or {}).get("max_model_len"),
            "max_num_seqs": (config.get("scheduler_config") or {}).get("max_num_seqs"),
            "max_num_batched_tokens": (config.get("scheduler_config") or {}).get("max_num_batched_tokens"),
            "load_format": (config.get("load_config") or {}).get("load_format"),
        },
    )


def _own_tree(context: SetupContext, group: ServerGroup) -> list[int]:
    """Pids of the context's engine and of side processes: another engine's extensions are no evidence for this one."""
    own = [*_beside(context, group), group.named(context.server)]
    return [pid for process in own for pid in process.tree()]


def _beside(context: SetupContext, group: ServerGroup) -> list[ManagedProcess]:
    """Side processes."""
    engines = {engine_name(number) for number in range(context.engines)}
    return [process for process in group if process.name not in engines]


def _settings(setup: SetupConfig, log: str) -> dict[str, Any]:
    """Of the configuration past the engine's arguments, what was asked for; None where nobody says."""
    said = setup.settings_read(log) or {}
    return {key: said.get(key) for key in setup.settings()}


def _threads(log: str) -> int | None:
    match = _THREADS.search(log)
    return int(match[1]) if match else None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
