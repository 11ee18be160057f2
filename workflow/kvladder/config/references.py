"""Values that others published, to be shown beside what is measured here: `compare_with` of an experiment names one.

Copied by hand from the source that each names, in its own words; nothing here was measured by kvladder.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Published:
    """One value as it was printed, and its number of seconds where it is a single time."""

    shown: str
    seconds: float | None = None


@dataclass(frozen=True)
class ReferenceRow:
    """One line of a published table, and which of our workloads it is held against.

    `measures`: TTFT or wall time of hits, what the first request costs against the baseline, or whether engines share
    a pool. `requests` prompts of about `prompt_tokens` tokens each, in one pass.
    """

    what: str
    measures: Literal["ttft", "wall", "first-request", "sharing"]
    requests: int
    prompt_tokens: int
    values: Mapping[str, Published]


@dataclass(frozen=True)
class Reference:
    """A published table: `kinds` are its columns, our kind of setup by what the source calls it."""

    title: str
    source: str
    hardware: str
    model: str
    kinds: Mapping[str, str]
    rows: tuple[ReferenceRow, ...]


@dataclass(frozen=True)
class Explanation:
    """Why hits take as long as they do, as published: `kinds` has our kind of setup and what the source found."""

    title: str
    source: str
    hardware: str
    kinds: Mapping[str, str]


EXPLANATIONS: Mapping[str, Explanation] = {
    "vllm-offload-bench": Explanation(
        title="vLLM-offload-bench",
        source="from its per-request GPU timelines",
        hardware="8 × RTX A6000, PCIe Gen4 x16",
        kinds={
            "native": "139 ms for 3.7 GB in one cuMemcpyBatchAsync, no RPC before or after, 16-token granularity",
            "lmcache-mp": "173 ms in two stages, 18 and 10 ms of RPC before and after, 256-token granularity",
        },
    )
}
"""By the name that `compare_with` gives."""

REFERENCES: Mapping[str, Reference] = {
    "vllm-offload-bench": Reference(
        title="vLLM-offload-bench",
        source="the headline table of its README (GPU prefix caching off, one instance per setup)",
        hardware="8 × RTX A6000, PCIe Gen4 x16, no RDMA",
        model="Llama-3.1-8B-Instruct, bf16",
        kinds={
            "plain": "plain vLLM",
            "mooncake-store": "Mooncake store",
            "lmcache-mp": "LMCache MP",
            "native": "vLLM native",
        },
        rows=(
            ReferenceRow(
                what="repeat of a ~31k-token prompt, TTFT (KV from CPU)",
                measures="ttft",
                requests=1,
                prompt_tokens=31_000,
                values={
                    "plain": Published("6.8 s", 6.8),
                    "mooncake-store": Published("0.76 s", 0.76),
                    "lmcache-mp": Published("0.43 s", 0.43),
                    "native": Published("0.35 s", 0.35),
                },
            ),
            ReferenceRow(
                what="first-request cost vs plain",
                measures="first-request",
                requests=1,
                prompt_tokens=31_000,
                values={
                    "plain": Published("1.00×"),
                    "mooncake-store": Published("1.5–2.2×"),
                    "lmcache-mp": Published("1.05–1.07×"),
                    "native": Published("1.00×"),
                },
            ),
            ReferenceRow(
                what="4 × 8k concurrent repeats, wall",
                measures="wall",
                requests=4,
                prompt_tokens=8_000,
                values={
                    "plain": Published("5.2 s", 5.2),
                    "mooncake-store": Published("0.9 / 2.6 s (bimodal)"),
                    "lmcache-mp": Published("0.62 s", 0.62),
                    "native": Published("0.53 s", 0.53),
                },
            ),
            ReferenceRow(
                what="8 × 17.5k concurrent repeats, wall",
                measures="wall",
                requests=8,
                prompt_tokens=17_500,
                values={
                    "plain": Published("27 s", 27.0),
                    "mooncake-store": Published("3.5 s", 3.5),
                    "lmcache-mp": Published("2.25 s", 2.25),
                    "native": Published("1.37 s", 1.37),
                },
            ),
            ReferenceRow(
                what="shares one pool across engines",
                measures="sharing",
                requests=1,
                prompt_tokens=31_000,
                values={
                    "plain": Published("—"),
                    "mooncake-store": Published("yes (TCP, ~0.8 GB/s cross-process)"),
                    "lmcache-mp": Published("yes (CUDA IPC, ~9 GB/s)"),
                    "native": Published("no"),
                },
            ),
        ),
    )
}
