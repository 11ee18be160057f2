"""Stock tiered KV offloading on vLLM's CPU build, with a host memcpy in place of the GPU copier.

vLLM's ``OffloadingConnector`` refuses to run on CPU because its copier needs CUDA streams. Everything above
the copier (scheduler, LRU, secondary tiers, metrics) is device-independent, so this spec keeps all of it
and replaces the worker alone. Written for vLLM 0.32.0; the module is imported only where a configuration
names it:

    {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": {
        "spec_name": "HostTieringOffloadingSpec",
        "spec_module_path": "kvladder_engine_plugin.host_copier",
        "cpu_bytes_to_use": 1073741824}}
"""

import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from ctypes import memmove
from pathlib import Path
from typing import NamedTuple, cast

import torch
from vllm.v1.kv_offload.base import (
    BlockIDsLoadStoreSpec,
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingManager,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from kvladder_engine_plugin.marks import marks


class HostTieringOffloadingSpec(TieringOffloadingSpec):
    """``TieringOffloadingSpec`` whose worker copies between two host buffers."""

    def get_manager(self) -> OffloadingManager:
        """Return the stock manager, and take the region's name out of /dev/shm.

        vLLM builds its scheduler after all workers have registered their KV caches, so at this point every
        process has the region mapped. Without its name the kernel frees the memory however the server
        ends; by default vLLM kills its engine process at shutdown before it gets to remove the file.
        """
        manager = super().get_manager()
        if self._scheduler_mmap is not None:
            Path(self._scheduler_mmap.mmap_path).unlink(missing_ok=True)
        return manager

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """Return this rank's copier.

        The parent's method is where the platform is checked, hence the override here and not in
        ``create_worker``. It also means that the parent never builds its CUDA worker.
        """
        if self.config.canonical_layout:
            raise ValueError("canonical_layout is not supported by HostTieringOffloadingSpec")
        region = SharedOffloadRegion(
            engine_id=self.config.engine_id,
            num_chunks=self.num_chunks,
            rank=0 if self.replicated_layout else self.config.parallel.rank,
            kv_bytes_per_chunk=self.kv_bytes_per_chunk,
            cpu_page_size=self.cpu_page_size_per_worker,
        )
        region._creator = False  # the scheduler side removes the file, see get_manager
        return HostCopyWorker(kv_caches, self.blocks_per_chunk, region)


class _Layer(NamedTuple):
    """Where one layer's pages lie in the KV cache and in the offload region; int8, so strides are bytes."""

    cache: torch.Tensor  # (blocks, page bytes)
    region: torch.Tensor  # (chunks, page bytes x blocks per chunk)
    page_bytes: int  # bytes of a block that carry KV: a page may end in padding


class HostCopyWorker(OffloadingWorker):
    """Copies KV blocks between vLLM's CPU KV cache and the offload region, off the engine's thread.

    One thread a direction keeps the order that the stock worker guarantees (jobs of a direction finish in
    the order of submission) and lets a load pass waiting stores. ``memmove`` releases the GIL. Source
    blocks are complete at submission, because a CPU forward pass is synchronous, and the scheduler reuses
    neither side before the job is reported as finished or waited for.
    """

    def __init__(self, kv_caches: CanonicalKVCaches, blocks_per_chunk: int, region: SharedOffloadRegion) -> None:
        self._region = region
        self._blocks_per_chunk = blocks_per_chunk
        caches = [cache.tensor.view(torch.int8) for cache in kv_caches.tensors]
        views = [
            region.create_next_worker_view(cache.page_size_bytes * blocks_per_chunk) for cache in kv_caches.tensors
        ]
        self._groups = [
            [_Layer(caches[r.tensor_idx], views[r.tensor_idx], r.page_size_bytes) for r in refs]
            for refs in kv_caches.group_data_refs
        ]
        self._storing = ThreadPoolExecutor(1, thread_name_prefix="kv-store")
        self._loading = ThreadPoolExecutor(1, thread_name_prefix="kv-load")
        self._jobs: dict[int, Future[TransferResult]] = {}

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        """Queue a copy from the KV cache to the offload region."""
        self._jobs[job_id] = self._storing.submit(self._copy, job_id, src_spec, dst_spec, True)
        return True

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        """Queue a copy from the offload region to the KV cache."""
        self._jobs[job_id] = self._loading.submit(self._copy, job_id, dst_spec, src_spec, False)
        return True

    def get_finished(self) -> list[TransferResult]:
        """Take the results of finished jobs; an error inside a copy is raised here."""
        done = [job_id for job_id, future in self._jobs.items() if future.done()]
        return [self._jobs.pop(job_id).result() for job_id in done]

    def wait(self, job_ids: set[int]) -> None:
        """Block until these jobs are done; their results still come from :meth:`get_finished`."""
        wait([self._jobs[job_id] for job_id in job_ids if job_id in self._jobs])

    def shutdown(self) -> None:
        """Finish queued copies, then release the region."""
        self._storing.shutdown()
        self._loading.shutdown()
        self._groups.clear()  # views of the region must go before its mapping can be closed
        self._region.cleanup()

    def _copy(self, job_id: int, blocks: GPULoadStoreSpec, chunks: LoadStoreSpec, store: bool) -> TransferResult:
        """Copy page by page: a region row holds all layers of a chunk, the KV cache all blocks of a layer.

        The first chunk of a group may be entered in its middle: ``block_indices`` gives the position of the
        group's first block within the request, counted in blocks. Time is that of the copy alone, without
        queueing, as the stock worker measures it.
        """
        block_ids = iter(blocks.block_ids.tolist())
        chunk_ids = iter(cast(BlockIDsLoadStoreSpec, chunks).block_ids.tolist())
        copied = 0
        began = time.monotonic_ns()
        start = time.perf_counter()
        for layers, size, first in zip(self._groups, blocks.group_sizes, blocks.block_indices, strict=True):
            chunk = -1
            for position in range(first, first + size):
                slot = position % self._blocks_per_chunk
                if slot == 0 or position == first:
                    chunk = next(chunk_ids)
                block = next(block_ids)
                for cache, region, page in layers:
                    cache_at = cache.data_ptr() + block * cache.stride(0)
                    # A chunk holds its blocks in a row; the width of a slot includes padding.
                    region_at = (
                        region.data_ptr()
                        + chunk * region.stride(0)
                        + slot * (region.shape[1] // self._blocks_per_chunk)
                    )
                    if store:
                        memmove(region_at, cache_at, page)
                    else:
                        memmove(cache_at, region_at, page)
                    copied += page
        taken = time.perf_counter() - start
        log = marks()
        if log is not None:
            log.write("copy-store" if store else "copy-load", began, time.monotonic_ns(), bytes=copied)
        return TransferResult(job_id, True, copied, taken)
