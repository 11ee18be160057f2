"""What a user must know to measure on their own machine: shown in ``config/README.md`` and in every report.

Each was met on a real machine, or is reported of the pinned versions. Code stands in backticks, as in Markdown.
"""

from __future__ import annotations

from collections.abc import Mapping

PITFALLS: Mapping[str, tuple[tuple[str, str], ...]] = {
    "Sizes": (
        (
            "KV pool",
            "`engine.kv_pool_bytes` fixes the device pool. Left to vLLM it would be what memory happens to be free, "
            "and differ between setups. It must hold the largest burst at once, or requests wait in the queue.",
        ),
        (
            "Tier sizes",
            "A tier must hold all that a suite stores (prompt tokens × KV bytes a token, each prompt once, the warm-up "
            "prompt too), or LRU evicts what the hits ask for. Not larger: pinning costs about 0.1 s a GB in every "
            "start, and torch's pinned allocator rounds each layer's buffer up to a power of two (`native` with "
            "40 GiB pins 64). LMCache evicts from 80 % on unless `eviction-trigger-watermark` says otherwise.",
        ),
        (
            "Prompt lengths",
            "Hits come in whole blocks or chunks (16 tokens on a GPU, 128 on the CPU build, 256 in LMCache), and at "
            "least one token is always computed. `k × 256 + 8` leaves every setup the same tail of eight tokens.",
        ),
        (
            "`/dev/shm` and memory",
            "`/dev/shm` must hold the host tier of `native` with files or the host copier, and of `lmcache-mp` with "
            "`shared_memory`. A virtual machine may grow as memory is touched (3 s per 8 GiB): what it shows as "
            "free says little.",
        ),
    ),
    "Engines": (
        (
            "Versions",
            "LMCache 0.5.4 to 0.5.6 import under torch 2.11, but their compiled code doesn't load, and slow Python "
            "runs in its place with no more than a warning. Pins are in `envs/`; the gate `native-code-loaded` looks.",
        ),
        (
            "Cold against hit",
            "The device prefix cache is off in every setup but `prefix-cache` and `simple-cpu`, so that a hit can only "
            "come from the tier under test. `simple-cpu` never hits without it, silently; it is emptied before each "
            "pass. It stores a block one step late: ask for two output tokens or more.",
        ),
        (
            "Hash seed",
            "Every process of a setup needs the same `PYTHONHASHSEED`, or none finds what another stored. The "
            "pipeline sets it; servers that you start by hand need it too.",
        ),
        (
            "Two engines on one host",
            "Each must find its `gpu-memory-utilization` of the GPU free when it starts, also where its pool is given "
            "in bytes. And engines with MooncakeStoreConnector need different `lookup_rpc_port`s, or the one that "
            "starts last takes over the others' lookups. The pipeline sets both.",
        ),
        (
            "Wrong KV",
            "`lmcache-v1` on vLLM 0.26.0 answers otherwise than computing does, in 12 of 16 prompts with another "
            "token, and is fast: the gate `right-kv` decides, not the speed. `weights: dummy` has nearly flat logits "
            "and can't show it.",
        ),
        (
            "`native` with files",
            "vLLM 0.26.0 ends with a `KeyError` in its tiering manager under concurrent requests and a small host "
            "tier: such a trial is `failed`. Files are never evicted, and O_DIRECT falls back with a warning only.",
        ),
        (
            "`lmcache-mp` with files",
            "LMCache stores nothing on a file system that refuses O_DIRECT (`direct_io: false` goes through the page "
            "cache), evicts no file, and by itself wouldn't keep in memory what it loads from disk (kvladder has it "
            "`retain`). 0.5.3 doesn't say which hits came from disk: in a pass that read files they are `unknown`; "
            "bytes are known.",
        ),
        (
            "Mooncake over TCP",
            "Slower than computing on an H200. A pause in its store traffic isn't the end of it: no counter moves "
            "while a batch of gigabytes is in flight, so puts in flight count as traffic. Its transfer engine listens "
            "on all addresses.",
        ),
        (
            "CUDA IPC and first starts",
            "`expandable_segments` breaks `lmcache-mp`. With FlashInfer's sampler the first start compiles for "
            "minutes; it is off here. The first start of a boot reads everything from disk: 70 s against 16 to 40 s "
            "later.",
        ),
        (
            "CPU build",
            "Set `engine.cpu_threads`: vLLM's own binding gives a server without a connector half the threads on two "
            "cores, which looks like a speed-up of 1.7 by any tier.",
        ),
    ),
    "Numbers": (
        (
            "An engine's own rates",
            "May time the start of a copy and not the copy: LMCache logs 2.3 GB in 8 ms over a link that does 55 GB/s. "
            "Measure rooflines (`snakemake probe`) on the same boot: a trial without them isn't held against any.",
        ),
        (
            "PCIe counters",
            "NVML's byte counters include packet headers (8 to 12 % more than the KV) and start over every 4.29 GB on "
            "an H200, which a load at 55 GB/s does every 78 ms. `probe_interval_s: 0.05` shows rates; 0.5 shows means.",
        ),
        (
            "One run",
            "Shows little: on one H200 the first hit of 31,000 tokens took `native` 163 to 221 ms over six blocks. "
            "Six blocks give intervals, `plain-2` the noise.",
        ),
        (
            "Other load",
            "On a shared machine `client-not-saturated` and `quiet-host` fire now and then, and rightly. Keep the "
            "other cores idle; the client needs one to itself.",
        ),
    ),
}
"""By heading: title and text."""


def markdown() -> str:
    """The section of ``config/README.md``."""
    parts = ["## What to think of on your machine"]
    for heading, items in PITFALLS.items():
        parts.append(f"**{heading}**")
        parts.append("\n".join(f"- **{title}**: {text}" for title, text in items))
    return "\n\n".join(parts)
