"""Processes that setups start beside the engine: their arguments and variables."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from test_trial_engine import context, setup, value


@pytest.mark.parametrize(
    ("kind", "settings"),
    [("lmcache-mp", {"cpu_bytes": 1}), ("mooncake-store", {"segment_bytes": 1, "buffer_bytes": 1})],
)
def test_variables_of_every_process_reach_the_side_process(tmp_path: Path, kind: str, settings: dict[str, Any]) -> None:
    one = setup(kind, **settings, env={"A": "setup"})
    (spec,) = one.side_processes(context(tmp_path, env={"A": "all", "B": "2"}))
    assert {name: spec.env[name] for name in "AB"} == {"A": "setup", "B": "2"}


def test_shared_segment_carries_the_whole_namespace_or_is_refused(tmp_path: Path) -> None:
    lmcache = setup("lmcache-mp", cpu_bytes=1, shared_memory=True)
    long = f"{'e' * 100}-{'s' * 100}-main-r0-0123abcd"
    for namespace in ("exp-lmcache-mp-main-r0-0123abcd", long):
        (spec,) = lmcache.side_processes(dataclasses.replace(context(tmp_path), namespace=namespace))
        name = value(list(spec.argv), "--shm-name")
        assert namespace in name
        assert len(f"lmcache_l1_pool_{name}") <= 255
    with pytest.raises(ValueError, match="shorten the names"):
        lmcache.side_processes(dataclasses.replace(context(tmp_path), namespace=f"{'x' * 60}{long}"))
