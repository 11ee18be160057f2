"""What gates read, and how they say what they found.

A gate never takes "unknown" for a pass: what it can't know is ``not-checked``. Some evidence every finished trial must
have; where it is missing, a gate says so with `Findings.unreadable`, and a required gate that could not be checked
makes the trial invalid.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, TypeVar

from pydantic import ValidationError

from kvladder.config import registry
from kvladder.config.experiment import GateConfig
from kvladder.config.records import (
    CounterSnapshot,
    Decision,
    GateResult,
    PassRecord,
    ProbeSample,
    RateClaim,
    RequestRecord,
    TrialRecord,
    WindowTokens,
)
from kvladder.config.rooflines import Rooflines, load, of_host
from kvladder.config.traffic import RIGHT_KV
from kvladder.counters.reading import Delta, Page, Pages, engine_name, parse_page, seen_from
from kvladder.replay import PassPrediction, Prediction, predict
from kvladder.setups.base import SetupConfig

COULD_NOT = "could not be checked"
"""How ``seen`` begins where evidence is missing that a finished trial must have."""

HITS = ("gpu", "cpu", "nvme", "remote", "unknown")
"""Sources of a prompt token that are no recomputation."""

O_DIRECT_REFUSED = "O_DIRECT is not supported at"
"""vLLM's warning (``v1/kv_offload/tiering/fs/manager.py``) that its files go through the page cache."""

CACHED_SHARE = 0.01
"""Share of a tier's files that may be cached although they are used directly: others may look at a file, too."""

T = TypeVar("T")

TrialKey = tuple[str, str]
"""A trial inside its block: setup and run."""

PredictedPass = tuple[PassRecord, WindowTokens, PassPrediction]
"""A pass, its counters, and what the hit oracle says of it."""


class Gate(Protocol):
    """A gate's module, as far as it concerns one trial."""

    REQUIRED: bool

    def check(self, evidence: Evidence) -> list[GateResult]:
        """Findings on one trial: one, or one a workload."""


class BlockGate(Protocol):
    """A gate's module, as far as it concerns the trials of one block."""

    REQUIRED: bool

    def check_block(self, evidences: Sequence[Evidence]) -> dict[TrialKey, list[GateResult]]:
        """Findings by trial; trials are of one suite and repeat, and valid by themselves."""


class Unreadable(Exception):
    """A trial folder that can't be judged; the message says why, and names the file."""


@dataclass
class Evidence:
    """A finished trial's folder, read on demand.

    ``broken`` names the raw files that aren't what ``trial.json`` says they are, each with what is wrong. Properties
    raise `Unreadable` for content that can't be read.
    """

    folder: Path
    trial: TrialRecord
    config: GateConfig = field(default_factory=GateConfig)

    @classmethod
    def load(cls, folder: Path, config: GateConfig | None = None) -> Evidence:
        """Read ``trial.json`` of a folder. Raises Unreadable."""
        try:
            trial = TrialRecord.model_validate_json((folder / "trial.json").read_bytes())
        except OSError:
            raise Unreadable("never finished: there is no trial.json") from None
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(map(str, first["loc"]))
            raise Unreadable(f"never finished: trial.json can't be read ({where or 'JSON'}: {first['msg']})") from None
        return cls(folder, trial, config or GateConfig())

    @property
    def key(self) -> TrialKey:
        """The trial inside its block."""
        return self.trial.setup, self.trial.run

    @property
    def workloads(self) -> list[str]:
        """Names of the trial's workloads, in order: what was timed."""
        return list(dict.fromkeys(item.workload for item in self.trial.timed)) or list(
            self.trial.config.get("workloads", {})
        )

    @property
    def served(self) -> list[str]:
        """The workloads and, where the trial has them, the passes of right-kv: what must have been served properly."""
        extra = [item.workload for item in self.trial.passes if item.workload == RIGHT_KV]
        return [*self.workloads, *extra[:1]]

    @cached_property
    def broken(self) -> dict[str, str]:
        """Raw files that are missing, truncated or changed since the trial wrote them."""
        found: dict[str, str] = {}
        for name in (*(f"{workload}.requests.jsonl" for workload in self.served), "counters.jsonl"):
            if name not in self.trial.files:
                found[name] = "is not listed in trial.json"
        for name, entry in self.trial.files.items():
            try:
                with (self.folder / name).open("rb") as file:
                    size = os.fstat(file.fileno()).st_size
                    content = hashlib.file_digest(file, "sha256").hexdigest() if size == entry.bytes else None
            except OSError as error:
                found[name] = f"can't be read ({error.strerror})"
                continue
            if size != entry.bytes:
                found[name] = f"has {size} bytes, was written with {entry.bytes}"
            elif content != entry.sha256:
                found[name] = "has other content than was written (sha256 differs)"
        return found

    @cached_property
    def requests(self) -> dict[str, list[RequestRecord]]:
        """Requests by workload, in the file's order."""
        return {name: self._lines(f"{name}.requests.jsonl", RequestRecord.model_validate_json) for name in self.served}

    @cached_property
    def probes(self) -> list[ProbeSample]:
        """Host and device samples; empty where none were taken."""
        if "probes.jsonl" not in self.trial.files:
            return []
        return self._lines("probes.jsonl", ProbeSample.model_validate_json)

    @cached_property
    def pages(self) -> dict[str, Pages]:
        """Parsed /metrics pages at the start and the end of each pass, by mark."""
        # Consecutive snapshots of an idle server are equal text, and parsing is what judging takes time for.
        parsed: dict[str, Page] = {}

        def parse(text: str | None) -> Page | None:
            if text is None:
                return None
            if text not in parsed:
                parsed[text] = parse_page(text)
            return parsed[text]

        used = {f"{pass_label(item)}:{edge}" for item in self.trial.passes for edge in ("start", "end")}
        return {
            snapshot.mark: {server: parse(text) for server, text in snapshot.pages.items()}
            for snapshot in self._lines("counters.jsonl", CounterSnapshot.model_validate_json)
            if snapshot.mark in used
        }

    @cached_property
    def setup(self) -> SetupConfig:
        """The setup's configuration as the trial ran it."""
        try:
            config: SetupConfig = registry.load("setups", self.trial.kind).CONFIG.model_validate(
                self.trial.config.get("setup")
            )
        except ValueError as error:
            raise Unreadable(f"its setup can't be read by this version: {error}") from None
        return config

    @cached_property
    def windows(self) -> list[WindowTokens]:
        """Tokens and bytes of each pass, in the order of ``trial.passes``."""
        return [self._window(item) for item in self.trial.passes]

    def between(self, item: PassRecord) -> list[str]:
        """What shows that a server restarted between the pass before and this one, which no pass's own window does."""
        place = self.trial.passes.index(item)
        if not place:
            return []
        before = self.pages.get(f"{pass_label(self.trial.passes[place - 1])}:end", {})
        return [
            problem.replace("inside the window", "between passes")
            for problem in Delta(before, self.pages.get(f"{pass_label(item)}:start", {})).problems
        ]

    @property
    def engines(self) -> int:
        """Engines of the setup that the trial had."""
        return 1 + len(self.trial.further_engines)

    @cached_property
    def engine_logs(self) -> list[str]:
        """Each engine's own log; empty where there is none, which is no evidence of anything."""
        logs = []
        for number in range(self.engines):
            try:
                path = self.folder / "logs" / f"{engine_name(number)}.log"
                logs.append(path.read_text(encoding="utf-8", errors="replace"))
            except OSError:
                logs.append("")
        return logs

    @cached_property
    def rooflines(self) -> tuple[Rooflines | None, str | None]:
        """What the links of this trial's host did at best, and why that is no evidence; see `rooflines.of_host`.

        They lie beside ``trials``, in ``<experiment>/trials/<setup>/<suite>/r<repeat>-<run>`` four levels up.
        """
        above = self.folder.absolute().parents
        return of_host(load(above[3]) if len(above) > 3 else [], self.trial.host)

    @cached_property
    def page_cache(self) -> bool | None:
        """Whether the tier on disk was read and written through the page cache; None: nobody can tell, or no such tier.

        The engine logs when its file system refuses O_DIRECT; how much of the tier's files was cached when the passes
        were over is in ``effective.details``.
        """
        disk = self.trial.effective.details.get("disk") or {}
        if any(O_DIRECT_REFUSED in log for log in self.engine_logs):
            return True
        cached, size = disk.get("cached_bytes"), disk.get("bytes")
        return cached > CACHED_SHARE * size if cached is not None and size else None

    @cached_property
    def prediction(self) -> Prediction | None:
        """What the hit oracle says of every pass; None where the engine didn't report its block size."""
        sent = {number: self.sent(item) for number, item in enumerate(self.trial.passes)}
        try:
            return predict(self.trial, self.setup, sent)
        except ValueError as error:
            raise Unreadable(f"its requests can't be replayed by this version: {error}") from None

    def predicted(self, item: PassRecord) -> PassPrediction | None:
        """What the hit oracle says of one pass."""
        if self.prediction is None:
            return None
        return self.prediction.passes[self.trial.passes.index(item)]

    def elsewhere(self, item: PassRecord) -> dict[str, int | None]:
        """Prompt tokens that the engines which a pass was not sent to counted in it, by server name."""
        start, end = (self.pages.get(f"{pass_label(item)}:{edge}", {}) for edge in ("start", "end"))
        others = {engine_name(number) for number in range(self.engines)} - {engine_name(item.engine)}
        window = Delta(start, end)
        return {server: window.counter(server, "vllm:prompt_tokens_total") for server in sorted(others)}

    def passes(self, workload: str, *names: str) -> list[tuple[PassRecord, WindowTokens]]:
        """Passes of one workload with their counters; only those of these names, if any are given."""
        pairs = zip(self.trial.passes, self.windows, strict=True)
        return [pair for pair in pairs if pair[0].workload == workload and (not names or pair[0].name in names)]

    def predicted_passes(self, workload: str, *names: str) -> list[PredictedPass]:
        """The same with what the hit oracle says of each; empty where the engine didn't report its block size."""
        found = [(item, window, self.predicted(item)) for item, window in self.passes(workload, *names)]
        return [(item, window, each) for item, window, each in found if each is not None]

    def sent(self, item: PassRecord) -> list[RequestRecord]:
        """Requests of one pass."""
        return self._by_pass.get(pass_label(item), [])

    @cached_property
    def _by_pass(self) -> dict[str, list[RequestRecord]]:
        groups: dict[str, list[RequestRecord]] = {}
        for requests in self.requests.values():
            for request in requests:
                groups.setdefault(f"{request.workload}/{request.pass_name}/{request.round}", []).append(request)
        return groups

    def _window(self, item: PassRecord) -> WindowTokens:
        label = pass_label(item)
        start, end = (seen_from(self.pages.get(f"{label}:{edge}", {}), item.engine) for edge in ("start", "end"))
        reading = self.setup.read(Delta(start, end))
        return WindowTokens(workload=item.workload, name=item.name, round=item.round, **asdict(reading))

    def _lines(self, name: str, parse: Callable[[bytes], T]) -> list[T]:
        records: list[T] = []
        try:
            # Bytes, whose lines end with a newline and nothing else: JSON strings may hold U+2028 and its like.
            with (self.folder / name).open("rb") as file, _no_collector():
                for line in file:
                    records.append(parse(line))
        except OSError as error:
            raise Unreadable(f"{name} can't be read ({error})") from None
        except ValidationError as error:
            message = error.errors(include_url=False)[0]["msg"]
            raise Unreadable(f"{name}, line {len(records) + 1}: {message}") from None
        return records


@contextmanager
def _no_collector() -> Iterator[None]:
    """Records hold no cycles, and looking for some among millions takes longer than parsing them."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


class Findings:
    """Collects a gate's results: ``source`` is where it looks, ``module`` the gate's ``__name__``."""

    def __init__(self, module: str, required: bool, source: str) -> None:
        self.gate = module.rpartition(".")[2].replace("_", "-")
        self.required, self.source = required, source
        self.results: list[GateResult] = []

    def decide(self, good: bool, expected: str, seen: str, workload: str | None = None) -> None:
        """Pass or fail."""
        self._add("pass" if good else "fail", expected, seen, workload)

    def skip(self, expected: str, why: str, workload: str | None = None) -> None:
        """Not checked, and that may be: it doesn't apply, or nothing on this stack can tell."""
        self._add("not-checked", expected, why, workload)

    def unreadable(self, expected: str, why: str, workload: str | None = None) -> None:
        """Not checked although every finished trial must have the evidence: invalid where the gate is required."""
        self._add("not-checked", expected, f"{COULD_NOT}: {why}", workload)

    def _add(self, decision: Decision, expected: str, seen: str, workload: str | None) -> None:
        self.results.append(
            GateResult(
                gate=self.gate,
                decision=decision,
                required=self.required,
                expected=expected,
                seen=seen,
                source=self.source,
                workload=workload,
            )
        )


def pass_label(item: PassRecord | WindowTokens) -> str:
    """``workload/pass/round``, as in the marks of ``counters.jsonl``."""
    return f"{item.workload}/{item.name}/{item.round}"


def short_label(item: PassRecord | WindowTokens | RateClaim) -> str:
    """``pass round`` for a message that names the workload already."""
    return f"{item.name} {item.round}"


def tokens(by_source: Mapping[str, int | None], only: Iterable[str] = HITS) -> str:
    """``cpu 2944, computed 56`` for a message; sources with 0 are left out, unknown ones are a question mark."""
    parts = {tier: by_source.get(tier) for tier in only}
    return (
        ", ".join(f"{tier} {'?' if value is None else value}" for tier, value in parts.items() if value != 0) or "none"
    )


def measured(window: WindowTokens, tier: str | None = None) -> int | None:
    """Hit tokens that were counted in a pass: of one tier, or of all together; None where they're unknown."""
    values = [window.by_source.get(each) for each in ([tier] if tier else HITS)]
    return None if None in values else sum(value or 0 for value in values)


def majority(values: Mapping[TrialKey, Any]) -> Any | None:
    """The value that more than half of a block's trials have; None when there is none: then nobody is right."""
    # JSON text, so that lists and maps can be counted too.
    counts = Counter(json.dumps(value, sort_keys=True) for value in values.values())
    text, count = counts.most_common(1)[0]
    return json.loads(text) if 2 * count > len(values) else None
