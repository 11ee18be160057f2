"""The host copier: what was stored comes back byte for byte, through the stock region and spec."""

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
    TransferResult,
)
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.factory import OffloadingSpecFactory

from kvladder_engine_plugin.host_copier import (
    HostCopyWorker,
    HostTieringOffloadingSpec,
)

PAGE = 4096
PADDING = 512  # the second layer's pages end in bytes that carry no KV
BLOCKS = 16


def kv_caches() -> CanonicalKVCaches:
    layers = [torch.randint(-128, 128, (BLOCKS, PAGE), dtype=torch.int8) for _ in range(3)]
    return CanonicalKVCaches(
        tensors=[CanonicalKVCacheTensor(layer, PAGE) for layer in layers],
        group_data_refs=[
            [CanonicalKVCacheRef(0, PAGE), CanonicalKVCacheRef(1, PAGE - PADDING)],
            [CanonicalKVCacheRef(2, PAGE)],
        ],
    )


def spec(blocks_per_chunk: int) -> HostTieringOffloadingSpec:
    config = OffloadingConfig(
        groups=tuple(OffloadingGroupConfig(16, (f"layer{i}",), i) for i in range(2)),
        worker_kv_bytes_per_block=3 * PAGE,
        enable_kv_cache_events=False,
        extra_config={
            "spec_name": "HostTieringOffloadingSpec",
            "spec_module_path": "kvladder_engine_plugin.host_copier",
            "cpu_bytes_to_use": 32 * 3 * PAGE,
        },
        engine_id=f"kvladder-test-{uuid.uuid4().hex}",
        model=OffloadingModelConfig("tiny", "bfloat16"),
        cache=OffloadingCacheConfig(16, blocks_per_chunk),
        parallel=OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, False),
        replicated_layout=False,
        canonical_layout=False,
    )
    made = OffloadingSpecFactory.create_spec(config)
    assert isinstance(made, HostTieringOffloadingSpec)
    return made


@pytest.fixture(params=[1, 3])
def bench(request: pytest.FixtureRequest) -> Iterator[tuple[CanonicalKVCaches, HostCopyWorker, int]]:
    caches, made = kv_caches(), spec(request.param)
    worker = made.get_worker(caches)
    assert isinstance(worker, HostCopyWorker)
    manager = made.get_manager()
    yield caches, worker, request.param
    worker.shutdown()
    manager.shutdown()
    assert not list(Path("/dev/shm").glob(f"*{made.config.engine_id}*"))


def run(worker: HostCopyWorker, job: int) -> TransferResult:
    worker.wait({job})
    (result,) = worker.get_finished()
    assert result.job_id == job
    assert result.success
    return result


def test_stored_blocks_come_back_byte_for_byte(
    bench: tuple[CanonicalKVCaches, HostCopyWorker, int],
) -> None:
    caches, worker, per_chunk = bench
    before = [cache.tensor.clone() for cache in caches.tensors]
    # Group 0 holds six blocks from the request's start, group 1 three from its block 3.
    stored = GPULoadStoreSpec([5, 2, 9, 0, 15, 7, 4, 1, 11], [6, 3], [0, 3])
    chunks = CPULoadStoreSpec([4, 1, 7, 3, 2, 8, 0, 6, 9] if per_chunk == 1 else [4, 1, 6])
    worker.submit_store(1, stored, chunks)
    result = run(worker, 1)
    assert result.transfer_size == 6 * (2 * PAGE - PADDING) + 3 * PAGE
    assert result.transfer_time is not None and result.transfer_time > 0

    for cache in caches.tensors:
        cache.tensor.zero_()
    loaded = GPULoadStoreSpec([1, 3, 4, 6, 8, 10, 12, 13, 14], [6, 3], [0, 3])
    worker.submit_load(2, chunks, loaded)
    run(worker, 2)

    first, second, third = (cache.tensor for cache in caches.tensors)
    assert torch.equal(first[[1, 3, 4, 6, 8, 10]], before[0][[5, 2, 9, 0, 15, 7]])
    kv = slice(0, PAGE - PADDING)
    assert torch.equal(second[[1, 3, 4, 6, 8, 10], kv], before[1][[5, 2, 9, 0, 15, 7], kv])
    assert torch.equal(third[[12, 13, 14]], before[2][[4, 1, 11]])
    untouched = [b for b in range(BLOCKS) if b not in (1, 3, 4, 6, 8, 10)]
    assert not first[untouched].any()


def test_a_load_may_start_in_the_middle_of_a_chunk() -> None:
    caches, made = kv_caches(), spec(3)
    worker = made.get_worker(caches)
    before = caches.tensors[0].tensor.clone()
    worker.submit_store(1, GPULoadStoreSpec([0, 1, 2, 3, 4, 5], [6, 0], [0, 0]), CPULoadStoreSpec([2, 5]))
    worker.wait({1})
    worker.submit_load(2, CPULoadStoreSpec([2, 5]), GPULoadStoreSpec([9, 10], [2, 0], [2, 0]))
    worker.wait({2})
    assert {result.job_id for result in worker.get_finished()} == {1, 2}
    assert torch.equal(caches.tensors[0].tensor[[9, 10]], before[[2, 3]])
    made.get_manager().shutdown()
    worker.shutdown()


def test_the_region_has_no_name_once_the_server_is_up() -> None:
    made = spec(1)
    worker = made.get_worker(kv_caches())
    manager = made.get_manager()
    assert not list(Path("/dev/shm").glob(f"*{made.config.engine_id}*"))
    worker.shutdown()
    manager.shutdown()
