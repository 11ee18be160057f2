"""The hit oracle against vLLM's own host tier and device pool: random requests through both, the same hits for each."""

import random
import sys
from pathlib import Path

import pytest
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id
from vllm.v1.kv_offload.base import LookupResult, OffloadKey, ReqContext, make_offload_key
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "workflow"))

from kvladder.stats.oracle import Access, Hierarchy, Tier, replay

BLOCK = 16


class Engine:
    """What the offloading connector's scheduler asks of the manager for requests that come one after the other."""

    def __init__(self, capacity: int, policy: str) -> None:
        self.manager = CPUOffloadingManager(num_chunks=capacity, cache_policy=policy)
        self.count = 0

    def serve(self, access: Access, step: int) -> int:
        """Hit tokens of one request, which is then computed in steps of `step` tokens, stored and finished."""
        manager = self.manager
        self.count += 1
        request = ReqContext(req_id=str(self.count))
        manager.on_new_request(request)
        keys = [key(block) for block in (*access.blocks, *access.output)]
        for place, name in enumerate(keys, 1):
            request.set_offload_key_position(name, place * BLOCK)
        hit = 0
        for name in keys[: (access.tokens - 1) // BLOCK]:
            if manager.lookup(name, request) is not LookupResult.HIT:
                break
            hit += 1
        if hit:
            manager.prepare_load(keys[:hit], request)
            manager.complete_load(keys[:hit], request)
        cursor, done = hit, hit * BLOCK
        while done < access.tokens:
            done = min(done + step, access.tokens)
            cursor = self.store(keys, cursor, done // BLOCK, request)
        self.store(keys, cursor, len(keys), request)
        manager.on_request_finished(request)
        return hit * BLOCK

    def store(self, keys: list[OffloadKey], start: int, end: int, request: ReqContext) -> int:
        """Offer chunks; where the next offer begins."""
        offer = keys[start:end]
        if not offer:
            return start
        output = self.manager.prepare_store(offer, request)
        if output is None:
            return start
        self.manager.complete_store(output.keys_to_store, request)
        return end


def key(block: int) -> OffloadKey:
    return make_offload_key(block.to_bytes(8, "big"), 0)


class Device:
    """What the scheduler asks of the device pool for requests that come one after the other."""

    def __init__(self, blocks: int) -> None:
        self.pool = BlockPool(blocks, enable_caching=True, hash_block_size=BLOCK)

    def serve(self, access: Access) -> int:
        """Hit tokens of one request, whose blocks are then taken, filled and given back, the last one first."""
        pool, names = self.pool, [block.to_bytes(8, "big") for block in access.blocks]
        held = []
        for name in names[: (access.tokens - 1) // BLOCK]:
            found = pool.get_cached_block(name, [0])  # type: ignore[arg-type]
            if found is None:
                break
            held += found
        hit = len(held)
        pool.touch(held)
        tail = int(access.tokens % BLOCK > 0)
        held += pool.get_new_blocks(len(access.blocks) - hit + tail)
        for place, name in enumerate(names):
            pool._insert_block_hash(make_block_hash_with_group_id(name, 0), held[place], None)  # type: ignore[arg-type]
        pool.free_blocks(reversed(held))
        return hit * BLOCK


def requests(seed: int) -> list[Access]:
    """Prompts that come again, grow, and are new, of very different lengths."""
    draw = random.Random(seed)
    found = []
    for _ in range(400):
        stream = min(draw.randrange(12), draw.randrange(12))
        tokens = draw.randrange(1, 40 * BLOCK)
        blocks = range(stream << 32, (stream << 32) + tokens // BLOCK)
        extra = draw.choice((0, 0, 1, 3))
        output = range(1000 + stream << 32, (1000 + stream << 32) + extra)
        found.append(Access(blocks, tokens, output))
    return found


@pytest.mark.parametrize("policy", ["lru", "arc"])
@pytest.mark.parametrize("step", [4 * BLOCK, 1000 * BLOCK])
@pytest.mark.parametrize("capacity", [7, 30, 60, 120, 1000])
def test_every_hit_is_the_engines(policy: str, step: int, capacity: int) -> None:
    for seed in range(3):
        accesses = requests(seed)
        engine = Engine(capacity, policy)
        tier = Tier("cpu", capacity, policy=policy)  # type: ignore[arg-type]
        mine = replay(accesses, Hierarchy(BLOCK, host=tier, step=step))
        assert [hit["cpu"] for hit in mine.hits] == [engine.serve(access, step) for access in accesses]
        assert (mine.certain == len(accesses)) == (capacity == 1000)


@pytest.mark.parametrize("blocks", [42, 60, 120, 1000])
def test_every_device_hit_is_the_engines(blocks: int) -> None:
    for seed in range(3):
        # A prompt of whole blocks has its last one computed again, into a second block of the same content: the oracle
        # knows one only.
        accesses = [Access(each.blocks, each.tokens | 1) for each in requests(seed)]
        pool = Device(blocks)
        mine = replay(accesses, Hierarchy(BLOCK, device=Tier("gpu", blocks - 1)))
        assert [hit["gpu"] for hit in mine.hits] == [pool.serve(access) for access in accesses]
