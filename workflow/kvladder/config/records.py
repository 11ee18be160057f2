"""Raw files of a trial and what is derived from them. Times are integer nanoseconds of CLOCK_MONOTONIC.

``None`` always means "unknown" and never 0.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from kvladder.config.base import Record, Strict
from kvladder.config.traffic import RIGHT_KV, OrderPolicy, PassName

TrialStatus = Literal["completed", "failed"]
Decision = Literal["pass", "fail", "not-checked"]


class RequestRecord(Record):
    """One line of ``<workload>.requests.jsonl``: one request's life cycle as the client saw it."""

    workload: str
    pass_name: PassName = Field(alias="pass")
    round: int = Field(description="Number of the pass inside its workload, from 0; the cold pass is 0.")
    index: int
    key: str = Field(description="Names the prompt; equal in the cold and the warm pass.")
    prompt_tokens: int = Field(description="Token ids sent.")
    asked_tokens: int = Field(description="Output tokens asked for (min_tokens = max_tokens).")
    status: Literal["ok", "failed"]
    error: str | None = Field(default=None, description="Why it failed, e.g. '10 of 64 tokens'.")
    http_status: int | None = None
    response_id: str | None = Field(default=None, description="What the server called the answer, as in its log.")
    eligible_ns: int = Field(
        description="When the order policy allowed it to be sent (a free slot, previous turn done)."
    )
    send_ns: int | None = Field(default=None, description="Request bytes handed to the socket.")
    headers_ns: int | None = Field(default=None, description="Response status line and headers complete.")
    first_token_ns: int | None = Field(default=None, description="First chunk that carries a token.")
    end_ns: int | None = Field(default=None, description="End of the stream.")
    chunk_ns: list[int] = Field(default_factory=list, description="Arrival of every chunk that carries a token.")
    chunk_tokens: list[int] = Field(default_factory=list, description="Tokens in each of those chunks.")
    output_tokens: int | None = Field(
        default=None, description="Tokens received (from ids where the server sends them)."
    )
    token_ids: list[int] | None = None
    usage_prompt_tokens: int | None = None
    usage_completion_tokens: int | None = None
    usage_cached_tokens: int | None = None
    logprobs: list[dict[str, float]] | None = Field(
        default=None, description="Top log probabilities by token id, one map an output position; right-kv passes only."
    )
    anomalies: list[str] = Field(default_factory=list, description="Oddities that are no failure, e.g. 'no [DONE]'.")


class PoolRecord(Strict):
    """The pool of conversations of a pass, with its size in numbers."""

    size: int = Field(description="Conversations open at a time.")
    tokens: int = Field(description="Tokens of a whole conversation; times the size: the working set.")
    order: OrderPolicy


class PassRecord(Strict):
    """One pass of a trial as the runner saw it; part of ``trial.json``."""

    workload: str
    name: PassName
    round: int
    concurrency: int
    requests: int
    failed: int
    start_ns: int
    end_ns: int
    in_flight: list[tuple[int, int, int]] = Field(
        default_factory=list,
        description="(t_ns, requests in flight, eligible requests incl. those in flight), on change.",
    )
    loop_lag_max_ns: int | None = Field(default=None, description="Longest delay of the client's event loop.")
    read_late_p99_ns: int | None = Field(
        default=None,
        description="How long after the kernel had a chunk the client read it, 99th percentile; None = no stamps.",
    )
    read_late_max_ns: int | None = Field(default=None, description="The longest of these.")
    edge_late_max_ns: int | None = Field(
        default=None, description="The longest of those with a first token or the end of an answer."
    )
    client_cpu_ns: int | None = Field(default=None, description="CPU time the client took in the pass.")
    client_process_cpu_ns: list[int] | None = Field(
        default=None, description="That of each client process; None = there was one, or it wasn't recorded."
    )
    engine: int = Field(default=0, ge=0, description="Number of the trial's engine that the pass was sent to.")
    pool: PoolRecord | None = Field(default=None, description="Set where conversations took turns.")
    ramp_s: float = Field(default=0, description="Seconds over which requests in flight grew to `concurrency`.")
    unsent: int = Field(default=0, description="Requests that the pass's deadline kept back; they count as failed.")
    durable_ns: int | None = Field(
        default=None, description="From the pass's end until store traffic was flat; None = never seen flat or no tier."
    )
    drained: bool | None = Field(
        default=None, description="Store traffic was flat before the next pass; None = no counter."
    )


class CounterSnapshot(Record):
    """One line of ``counters.jsonl``: the /metrics pages of a trial's servers at one moment."""

    t_ns: int
    mark: str = Field(description="'ready', '<workload>/<pass>/<round>:start', '…:end' (drained), 'stop'.")
    pages: dict[str, str | None] = Field(
        description="Raw text by server name ('engine', 'lmcache', …); None = no answer."
    )


class ProbeSample(Record):
    """One line of ``probes.jsonl``: host and device state."""

    t_ns: int
    cpu_busy: float | None = Field(default=None, description="Share of all cores that is busy, 0–1.")
    cpu_other: float | None = Field(
        default=None, description="Share of all cores taken by processes that aren't ours, 0–1."
    )
    rss_bytes: int | None = Field(default=None, description="Resident memory of the trial's servers.")
    gpu_util: float | None = None
    gpu_memory_bytes: int | None = None
    gpu_power_mw: int | None = None
    gpu_sm_mhz: int | None = None
    pcie_tx_bytes: int | None = Field(default=None, description="Cumulative, where NVML has the counter.")
    pcie_rx_bytes: int | None = None
    sampler_cpu_ns: int | None = Field(default=None, description="CPU time that the sampler itself took so far.")


class EffectiveConfig(Strict):
    """What the running servers say of themselves."""

    kv_pool_tokens: int | None = Field(default=None, description="Device KV tokens, as the engine logged.")
    block_size: int | None = None
    connector: str | None = Field(default=None, description="kv_connector the engine reports; None = it reports none.")
    connector_config: dict[str, Any] | None = None
    prefix_caching: bool | None = None
    engine_version: str | None = None
    modules: dict[str, bool] = Field(
        default_factory=dict, description="Compiled extensions the stack lists: mapped into a server process or not."
    )
    capacity_tokens: dict[str, int] = Field(default_factory=dict, description="Capacity of each tier in tokens.")
    details: dict[str, Any] = Field(default_factory=dict)


class FurtherEngine(Strict):
    """What was asked of an engine beyond a trial's first, and what it says of itself."""

    connector: dict[str, Any] | None = Field(
        description="Its --kv-transfer-config: the first one's, but for names and folders of its own."
    )
    effective: EffectiveConfig


class ServerRecord(Strict):
    """One process that a trial started."""

    name: str
    argv: list[str]
    env: dict[str, str] = Field(description="Variables set beyond the inherited ones; secrets replaced by '***'.")
    pid: int
    start_ns: int
    ready_ns: int | None
    log: str
    exit_code: int | None = None


class FileEntry(Strict):
    """Integrity of one raw file, written after everything else."""

    bytes: int
    sha256: str
    lines: int | None = None


class HostRecord(Strict):
    """Machine a trial ran on; trials of different hosts are never merged inside a block."""

    host_id: str = Field(description="Hash of machine id and boot id.")
    cpu: str
    cores: int
    memory_bytes: int
    kernel: str
    gpus: list[dict[str, Any]] = Field(default_factory=list)


class TrialRecord(Record):
    """``trial.json``, written last and atomically: a trial without it never finished."""

    experiment: str
    setup: str
    kind: str
    suite: str
    repeat: int
    run: str = Field(description="Hash of all that defines the trial; equal config, equal run.")
    order: int = Field(description="Place in the planned order of the experiment.")
    status: TrialStatus
    reason: str | None = Field(default=None, description="Why it failed.")
    started_at: str = Field(description="UTC, ISO 8601.")
    start_ns: int
    end_ns: int
    startup_ns: int | None = Field(default=None, description="First process started until the engine was ready.")
    host: HostRecord
    stack: dict[str, Any] = Field(description="The stack's stamp: packages, patches, lock hash, preinstalled or not.")
    harness: dict[str, str] = Field(description="kvladder's own version and git revision, Python.")
    config: dict[str, Any] = Field(description="Everything effective for this trial: setup, engine, model, workloads.")
    expected: dict[str, Any] = Field(
        description="What the setup expects the engine to report (connector, prefix_caching, tier, kv bytes per token)."
    )
    effective: EffectiveConfig = Field(description="Of the first engine.")
    further_engines: dict[str, FurtherEngine] = Field(
        default_factory=dict, description="By server name; empty where the trial has one engine."
    )
    servers: list[ServerRecord]
    passes: list[PassRecord]
    marks: dict[str, int] = Field(
        default_factory=dict, description="Named moments in ns: wall-clock split of the trial."
    )
    rss_bytes: int | None = Field(default=None, description="Resident memory of all servers once ready.")
    files: dict[str, FileEntry] = Field(default_factory=dict)

    @property
    def timed(self) -> list[PassRecord]:
        """Passes of workloads: those of right-kv come after them, and their times are no result."""
        return [item for item in self.passes if item.workload != RIGHT_KV]


class StartRecord(Record):
    """``start/<setup>-<run>.json``: the setup was brought up once, read back, and left."""

    setup: str
    run: str
    status: TrialStatus
    reason: str | None = None
    startup_ns: int | None = None
    stop_ns: int | None = None
    rss_bytes: int | None = None
    probe_ttft_ns: int | None = None
    effective: EffectiveConfig
    servers: list[ServerRecord]


class GateResult(Strict):
    """One check: what it expected, what it saw, where it looked."""

    gate: str
    decision: Decision
    required: bool
    expected: str
    seen: str
    source: str
    workload: str | None = None


class WindowTokens(Strict):
    """Prompt tokens of one pass by where their KV came from, after normalisation."""

    workload: str
    name: str
    round: int
    prompt_tokens: int | None
    by_source: dict[str, int | None]
    stored_bytes: int | None = None
    loaded_bytes: int | None = None
    store_time_ns: int | None = None
    load_time_ns: int | None = None
    disk_write_bytes: int | None = Field(default=None, description="Bytes that went on to a disk below the tier.")
    disk_read_bytes: int | None = Field(default=None, description="Bytes read back from it.")
    disk_write_time_ns: int | None = Field(default=None, description="Time of the writes, summed over threads.")
    disk_read_time_ns: int | None = Field(default=None, description="Time of the reads, summed over threads.")
    preemptions: int | None = None
    problems: list[str] = Field(default_factory=list)


class HitDeviation(Strict):
    """How far the hits of a right-kv pass are from computing the same prompts, in log probability (nats)."""

    name: Literal["first-hit", "warm"]
    prompts: int
    median: float
    largest: float
    limit: float | None = Field(
        default=None, description="What is allowed; None: the block has no prefix-cache to measure against."
    )
    beyond: int | None = Field(
        default=None,
        description="Prompts beyond the limit, or computed otherwise than by prefix-cache; None: no limit, or none was "
        "beyond and not every prompt was loaded.",
    )
    flipped: int = Field(description="Prompts whose most probable token is another one.")
    equal: int | None = Field(
        default=None, description="Prompts answered as prefix-cache's hit of them, to the bit: surely right."
    )


class RateClaim(Strict):
    """How fast KV moved in one pass, as somebody claims, and the measured ceiling of the link that it moved over."""

    workload: str
    name: str
    round: int
    direction: Literal["load", "store"]
    basis: Literal["engine", "ttft"] = Field(
        description="engine: the engine's bytes over the engine's own transfer time. ttft: bytes loaded over the time "
        "from the first request sent to the last first token: no load was slower than that."
    )
    bytes: int = Field(gt=0)
    time_ns: int = Field(ge=0)
    link: str | None = Field(default=None, description="Name of the roofline; None: it isn't known what KV moved over.")
    ceiling: float | None = Field(default=None, description="Its fastest measurement, in bytes per second.")
    bounds: bool = Field(
        default=True,
        description="False: a claim shown as percent of a further link of the same way, which is no limit.",
    )
    why: str | None = Field(default=None, description="Why the ceiling decides nothing; None: it does.")

    @property
    def rate(self) -> float:
        """Bytes per second; infinite where bytes moved in no time."""
        return self.bytes * 1e9 / self.time_ns if self.time_ns else float("inf")


class HitPrediction(Strict):
    """What the hit oracle says of one pass: tokens of its requests that came through."""

    workload: str
    name: str
    round: int
    prompt_tokens: int
    working_set: int = Field(
        description="Tokens in different blocks that the pass asks for; of a pool, of the conversations open at a time."
    )
    capacity: dict[str, int | None] = Field(description="Tokens by tier; None: no limit, or an unknown one.")
    hits: dict[str, int] = Field(description="Predicted, by tier.")
    ceiling: int = Field(description="Hit tokens of tiers without limits.")
    exact: bool = Field(description="One answer is possible; else some tokens either way.")
    known: bool = Field(description="What the engine evicts is known from outside, or it evicted nothing.")
    wrong: str | None = Field(default=None, description="The prediction that the counters contradict.")
    thrash: str | None = Field(default=None, description="That the pass can't hit what it asks for, in words.")


class Verdict(Record):
    """``verdict.json``: the gates' findings on one trial."""

    experiment: str
    setup: str
    suite: str
    repeat: int
    run: str
    status: Literal["valid", "invalid", "failed"]
    reason: str | None
    gates: list[GateResult]
    windows: list[WindowTokens]
    rates: list[RateClaim] = Field(default_factory=list, description="Claims of transfer rates, pass by pass.")
    predictions: list[HitPrediction] = Field(
        default_factory=list, description="The hit oracle's, for timed passes of a setup with a tier."
    )
    deviations: list[HitDeviation] = Field(
        default_factory=list, description="What right-kv measured, by hit pass; from the trial's block."
    )
