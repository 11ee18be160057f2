"""Serve one setup under a profiler and send it what the experiment's timelines ask for.

Like a trial, with servers of its own: warm-up, the same passes without the profiler (what it costs is their
difference), then the passes inside its recording. Prompts are drawn apart from every trial's.
"""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kvladder.config.experiment import TimelineConfig
from kvladder.config.records import PassRecord
from kvladder.config.timelines import CaptureRecord, WindowRecord
from kvladder.config.traffic import PassPlan
from kvladder.load import RequestTrace, run_pass, write_records
from kvladder.provenance.host import describe_harness, describe_host
from kvladder.serving.process import ServerFailed
from kvladder.stack.paths import ROOT
from kvladder.timeline.profilers import Nsys, NsysTools, Profiler, Torch, TraceMissing, Window
from kvladder.trial.session import Attempt, Job, Say, Session

UNTRACED = "untraced"
"""What file names of the passes without the profiler begin with."""


def choose(config: TimelineConfig, device: str, folder: Path, side: tuple[str, ...]) -> Profiler:
    """The profiler that the configuration names, or the best there is. Raises ValueError where it isn't there."""
    tools = NsysTools.find() if config.profiler != "torch" and device == "cuda" else None
    if tools is not None:
        return Nsys(folder, config.deadline_s, tools, side)
    if config.profiler == "nsys":
        raise ValueError("timelines.profiler: nsys is neither on PATH nor under /opt/nvidia, or there is no GPU")
    return Torch(folder, config.deadline_s)


@dataclass(slots=True)
class _Sent:
    """What was sent so far."""

    records: list[RequestTrace] = field(default_factory=list)
    untraced: list[RequestTrace] = field(default_factory=list)
    passes: list[PassRecord] = field(default_factory=list)
    windows: list[Window] = field(default_factory=list)


def run_capture(job: Job, setup: str, folder: Path) -> CaptureRecord:
    """Capture one setup into ``folder``: requests, counters, marks, the profiler's files; returns what was done.

    A server that fails and a profiler that leaves no file are results, with their reason.
    """
    config = job.config.timelines
    assert config is not None  # noqa: S101 (the rule is there only where it is set)
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "logs").mkdir(parents=True)
    say = Say(f"timeline {setup}", job.write)
    attempt = Attempt(job, setup, f"{job.config.experiment}-timeline-{setup}", folder, say)
    side = attempt.setup.device_side_processes
    profiler = choose(config, job.stack.config.device, attempt.folder / "profile", side)
    attempt.prepare = lambda spec: profiler.prepare(spec, job.stack.python)
    started_at, sent = datetime.now(UTC).isoformat(timespec="seconds"), _Sent()
    effective, expected, reason, databases = None, {}, None, {}
    try:
        with attempt.up() as session:
            session.snapshot("ready")
            expected = _expected(session)
            try:
                _send(session, config, profiler, sent, say)
            finally:
                effective = session.effective if session.group.failure() is None else None
                lines = [snapshot.model_dump_json(by_alias=True) + "\n" for snapshot in session.snapshots]
                (folder / "counters.jsonl").write_text("".join(lines), encoding="utf-8")
                write_records(folder / "requests.jsonl", sent.records)
                write_records(folder / f"{UNTRACED}.requests.jsonl", sent.untraced)
        if isinstance(profiler, Nsys):
            databases = profiler.databases(sent.windows[0], say)
    except (ServerFailed, TraceMissing) as failure:
        reason = str(failure)
        say(f"failed: {reason}")
    return CaptureRecord(
        experiment=job.config.experiment,
        setup=setup,
        kind=attempt.setup.kind,
        status="completed" if reason is None else "failed",
        reason=reason,
        started_at=started_at,
        profiler=profiler.name,
        host=describe_host(attempt.devices),
        stack=job.stack.stamp.model_dump(mode="json", by_alias=True),
        harness=describe_harness(ROOT),
        effective=effective,
        expected=expected,
        servers=attempt.records(),
        passes=sent.passes,
        windows=[_window(window, folder) for window in sent.windows],
        databases={name: _inside(path, folder) for name, path in databases.items()},
    )


def _expected(session: Session) -> dict[str, Any]:
    return {"tier": session.setup.tier, "kv_bytes_per_token": session.context.kv_bytes_per_token}


def _window(window: Window, folder: Path) -> WindowRecord:
    return WindowRecord(name=window.name, files=[_inside(path, folder) for path in window.files])


def _inside(path: Path, folder: Path) -> str:
    return path.relative_to(Path(folder).absolute()).as_posix()


def _send(session: Session, config: TimelineConfig, profiler: Profiler, sent: _Sent, say: Say) -> None:
    workloads = session.job.config.workloads
    longest = max((workloads[name] for name in config.workloads), key=lambda item: item.longest_prompt())
    session.warm_up(longest, "timeline")
    before = _plans(session, config, "timeline/untraced")
    for plan in before:
        sent.untraced += _pass(session, plan, sent, traced=False)
    plans = _plans(session, config, "timeline/traced")
    # A recording that can't be repeated holds all passes; others are one a pass, so that none gets large.
    for name, part in [("all", plans)] if profiler.once else [(plan.label, [plan]) for plan in plans]:
        session.profile("start")
        profiler.began()
        try:
            for plan in part:
                sent.records += _pass(session, plan, sent, traced=True)
        finally:
            say(f"recorded {name}")
            session.profile("stop")
        sent.windows.append(profiler.ended(name, session.group))


def _plans(session: Session, config: TimelineConfig, namespace: str) -> list[PassPlan]:
    """Cold, first hit and one later hit of each workload."""
    traffic = session.traffic(namespace, session.effective)
    chosen: list[PassPlan] = []
    for name in config.workloads:
        names: set[str] = set()
        for plan in session.job.config.workloads[name].passes(name, traffic):
            if plan.name not in names:
                names.add(plan.name)
                chosen.append(plan)
    return chosen


def _pass(session: Session, plan: PassPlan, sent: _Sent, *, traced: bool) -> list[RequestTrace]:
    session.reset_before(plan.name)
    label = plan.label if traced else f"{UNTRACED}:{plan.label}"
    session.snapshot(f"{label}:start")
    result = run_pass(session.targets[0], plan, session.job.limits)
    session.group.check_alive()
    drain = session.drain()
    session.snapshot(f"{label}:end")
    failed = sum(record.status != "ok" for record in result.records)
    if failed == len(result.records):
        raise session.failed(f"no request of {label} came through: {result.records[0].error}")
    if traced:
        sent.passes.append(
            PassRecord(
                workload=plan.workload,
                name=plan.name,
                round=plan.round,
                concurrency=plan.concurrency,
                requests=len(plan.requests),
                failed=failed,
                start_ns=result.start_ns,
                end_ns=result.end_ns,
                in_flight=result.in_flight,
                durable_ns=drain.durable_ns,
                drained=drain.drained,
            )
        )
    # Between passes nothing of one may be taken for the next's.
    time.sleep(0.05)
    return result.records
