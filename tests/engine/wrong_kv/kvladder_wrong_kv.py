"""Makes kvladder's host copier give back wrong KV, FOR TESTS ONLY: what a tier that mixes things up would do.

This folder on an engine's PYTHONPATH is a vLLM plugin (``kvladder_wrong_kv-0.dist-info``). ``KVLADDER_TEST_WRONG_KV``
says what goes wrong with a load: see `WAYS`. Stores are right, and so is every count of tokens and bytes.

Two blocks of one prompt in each other's place are none of the ways: keys carry their position, and attention over the
whole prefix is a sum, so the result is the same.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, cast

from vllm.v1.kv_offload.base import BlockIDsLoadStoreSpec, GPULoadStoreSpec, LoadStoreSpec, TransferResult
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec


def register() -> None:
    """Entry point of the group ``vllm.general_plugins``; vLLM calls it several times in a process."""
    from kvladder_engine_plugin import host_copier

    if host_copier.HostCopyWorker.__name__ == "WrongCopyWorker":
        return
    load_wrongly = WAYS[os.environ["KVLADDER_TEST_WRONG_KV"]]

    class WrongCopyWorker(host_copier.HostCopyWorker):
        """The host copier, but for its loads."""

        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            self._stored: list[int] = []

        def _copy(self, job_id: int, blocks: GPULoadStoreSpec, chunks: LoadStoreSpec, store: bool) -> TransferResult:
            ids = cast(BlockIDsLoadStoreSpec, chunks).block_ids.tolist()
            if store:
                self._stored += ids
                return super()._copy(job_id, blocks, chunks, store)
            # The prompt that was stored first is another one, and at least as long: the warm-up's.
            other = [chunk for chunk in self._stored if chunk not in ids][: len(ids)]
            if len(other) < len(ids):
                return super()._copy(job_id, blocks, chunks, store)

            def load(chosen: list[int]) -> TransferResult:
                return super(WrongCopyWorker, self)._copy(job_id, blocks, CPULoadStoreSpec(chosen), False)

            return load_wrongly(self, load, ids, other)

    host_copier.HostCopyWorker = WrongCopyWorker  # type: ignore[misc]


Load = Callable[[list[int]], TransferResult]


def swapped_block(worker: Any, load: Load, own: list[int], other: list[int]) -> TransferResult:
    """The second block is another prompt's second block."""
    return load([*own[:1], *other[1:2], *own[2:]])


def stale_layer(worker: Any, load: Load, own: list[int], other: list[int]) -> TransferResult:
    """The last layer alone holds another prompt's KV."""
    result = load(own)
    whole = worker._groups
    worker._groups = [layers[-1:] for layers in whole]
    try:
        load(other)
    finally:
        worker._groups = whole
    return result


def other_prompt(worker: Any, load: Load, own: list[int], other: list[int]) -> TransferResult:
    """Every block is another prompt's."""
    return load(other)


WAYS = {"swapped-block": swapped_block, "stale-layer": stale_layer, "other-prompt": other_prompt}
"""Ways to be wrong, by the value of the environment variable."""
