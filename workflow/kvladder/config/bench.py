"""The truth bench: which load clients are measured against the reference server, how, and what is recorded."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from kvladder.config.base import Name, Record, Strict
from kvladder.config.records import HostRecord
from kvladder.config.yaml import ConfigError, problems

Client = Literal["kvladder", "vllm", "aiperf", "guidellm"]
Fault = Literal[
    "none",
    "empty-first",
    "no-text",
    "several",
    "stall",
    "no-done",
    "short",
    "error-200",
    "http-500",
    "http-429",
    "crlf",
    "comments",
    "usage",
    "cut",
    "endless",
]


Count = Annotated[int, Field(ge=1)]


class BenchBlock(Strict):
    """A cross product of clients, cores, prompt lengths and levels of concurrency."""

    clients: list[Client] = Field(min_length=1, description="Load clients.")
    cores: list[Count] = Field(
        default=[1],
        min_length=1,
        description="Cores that a client and all its processes get; the own client runs a process on each.",
    )
    prompt_tokens: list[Count] = Field(default=[1000], min_length=1, description="Prompt lengths in token ids.")
    concurrency: list[Count] = Field(min_length=1, description="Requests in flight.")
    steady_requests: int = Field(
        default=512, ge=1, description="Requests beyond the first wave; a 99th percentile needs 500."
    )
    faults: list[Fault] = Field(default=["none"], min_length=1, description="How the server misbehaves.")
    ttft_ms: float = Field(default=50, ge=0, description="Scripted time from the request read to the first token.")
    itl_ms: float = Field(default=10, ge=0, description="Scripted time between tokens.")
    output_tokens: int = Field(default=16, ge=1, description="Tokens of an answer, one a chunk.")
    timeout_s: float = Field(
        default=240, gt=0, description="A client that isn't done by then is stopped, and it shows."
    )


class BenchGoals(Strict):
    """What this project's own client is to keep on one core. Biases and errors in milliseconds."""

    ttft_p50_ms: float = Field(default=0.3, description="Median TTFT bias at every concurrency.")
    ttft_p99_ms: float = Field(default=1.0, description="99th percentile at a concurrency of up to 256.")
    ttft_p99_above_256_ms: float = Field(default=1.3, description="99th percentile beyond 256.")
    first_wave_p99_ms: float = Field(default=2.0, description="99th percentile with the first wave in it.")
    gap_p99_ms: float = Field(default=1.0, description="99th percentile of |gap seen - gap written|.")
    concurrency_held: float = Field(default=0.98, description="Mean in flight over asked, as the server sees it.")
    cpu_s_per_1000: float = Field(default=0.2, description="CPU seconds per 1,000 requests.")
    memory_mb_per_1000: float = Field(default=60, description="Memory beyond the payload per 1,000 requests, in MB.")
    zero_delay_rps: float = Field(default=10_000, description="Requests a second from a server without delay.")


class BenchConfig(Strict):
    """Load clients against a reference server that logs what it did, and when."""

    experiment: Name = Field(description="Name: the folder below results/.")
    seed: int = Field(default=1, description="Seed of the prompts.")
    repeats: int = Field(default=1, ge=1, description="Runs of every cell.")
    spin_us: float = Field(
        default=50, ge=0, description="How long before a deadline the server stops sleeping, where its core is its own."
    )
    blocks: list[BenchBlock] = Field(min_length=1, description="What is measured.")
    goals: BenchGoals = Field(default=BenchGoals(), description="What the own client is held to.")


class BenchCell(Strict):
    """One run of one client at one point."""

    client: Client
    cores: int
    prompt_tokens: int
    concurrency: int
    requests: int
    fault: Fault
    ttft_ms: float
    itl_ms: float
    output_tokens: int
    timeout_s: float
    seed: int
    spin_us: float
    repeat: int

    @property
    def kind(self) -> str:
        """``schedule``, ``rate`` (a server without delay), or the name of the fault."""
        if self.fault != "none":
            return self.fault
        return "schedule" if self.ttft_ms or self.itl_ms else "rate"

    @property
    def folder(self) -> Path:
        """Where its raw data lie below the experiment's results; another definition, another folder."""
        text = self.model_dump_json(exclude={"repeat"})
        digest = hashlib.sha256(text.encode()).hexdigest()[:8]
        point = f"p{self.prompt_tokens}-c{self.concurrency}"
        return Path("cells", self.kind, f"{self.client}-{self.cores}", f"{point}-{digest}", f"r{self.repeat}")


class UsageSample(Strict):
    """What a client's processes had used by a moment."""

    t_ns: int = Field(description="CLOCK_MONOTONIC.")
    cpu_ns: int = Field(description="CPU time of the whole tree so far, children that ended included.")
    rss_bytes: int = Field(description="Sum of resident sizes; pages that processes share count in each.")


class CellRecord(Record):
    """``cell.json``: how a cell was measured. Its requests are in ``requests.parquet``."""

    cell: BenchCell
    client_version: str
    host: HostRecord
    server_cores: list[int]
    client_cores: list[int]
    server_cpu_s: float = Field(
        description="CPU time of the server; it spins before deadlines where its core is its own."
    )
    shared_core: bool = Field(description="The client's cores include the server's: there were not enough.")
    start_ns: int = Field(description="When the client's process was started, CLOCK_MONOTONIC.")
    wall_s: float = Field(description="From there to its end.")
    exit_code: int | None = Field(description="None: stopped at the deadline.")
    error: str | None = Field(description="Why its output could not be read.")
    cpu_s: float | None = Field(description="CPU time of all its processes; None when it was stopped.")
    peak_rss_bytes: int
    samples: list[UsageSample]
    client_ok: int | None = Field(description="Requests that the client calls successful.")
    client_failed: int | None
    pass_cpu_s: float | None = Field(default=None, description="Own client: CPU time of the pass alone.")
    extra_rss_bytes: int | None = Field(
        default=None, description="Own client: peak memory less what it had before the pass, sent and received bytes."
    )
    loop_lag_max_ns: int | None = Field(default=None, description="Own client: longest delay of its timer.")


def plan(config: BenchConfig) -> list[BenchCell]:
    """Every cell once, repeats outermost: a slow spell of the machine mustn't hit all runs of a cell."""
    cells: dict[BenchCell, None] = {}
    for repeat in range(config.repeats):
        for block in config.blocks:
            for concurrency in block.concurrency:
                for prompt in block.prompt_tokens:
                    for cores in block.cores:
                        for fault in block.faults:
                            for client in block.clients:
                                cell = BenchCell(
                                    client=client,
                                    cores=cores,
                                    prompt_tokens=prompt,
                                    concurrency=concurrency,
                                    requests=concurrency + block.steady_requests,
                                    fault=fault,
                                    ttft_ms=block.ttft_ms,
                                    itl_ms=block.itl_ms,
                                    output_tokens=block.output_tokens,
                                    timeout_s=block.timeout_s,
                                    seed=config.seed,
                                    spin_us=config.spin_us,
                                    repeat=repeat,
                                )
                                cells[cell] = None
    return list(cells)


def validate(data: dict[str, Any]) -> BenchConfig:
    """Validate a loaded config. Raises ConfigError whose message has one line a problem."""
    try:
        return BenchConfig.model_validate(data)
    except ValidationError as error:
        raise ConfigError("\n".join(problems(error))) from None
