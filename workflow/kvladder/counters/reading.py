"""From two /metrics pages to what happened between them, in one schema over all engines and versions.

Names are matched exactly: a page carries deprecated aliases beside their successors, and a ``_created`` gauge beside
each counter. ``None`` is "unknown": a series that isn't there, a value that is NaN, a page that didn't come, a server
that restarted inside the window. It is never 0, and a delta is never negative.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from prometheus_client.parser import text_string_to_metric_families

from kvladder.config.base import TIERS

ENGINE = "engine"
"""Name of the vLLM server among a trial's servers; of several the first."""

ACTIVE = "active:"
"""Prefix of keys in a store activity that count jobs in flight: flat means 0, not merely unchanged."""

NS = 1_000_000_000

Labels = frozenset[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Page:
    """One parsed /metrics page: values by exact sample name and labels, and how many lines could not be read."""

    samples: Mapping[str, Mapping[Labels, float]]
    monotonic: frozenset[str]
    broken: int = 0

    @property
    def process_start(self) -> float | None:
        """Start of the server's process in epoch seconds; None where the server doesn't say."""
        series = self.samples.get("process_start_time_seconds", {})
        return next(iter(series.values()), None)

    def total(self, name: str, **labels: str) -> float | None:
        """Sum over the series of ``name`` that carry ``labels``; None when there is none, or one is NaN."""
        values = [value for have, value in self.samples.get(name, {}).items() if have >= set(labels.items())]
        return _known(sum(values)) if values else None


Pages = Mapping[str, Page | None]
"""Parsed pages by server name; None: the server did not answer."""


def engine_name(number: int) -> str:
    """Server name of a trial's engine by its number, from 0: ``engine``, ``engine-2``, …"""
    return f"{ENGINE}-{number + 1}" if number else ENGINE


def seen_from(pages: Pages, number: int) -> Pages:
    """The pages as a setup reads them: one engine's under the name `ENGINE`, those of side processes, no others."""
    own = engine_name(number)
    return {
        ENGINE if name == own else name: page
        for name, page in pages.items()
        if name == own or not (name == ENGINE or name.startswith(f"{ENGINE}-"))
    }


def parse_page(text: str) -> Page:
    """Parse one page in Prometheus' text format. A malformed line loses itself and nothing else."""
    samples: dict[str, dict[Labels, float]] = defaultdict(dict)
    types: dict[str, str] = {}
    broken = 0
    # Not splitlines: a label may hold any character but a newline.
    for line in text.split("\n"):
        if line.startswith("#"):
            words = line.split()
            if words[1:2] == ["TYPE"] and len(words) == 4:
                types[words[2]] = words[3]
        elif line and not line.isspace():
            sample = _sample(line)
            if sample is None:
                broken += 1
            elif not sample[0].endswith("_created"):
                samples[sample[0]][sample[1]] = sample[2]
    return Page(dict(samples), frozenset(name for name in samples if _only_grows(name, types)), broken)


def parse_pages(raw: Mapping[str, str | None]) -> dict[str, Page | None]:
    """Parse the pages of a snapshot by server name."""
    return {server: None if text is None else parse_page(text) for server, text in raw.items()}


@lru_cache(maxsize=1 << 15)
def _sample(line: str) -> tuple[str, Labels, float] | None:
    """Name, labels and value of one line; None when it is malformed.

    Line by line, so that one bad line can't lose a page, and remembered, because most lines of a page are those of the
    page before: a drain scrapes often, and a trial has dozens of pages.
    """
    try:
        for family in text_string_to_metric_families(line + "\n"):
            for sample in family.samples:
                return sample.name, frozenset(sample.labels.items()), sample.value
    except ValueError:
        pass
    return None


def _only_grows(name: str, types: Mapping[str, str]) -> bool:
    """Whether a sample can't go back while its server lives.

    A counter's type stands under its name with or without ``_total``. A histogram's sum may go back where it observes
    negative values.
    """
    if name.endswith("_total"):
        return types.get(name, types.get(name.removesuffix("_total"), "untyped")) in ("counter", "untyped", "unknown")
    base, _, suffix = name.rpartition("_")
    return suffix in ("bucket", "count") and types.get(base) == "histogram"


def _known(value: float) -> float | None:
    return value if math.isfinite(value) else None


@dataclass(frozen=True, slots=True)
class Quantile:
    """A quantile of a histogram: ``value``, or only "beyond the last bucket", whose bound ``value`` then is."""

    value: float
    beyond: bool = False

    def __str__(self) -> str:
        return f"> {self.value:g}" if self.beyond else f"{self.value:g}"


@dataclass(frozen=True, slots=True)
class Histogram:
    """What a histogram gained inside a window. ``buckets`` are (upper bound, observations up to it), cumulative."""

    buckets: tuple[tuple[float, float], ...]
    count: int | None
    sum: float | None

    def mean(self) -> float | None:
        """Mean observation from sum and count; None without observations."""
        return self.sum / self.count if self.count and self.sum is not None else None

    def quantile(self, q: float) -> Quantile | None:
        """The ``q`` quantile (0–1), linear inside its bucket; None without buckets or observations.

        Where it falls into +Inf only the last finite bound is known.
        """
        total = self.buckets[-1][1] if self.buckets else 0
        if total <= 0 or not math.isinf(self.buckets[-1][0]):
            return None
        rank, low, below = q * total, 0.0, 0.0
        for bound, count in self.buckets:
            if count >= rank and count > below:
                if math.isinf(bound):
                    return Quantile(low, beyond=True)
                return Quantile(low + (bound - low) * max(rank - below, 0.0) / (count - below))
            low, below = bound, count
        return None


class Delta:
    """What the servers' counters gained between two snapshots.

    ``problems`` says in words what makes the window unusable: a server that restarted inside it.
    """

    def __init__(self, start: Pages, end: Pages) -> None:
        self.start, self.end = start, end
        self._problems: dict[str, str] = {}
        for server in end:
            reason = self._restart(server)
            if reason is not None:
                self._problems[server] = f"{server} restarted inside the window ({reason})"

    @property
    def problems(self) -> list[str]:
        """One line a server that restarted."""
        return list(self._problems.values())

    def value(self, server: str, name: str, **labels: str) -> float | None:
        """Gain of all series of ``name`` that carry ``labels``, in the counter's own unit.

        A series that appears inside the window counts from 0. None: page or series missing, a series that vanished, a
        NaN, or a server that restarted.
        """
        start, end = self.start.get(server), self.end.get(server)
        if start is None or end is None or server in self._problems:
            return None
        gains = list(_gains(start, end, name, labels))
        total = sum(gains) if gains and None not in gains else None  # type: ignore[arg-type]
        if total is not None and total < 0:
            self._problems[server] = f"{server} restarted inside the window ({name} went back by {-total:g})"
            return None
        return total if total is None else _known(total)

    def counter(self, server: str, name: str, **labels: str) -> int | None:
        """`value` of a counter that counts whole things: tokens, bytes, events."""
        value = self.value(server, name, **labels)
        return None if value is None else round(value)

    def time_ns(self, server: str, name: str, **labels: str) -> int | None:
        """`value` of a counter in seconds, as nanoseconds."""
        value = self.value(server, name, **labels)
        return None if value is None else round(value * NS)

    def histogram(self, server: str, name: str, **labels: str) -> Histogram | None:
        """Gain of a histogram over the window, summed over its series; ``name`` without suffix. None when unknown."""
        count = self.counter(server, f"{name}_count", **labels)
        total = self.value(server, f"{name}_sum", **labels)
        bounds = self._bounds(server, f"{name}_bucket", labels)
        buckets = [(bound, self.value(server, f"{name}_bucket", **labels, le=text)) for bound, text in bounds]
        if count is None and total is None and not buckets:
            return None
        known = [(bound, value) for bound, value in buckets if value is not None]
        return Histogram(tuple(known) if len(known) == len(buckets) else (), count, total)

    def _bounds(self, server: str, name: str, labels: Mapping[str, str]) -> list[tuple[float, str]]:
        end = self.end.get(server)
        if end is None:
            return []
        texts = {dict(have).get("le") for have in end.samples.get(name, {}) if have >= set(labels.items())}
        return sorted((float(text), text) for text in texts if text is not None)

    def _restart(self, server: str) -> str | None:
        start, end = self.start.get(server), self.end.get(server)
        if start is None or end is None:
            return None
        before, after = start.process_start, end.process_start
        if before is not None and after is not None and after != before:
            return f"process start time {before:.2f}, then {after:.2f}"
        for name in start.monotonic & end.monotonic:
            ends = end.samples[name]
            for labels, value in start.samples[name].items():
                if ends.get(labels, value) < value:
                    return f"{name} was {value:g}, then {ends[labels]:g}"
        return None


def _gains(start: Page, end: Page, name: str, labels: Mapping[str, str]) -> Iterator[float | None]:
    """Gain of each matching series; None for one that vanished."""
    wanted = set(labels.items())
    before, after = start.samples.get(name, {}), end.samples.get(name, {})
    for have, value in after.items():
        if have >= wanted:
            yield value - before.get(have, 0.0)
    for have in before:
        if have >= wanted and have not in after:
            yield None


@dataclass(slots=True)
class Reading:
    """One window in kvladder's own schema: tokens, bytes and nanoseconds; None is unknown.

    ``by_source`` has every tier of `TIERS`. ``stored_bytes`` and ``loaded_bytes`` are what went from the device to the
    setup's tier and back, each byte once; the ``disk_`` bytes went between that tier and a disk below it, and their
    times are summed over threads. ``problems`` are contradictions: the counters can't be believed.
    """

    prompt_tokens: int | None = None
    by_source: dict[str, int | None] = field(default_factory=lambda: dict.fromkeys(TIERS))
    stored_bytes: int | None = None
    loaded_bytes: int | None = None
    store_time_ns: int | None = None
    load_time_ns: int | None = None
    disk_write_bytes: int | None = None
    disk_read_bytes: int | None = None
    disk_write_time_ns: int | None = None
    disk_read_time_ns: int | None = None
    preemptions: int | None = None
    problems: list[str] = field(default_factory=list)


SPLIT = {"host": "cpu", "disk": "nvme", "p2p": "remote"}
"""vLLM 0.32's names of the tier that served an external hit; ``external_unspecified`` is the setup's own tier."""

EXTERNAL = ("cpu", "nvme", "remote", "unknown")


def engine_reading(delta: Delta, external_tier: str | None) -> Reading:
    """Read vLLM's own counters (0.26 and 0.32) of a window.

    ``external_tier`` is where this setup's external hits come from as far as the engine doesn't say; None, ``gpu`` or
    ``unknown``: they are unknown. Raises nothing: what isn't there is None.
    """
    reading = Reading(
        prompt_tokens=delta.counter(ENGINE, "vllm:prompt_tokens_total"),
        preemptions=delta.counter(ENGINE, "vllm:num_preemptions_total"),
    )
    source = "vllm:prompt_tokens_by_source_total"
    reading.by_source["computed"] = delta.counter(ENGINE, source, source="local_compute")
    reading.by_source["gpu"] = delta.counter(ENGINE, source, source="local_cache_hit")
    external = delta.counter(ENGINE, source, source="external_kv_transfer")
    if external is not None:
        reading.by_source.update(dict.fromkeys(EXTERNAL, 0))
        reading.by_source.update(_split(delta, external, external_tier if external_tier in EXTERNAL else "unknown"))
    reading.stored_bytes, reading.store_time_ns = _moved(delta, "store", "GPU_to_CPU")
    reading.loaded_bytes, reading.load_time_ns = _moved(delta, "load", "CPU_to_GPU")
    reading.disk_write_bytes, reading.disk_write_time_ns = _tiering(delta, "write")
    reading.disk_read_bytes, reading.disk_read_time_ns = _tiering(delta, "read")
    reading.problems += delta.problems
    problem = sum_problem(reading)
    if problem is not None:
        reading.problems.append(problem)
    return reading


def sum_problem(reading: Reading) -> str | None:
    """In words, that the sources do not add up to the prompt tokens; None when they do, or something is unknown."""
    known = [value for value in reading.by_source.values() if value is not None]
    if reading.prompt_tokens is None or len(known) < len(TIERS) or sum(known) == reading.prompt_tokens:
        return None
    parts = " + ".join(f"{tier} {value}" for tier, value in reading.by_source.items() if value or tier == "computed")
    return f"sources do not add up to prompt tokens: {parts} = {sum(known)}, prompt {reading.prompt_tokens}"


def _split(delta: Delta, external: int, tier: str) -> dict[str, int]:
    """Share ``external`` tokens out over tiers, by vLLM 0.32's finer counter where there is one.

    The finer counter counts at admission, so a preempted request is in it twice; where the two differ nobody knows
    the split.
    """
    name = "vllm:prompt_tokens_cached_by_source_total"
    finer = {source: delta.counter(ENGINE, name, source=source) for source in (*SPLIT, "external_unspecified")}
    known = {source: value for source, value in finer.items() if value is not None}
    if not known:
        return {tier: external}
    if sum(known.values()) != external:
        return {"unknown": external}
    shares: dict[str, int] = defaultdict(int)
    for source, value in known.items():
        shares[SPLIT.get(source, tier)] += value
    return dict(shares)


def _moved(delta: Delta, direction: str, legacy: str) -> tuple[int | None, int | None]:
    """Bytes and time of the OffloadingConnector in one direction; the older series is there before its first event."""
    moved = delta.counter(ENGINE, f"vllm:kv_offload_{direction}_bytes_total")
    time = delta.time_ns(ENGINE, f"vllm:kv_offload_{direction}_time_total")
    if moved is None:
        moved = delta.counter(ENGINE, LEGACY_BYTES, transfer_type=legacy)
    if time is None:
        time = delta.time_ns(ENGINE, "vllm:kv_offload_total_time_total", transfer_type=legacy)
    return moved, time


def _tiering(delta: Delta, way: str) -> tuple[int | None, int | None]:
    """Bytes and time of the OffloadingConnector's disk in one direction; vLLM 0.26 has no such counter."""
    name = f"vllm:kv_offload_tiering_{way}"
    return delta.counter(ENGINE, f"{name}_bytes_total"), delta.time_ns(ENGINE, f"{name}_time_total")


def simple_cpu_reading(delta: Delta, cpu_bytes: int) -> Reading:
    """Tokens by source of SimpleCPUOffloadConnector; loaded bytes from its own count of loaded blocks (vLLM 0.32).

    ``cpu_bytes`` is the configured host memory: divided by the blocks that the engine says it holds, it's the bytes of
    one block, less than one block's share off. Ordinary stores are counted nowhere, and 0.26 counts nothing of it.
    """
    reading = engine_reading(delta, "cpu")
    blocks = delta.counter(ENGINE, "vllm:simple_kv_offload_load_blocks_total")
    capacity = _simple_cpu_capacity(delta.end.get(ENGINE))
    if blocks is not None and capacity:
        reading.loaded_bytes = round(blocks * cpu_bytes / capacity)
    return reading


def _simple_cpu_capacity(page: Page | None) -> int | None:
    """Blocks of the host tier, a label of the connector's facts."""
    facts = {} if page is None else page.samples.get("vllm:simple_kv_offload_info", {})
    labels = [dict(labels).get("capacity_blocks", "") for labels in facts]
    return int(labels[0]) if len(labels) == 1 and labels[0].isdigit() else None


LEGACY_BYTES = "vllm:kv_offload_total_bytes_total"

STORE_COUNTERS = (
    "vllm:kv_offload_store_bytes_total",
    "vllm:kv_offload_tiering_write_bytes_total",
    "vllm:simple_kv_offload_save_outcomes_total",
)
STORE_JOBS = (
    "vllm:kv_offload_tiering_active_cascade_jobs",
    "vllm:simple_kv_offload_pending_store_blocks",
)


def engine_store_activity(pages: Pages) -> dict[str, float] | None:
    """What moves in vLLM's own counters while KV is stored, by name; None: no page, or no such series in it."""
    found = activity(pages, ENGINE, STORE_COUNTERS, STORE_JOBS)
    page = pages.get(ENGINE)
    # The one counter of the OffloadingConnector that is there before its first event.
    older = None if page is None else page.total(LEGACY_BYTES, transfer_type="GPU_to_CPU")
    return found if older is None else {**(found or {}), LEGACY_BYTES: older}


def activity(
    pages: Pages, server: str, counters: tuple[str, ...], jobs: tuple[str, ...] = ()
) -> dict[str, float] | None:
    """The values of ``counters``, and of ``jobs`` (jobs in flight) marked `ACTIVE`; None when none of them is there."""
    page = pages.get(server)
    if page is None:
        return None
    found = {name: page.total(name) for name in counters}
    found |= {ACTIVE + name: page.total(name) for name in jobs}
    return {name: value for name, value in found.items() if value is not None} or None
