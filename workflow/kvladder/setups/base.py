"""What every setup is: a configuration that knows how to be served and how to be read.

A new setup is one module here that defines a `SetupConfig` subclass and exports it as ``CONFIG``; its file name is its
``kind``.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field

from kvladder.config.base import Strict
from kvladder.config.experiment import Arguments, EngineConfig, ModelConfig
from kvladder.config.stack import StackConfig
from kvladder.config.traffic import PassName
from kvladder.counters.reading import (
    ENGINE,
    Delta,
    Pages,
    Reading,
    engine_name,
    engine_reading,
    engine_store_activity,
)
from kvladder.serving.process import ProcessSpec
from kvladder.stats.oracle import Hierarchy, Tier

HASH_SEED = {"PYTHONHASHSEED": "0"}
"""Several connectors key block hashes by Python's hash seed: equal in every process, or nothing is ever hit."""


Reset = Literal["device", "host"]
"""``device``: the device prefix cache; ``host``: that and the connector's tier in host memory."""

TIER_FOLDER = "tier"
"""Folder below a trial's own for tiers on disk, unless the setup names another disk."""


COUNTER_FILES = "prometheus"
"""Folder below a trial's own for counters that its processes share through files: gone with them, the pages stay."""


@dataclass(frozen=True, slots=True)
class FileAccess:
    """How a tier on disk is used: its folder (None: the trial's own), tokens of one file, threads at once, whether it
    asks for O_DIRECT."""

    path: str | None
    chunk_tokens: int
    threads: int
    direct: bool = True


@dataclass(frozen=True, slots=True)
class SetupContext:
    """Where and from what a trial's servers run.

    ``folder`` is the trial's scratch folder (configs, logs, tiers on disk); ``namespace`` is unique to the trial;
    ``port(name)`` gives a free loopback port that is held until the trial ends, the same for the same name;
    ``python`` is the stack's interpreter; ``bin_dir`` where its console programs lie. A trial has ``engines`` engines,
    all of one setup; the context is that of engine ``number``, and of the side processes where that is 0.
    """

    engine: EngineConfig
    model: ModelConfig
    model_dir: Path
    stack: StackConfig
    python: Path
    bin_dir: Path
    folder: Path
    namespace: str
    port: Callable[[str], int]
    kv_bytes_per_token: int | None
    engines: int = 1
    number: int = 0

    @property
    def server(self) -> str:
        """Name of the engine among the trial's servers."""
        return engine_name(self.number)

    @property
    def log(self) -> Path:
        """The engine's log, beside those of the trial's other servers."""
        folder = self.folder.parent if self.number else self.folder
        return folder / "logs" / f"{self.server}.log"

    def of_engine(self, number: int) -> SetupContext:
        """From the first engine's context that of another one: a folder, a namespace and a port of its own, so that
        what a setup makes for one engine can't be the other's by accident; side processes are the same for all."""
        if number == self.number:
            return self
        server, port = engine_name(number), self.port
        return replace(
            self,
            number=number,
            folder=self.folder / server,
            namespace=f"{self.namespace}-{number + 1}",
            port=lambda name: port(server if name == ENGINE else name),
        )

    def program(self, name: str) -> str:
        """Path of one of the stack's console programs: beside its interpreter, else (a preinstalled stack) on PATH.

        Returns the place where it should be when it's nowhere: the start fails with that path in its message.
        """
        beside = self.bin_dir / name
        return str(beside) if beside.exists() else shutil.which(name) or str(beside)


class FileTier(Strict):
    """Files below host memory, one a chunk, in the trial's own folder; they are never evicted."""

    path: str | None = Field(
        default=None,
        description="Folder on the disk to measure; each trial makes its own folder in it. Unset: the trial's folder.",
    )
    first_hit: Literal["files", "host"] = Field(
        default="files",
        description="files: host memory is emptied before the first hit, which so comes from disk, the later ones from "
        "host memory. host: nothing is emptied.",
    )

    def folder(self, context: SetupContext) -> Path:
        """The trial's own folder for the files."""
        return Path(self.path) / context.namespace if self.path else context.folder / TIER_FOLDER

    def serve(self, name: PassName) -> bool:
        """Whether a pass of that name must be served from the files."""
        return self.first_hit == "files" and name == "first-hit"


class SetupConfig(Strict):
    """One way to serve. Subclasses narrow ``kind`` and override what differs from a plain server."""

    kind: str
    title: str | None = Field(default=None, description="Name shown in the report; unset: the setup's own name.")
    args: Arguments = Field(default_factory=dict, description="vLLM arguments of this setup alone.")
    env: dict[str, str] = Field(default_factory=dict, description="Environment variables of this setup alone.")
    variant: Literal["patched", "stock"] = Field(
        default="patched",
        description="patched: the stack with the project's patches. stock: the same packages without them; only on a "
        "stack that has patches.",
    )

    prefix_caching: bool = Field(
        default=False,
        description="Device prefix cache on above the setup's own tier, as in production. Off, a hit can only come "
        "from that tier; on, the device cache is emptied before each pass that is to hit there, but not before a mixed "
        "one.",
    )
    tier: ClassVar[str | None] = None
    """Where a hit of the warm pass must come from; None: there is no tier, every prompt is computed."""
    shares_pool: ClassVar[bool] = False
    """Whether the tier is one pool for all engines of a trial: what one has stored another must find, and else must
    not. Such a pool is the side processes'; the device cache, where it is on, is each engine's own."""

    def shown_title(self, name: str) -> str | None:
        """Title for the report of a setup of this name, which says so where it runs stock; None: the name itself."""
        if self.variant == "patched":
            return self.title
        title = self.title or name
        return title if "stock" in title.lower() else f"{title} (stock)"

    device_side_processes: ClassVar[tuple[str, ...]] = ()
    """Names of side processes that copy KV on the GPU themselves: a profiler of the engine alone wouldn't see it."""

    @property
    def ours_in_path(self) -> str | None:
        """Words for the report where a part of ours moves the data, so that nobody takes it for the stock engine."""
        return None

    def connector(self, context: SetupContext) -> dict[str, Any] | None:
        """``--kv-transfer-config`` as a mapping; None: no connector."""
        return None

    def settings(self) -> dict[str, Any]:
        """Configuration that reaches a connector or its side process past the engine's arguments; empty: none."""
        return {}

    def settings_read(self, log: str) -> Mapping[str, Any] | None:
        """`settings` as they run, in the words of the logs of engine and side processes; None: they don't say."""
        return None

    def side_processes(self, context: SetupContext) -> list[ProcessSpec]:
        """Processes that must be ready before the engine starts, in order."""
        return []

    def engine_env(self, context: SetupContext) -> dict[str, str]:
        """Environment of the engine beyond the experiment's and the setup's own."""
        return {}

    def granularity(self, block_size: int) -> int:
        """Tokens that hits come in: a repeated prompt's hit is a multiple of it."""
        return block_size

    def reset_before(self, name: PassName) -> Reset | None:
        """What is emptied before a pass of that name, so that its hits come from `hit_tier`; None: nothing.

        A mixed pass is to be served by all tiers there are.
        """
        above = self.prefix_caching and self.tier not in (None, "gpu")
        return "device" if above and name in ("first-hit", "warm") else None

    def host_reset(self, context: SetupContext) -> tuple[int, str] | None:
        """Port and path of a side process to POST to, which empties the tier in host memory; None: the engine does."""
        return None

    def hit_tier(self, name: PassName) -> str | None:
        """The tier that a pass of that name must be served from."""
        return self.tier

    def expected_hit(self, prompt_tokens: int, block_size: int) -> int:
        """Tokens of a fully repeated prompt that must come from the tier; 0 without one.

        At least one token is always computed, so the hit is floor((L-1)/g)·g.
        """
        if self.tier is None:
            return 0
        unit = self.granularity(block_size)
        return (prompt_tokens - 1) // unit * unit

    def capacity_bytes(self) -> dict[str, int]:
        """Configured capacity of each tier below the device, in bytes."""
        return {}

    def hierarchy(self, block_size: int, capacity_tokens: Mapping[str, int], version: str | None) -> Hierarchy:
        """How the setup's tiers hold and evict, for the hit oracle; ``version`` is the engine's.

        ``capacity_tokens`` are real capacities by tier; one that is missing there is taken as unlimited. As far as the
        base class knows: the device pool where it caches, and the connector's tier as an LRU of unknown order.
        """
        # One block of the pool is never handed out.
        device = _chunks(capacity_tokens.get("gpu"), block_size, spare=1)
        return Hierarchy(
            block=block_size,
            device=Tier("gpu", device) if self.prefix_caching else None,
            host=None if self.tier in (None, "gpu") else self.host_tier(block_size, capacity_tokens, version),
        )

    def host_tier(self, block_size: int, capacity_tokens: Mapping[str, int], version: str | None) -> Tier:
        """The tier in host memory, or the pool, of a setup whose ``tier`` isn't the device; see `hierarchy`."""
        assert self.tier is not None  # noqa: S101 (its callers' condition)
        unit = self.granularity(block_size)
        capacity = _chunks(capacity_tokens.get(self.tier), unit)
        whole = self.expected_hit(unit, block_size) > 0
        return Tier(self.tier, capacity, max(unit // block_size, 1), order="any", whole=whole, known=False)

    def disk_folder(self, context: SetupContext) -> Path | None:
        """Folder that the setup's tier on disk fills, the trial's alone: it is removed once the servers are gone."""
        return None

    def file_access(self, block_size: int) -> FileAccess | None:
        """How the setup's tier on disk is read and written, for a roofline of the same; None: there is no such tier."""
        return None

    def object_tokens(self, block_size: int) -> int | None:
        """Tokens of one object that moves through Mooncake's transfer engine, for a roofline of the same; None: none
        does."""
        return None

    def shared_memory_bytes(self) -> int:
        """What the servers will put into /dev/shm, in bytes."""
        return 0

    def native_modules(self) -> list[str]:
        """Keys of the stack's ``native`` map whose extensions must be loaded in this setup's servers."""
        return ["engine"]

    def links(self, tier: str, *, gpu: bool, log: str, engines: int = 1) -> tuple[str, ...]:
        """Links of `probes.rooflines` that KV of a tier moves over, without direction; several: one of them, or both.

        ``log`` is the engine's: some say in it which way they take; ``engines`` is how many the trial had. Empty: it
        isn't known.
        """
        known = {"cpu": "pinned" if gpu else "host_memcpy", "nvme": "disk"}
        return (known[tier],) if tier in known else ()

    def links_beside(self, links: tuple[str, ...]) -> tuple[str, ...]:
        """Links that a rate over ``links`` is shown as percent of as well, but that don't bound it."""
        return ()

    def read(self, delta: Delta) -> Reading:
        """Tokens by source and bytes of one pass, from the servers' counters."""
        return engine_reading(delta, self.tier)

    def store_activity(self, pages: Pages) -> Mapping[str, float] | None:
        """Counters that move while KV is being stored; the drain waits until they are flat. None: no such counter."""
        return engine_store_activity(pages) if self.tier not in (None, "gpu") else {}


def _chunks(tokens: int | None, unit: int, spare: int = 0) -> int | None:
    return None if tokens is None else max(tokens // unit - spare, 0)
