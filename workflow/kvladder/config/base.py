"""Field types and base classes shared by every configuration and record model."""

from __future__ import annotations

import math
import re
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints, ValidationInfo

_UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?(?:[eE][+]?[0-9]+)?)\s*([A-Za-z]*)\s*")


def parse_size(value: Any) -> Any:
    """Turn ``"8GiB"``, ``"147.4GB"`` or ``1e9`` into bytes (int); other values pass through for pydantic to judge.

    Raises ValueError for an unknown unit or a size that is no whole number of bytes.
    """
    if isinstance(value, str):
        match = _SIZE.fullmatch(value)
        if match is None or match[2].upper() not in _UNITS:
            raise ValueError(
                "a size is a number of bytes or a number with one of B, KB, MB, GB, TB, KiB, MiB, GiB, TiB"
            )
        value = float(match[1]) * _UNITS[match[2].upper()]
    if isinstance(value, float):
        if not value.is_integer():
            raise ValueError("a size must be a whole number of bytes")
        return int(value)
    return value


Bytes = Annotated[int, BeforeValidator(parse_size), Field(ge=0)]
"""A size in bytes; accepts ``8GiB`` style strings."""

POOL_BYTES = "kv_pool_bytes"
"""Key of the validation context under which the device pool's size stands."""


def tier_size(value: Any, info: ValidationInfo) -> Any:
    """Turn ``{gpu: 2.0}`` into bytes; anything else is a size as `parse_size` takes it.

    Raises ValueError for another mapping, and where the device pool's size isn't in the validation context.
    """
    if not isinstance(value, dict):
        return parse_size(value)
    times = value.get("gpu")
    wrong = not isinstance(times, int | float) or isinstance(times, bool) or not 0 < times < math.inf
    if list(value) != ["gpu"] or wrong:
        raise ValueError("a tier's size is a size in bytes, or `{gpu: X}`: X times the device pool, X above 0")
    pool = (info.context or {}).get(POOL_BYTES)
    if pool is None:
        raise ValueError(
            "the device pool's bytes aren't known here: set engine.kv_pool_bytes, or engine.kv_pool_blocks with "
            "engine.block_size and model.shape"
        )
    return round(times * pool)


TierBytes = Annotated[int, BeforeValidator(tier_size), Field(ge=0)]
"""The size of a tier in bytes; ``{gpu: 2.0}`` is twice the device pool, in numbers once the configuration is read."""

Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9]([A-Za-z0-9._+-]{0,98}[A-Za-z0-9+])?$", strict=True)]
"""A name that becomes a folder and a wildcard: letters, digits, ``. _ + -``, starting with a letter or digit; ≤ 100."""

TIERS = ("gpu", "cpu", "nvme", "remote", "computed", "unknown")
"""Where a prompt token's KV came from; ``computed`` = recomputed, ``unknown`` = the engine does not say."""


class Strict(BaseModel):
    """Base of every model: unknown keys are errors, values are immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="constants")


class Record(Strict):
    """Base of every file kvladder writes; ``schema`` is the file format's version."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)

    schema_version: int = Field(default=1, alias="schema", description="Version of this file's format.")
