"""The crash that ``patches/vllm/0.26.0/01-tiering-late-store.patch`` mends, without a GPU: vLLM's manager by itself.

The order of calls is that of 0.26.0's scheduler under concurrent prompts over a host tier that is too small: a store is
refused, the request ends, there is room again, and the blocks that weren't stored are offered once more. Later versions
have the manager unchanged, and a scheduler that ends a request after its last offer (`test_the_order_of_calls`); so the
crash shows here in the class alone, and the mend is proved on that class's code.
"""

import importlib.util
import inspect
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.offloading import scheduler
from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext, make_offload_key
from vllm.v1.kv_offload.tiering import manager as installed
from vllm.v1.kv_offload.tiering.example.manager import ExampleSecondaryTierManager

PATCH = Path(__file__).resolve().parents[2] / "patches/vllm/0.26.0/01-tiering-late-store.patch"
NAME = "vllm/v1/kv_offload/tiering/manager.py"
ROOM = 4
"""Chunks that the host tier holds."""


def module(folder: Path, variant: str) -> ModuleType:
    """The manager's module of this interpreter's vLLM, without the patch or with it."""
    file = folder / NAME
    file.parent.mkdir(parents=True)
    file.write_text(Path(installed.__file__).read_text(encoding="utf-8"), encoding="utf-8")
    patch = folder / "late-store.patch"
    text = PATCH.read_text(encoding="utf-8")
    if "cascade chunks already in primary" in file.read_text(encoding="utf-8"):
        # One comment between the changed lines has another word since.
        text = text.replace("cascade blocks already in primary", "cascade chunks already in primary")
    patch.write_text(text, encoding="utf-8")

    def apply(*options: str) -> bool:
        command = ["git", "apply", "-p1", *options, str(patch)]
        # Hides the repository that the folder may lie in.
        env = {**os.environ, "GIT_DIR": os.devnull}
        return subprocess.run(command, cwd=folder, env=env, stderr=subprocess.DEVNULL, check=False).returncode == 0

    applied = apply("--reverse", "--check")
    if applied != (variant == "patched"):
        assert apply(*(["--reverse"] if applied else []))
    spec = importlib.util.spec_from_file_location(f"{installed.__name__}_{variant}", file)
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up.
    sys.modules[spec.name] = made
    spec.loader.exec_module(made)
    return made


class Region:
    """Host memory, as far as the manager asks for it."""

    def create_kv_memoryview(self) -> memoryview:
        return memoryview(bytearray(ROOM * 16)).cast("B", (ROOM, 16))

    def cleanup(self) -> None:
        """Nothing is mapped."""


def world(code: ModuleType) -> tuple[Any, Any]:
    """A manager over a host tier of `ROOM` chunks and an unlimited one in memory below, and that one."""
    primary = code.CPUPrimaryTierOffloadingManager(ROOM, Region())
    below = ExampleSecondaryTierManager(None, primary.get_kv_memoryview(), "example")  # type: ignore[arg-type]
    return code.TieringOffloadingManager(primary, [below]), below


def keys(request: str) -> list[Any]:
    return [make_offload_key(f"{request}-{number}".encode(), 0) for number in range(ROOM)]


def refused_then_finished(manager: Any) -> ReqContext:
    """One request fills the host tier, another's store is refused, and that one ends; then there is room again."""
    first, second = ReqContext("first"), ReqContext("second")
    manager.on_new_request(first)
    manager.on_new_request(second)
    assert manager.prepare_store(keys("first"), first) is not None
    assert manager.prepare_store(keys("second"), second) is None, "its blocks are being written: nothing can go"
    manager.on_request_finished(second)
    manager.complete_store(keys("first"), first)
    manager.on_request_finished(first)
    manager.on_schedule_end(ScheduleEndContext([], []))
    return second


def test_the_stock_manager_dies_of_a_late_store(tmp_path: Path) -> None:
    manager, _ = world(module(tmp_path, "stock"))
    late = refused_then_finished(manager)
    with pytest.raises(KeyError, match="second"):
        manager.prepare_store(keys("second"), late)


def test_the_patched_one_stores_it_and_forgets_the_request(tmp_path: Path) -> None:
    manager, below = world(module(tmp_path, "patched"))
    late = refused_then_finished(manager)
    made = manager.prepare_store(keys("second"), late)
    assert made is not None
    assert made.keys_to_store == keys("second")
    manager.complete_store(keys("second"), late)
    manager.on_schedule_end(ScheduleEndContext([], []))
    assert [manager.primary_tier.lookup(key, late) for key in keys("second")] == [LookupResult.HIT] * ROOM
    assert [below.lookup(key, late) for key in keys("second")] == [LookupResult.HIT] * ROOM
    # No state is left behind, and a late store of nothing leaves none either.
    assert manager.prepare_store(keys("second"), late) is not None
    assert manager._req_state == {}


@pytest.mark.parametrize("variant", ["stock", "patched"])
def test_a_store_in_time_is_the_same_in_both(tmp_path: Path, variant: str) -> None:
    manager, below = world(module(tmp_path, variant))
    request = ReqContext("only")
    manager.on_new_request(request)
    assert manager.prepare_store(keys("only"), request) is not None
    manager.on_request_finished(request)
    assert set(manager._req_state) == {"only"}, "its store is pending"
    manager.complete_store(keys("only"), request)
    assert manager._req_state == {}
    assert below.lookup(keys("only")[-1], request) == LookupResult.HIT


def test_the_order_of_calls() -> None:
    """Where requests are ended: with the scheduler's last offer of their blocks behind them, or before it."""
    source = inspect.getsource(scheduler.OffloadingConnectorScheduler.build_connector_meta)
    ends, offers = source.find("manager.on_request_finished("), source.find("._build_store_jobs(")
    mended_upstream = "cascade chunks" in Path(installed.__file__).read_text(encoding="utf-8")
    assert (0 < offers < ends) == mended_upstream
