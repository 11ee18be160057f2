"""Run one trial, or bring a setup up once.

A crash of an engine is a result: both functions return a record whose status is ``failed`` with the reason. Only a
misuse (a port in use, no lease, an interrupt) raises.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kvladder.config.experiment import Trial, effective
from kvladder.config.records import (
    EffectiveConfig,
    FileEntry,
    FurtherEngine,
    PassRecord,
    PoolRecord,
    StartRecord,
    TrialRecord,
)
from kvladder.config.traffic import RIGHT_KV, PassPlan, Pool
from kvladder.load import PassResult, RequestTrace, processes_for, run_in_processes, write_records
from kvladder.probes.sampler import sampling
from kvladder.provenance.host import describe_harness, describe_host
from kvladder.serving.process import ServerFailed
from kvladder.serving.readback import memory
from kvladder.serving.rootcause import log_cause
from kvladder.stack.paths import ROOT
from kvladder.trial import right_kv
from kvladder.trial.page_cache import disk_state
from kvladder.trial.session import Attempt, Job, Say, Session

_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


def run_start(job: Job, setup: str, run: str, folder: Path) -> StartRecord:
    """Bring a setup up once, with as many engines as a suite needs: readiness, effective configuration, one prompt,
    memory; then stop it.

    ``folder`` is this start's own scratch folder. What can't start is known before hours are spent measuring.
    """
    config = job.config
    say = Say(f"start {setup}", job.write)
    _fresh(folder)
    attempt = Attempt(job, setup, f"{config.experiment}-start-{setup}-{run}", folder, say, engines=config.engines())
    effective_config, ttft, resident, stop_ns, reason = EffectiveConfig(), None, None, None, None
    workload = max(config.workloads.values(), key=lambda item: item.longest_prompt())
    try:
        with attempt.up() as session:
            ttft = session.warm_up(workload, "start")
            effective_config = session.effective
            resident = memory(session.group.tree()).rss_bytes
            say(f"first prompt {ttft / 1e9:.2f} s, pool {effective_config.kv_pool_tokens} tokens")
            stopping = time.monotonic_ns()
        stop_ns = time.monotonic_ns() - stopping
    except ServerFailed as failure:
        reason = str(failure)
        say(f"failed: {reason}")
    return StartRecord(
        setup=setup,
        run=run,
        status="completed" if reason is None else "failed",
        reason=reason,
        startup_ns=attempt.startup_ns,
        stop_ns=stop_ns,
        rss_bytes=resident,
        probe_ttft_ns=ttft,
        effective=effective_config,
        servers=attempt.records(),
    )


def run_trial(job: Job, trial: Trial, folder: Path) -> TrialRecord:
    """Run one trial and write its raw files into ``folder``, ``trial.json`` last and atomically."""
    say = Say(f"{trial.setup} {trial.suite} r{trial.repeat}", job.write)
    _fresh(folder)
    namespace = f"{job.config.experiment}-{trial.setup}-{trial.suite}-r{trial.repeat}"
    engines = job.config.engines(trial.suite)
    run = _Run(job, trial, Attempt(job, trial.setup, namespace, folder, say, engines=engines))
    reason = None
    try:
        with run.attempt.up() as session:
            run.measure(session)
        run.marks["stopped"] = time.monotonic_ns()
    except ServerFailed as failure:
        reason = str(failure)
        say(f"failed: {reason}")
    except OSError as error:
        if error.errno not in _DISK_FULL:
            raise
        # A tier on disk that filled it is gone by now, and there is room for the record.
        reason = f"the disk is full: {error.strerror}: {error.filename or folder}"
        say(f"failed: {reason}")
    return run.finish(reason)


class _Run:
    """State of a trial in progress: everything `TrialRecord` needs, also when it fails half way."""

    def __init__(self, job: Job, trial: Trial, attempt: Attempt) -> None:
        self.job, self.config = job, job.config
        self.trial, self.attempt, self.folder, self.say = trial, attempt, attempt.folder, attempt.say
        self.started_at = datetime.now(UTC).isoformat(timespec="seconds")
        self.marks: dict[str, int] = {"begin": time.monotonic_ns()}
        self.passes: list[PassRecord] = []
        self.session: Session | None = None
        self.rss_bytes: int | None = None
        self.effective = EffectiveConfig()
        self.further_engines: dict[str, FurtherEngine] = {}

    def measure(self, session: Session) -> None:
        """Warm up, then every workload of the suite with its passes, then what shows whether loaded KV is right."""
        workloads, suite = self.config.workloads, self.trial.suite
        self.session = session
        self.marks["ready"] = time.monotonic_ns()
        session.snapshot("ready")
        names = self.config.suite_map()[suite]
        longest = max((workloads[name] for name in names), key=lambda item: item.longest_prompt())
        ttft = session.warm_up(longest, suite)
        self.say(f"warm: {ttft / 1e9:.2f} s for an unmeasured prompt")
        self.rss_bytes = memory(session.group.tree()).rss_bytes
        # Setups of a block get the same prompts: the namespace names the block, not the setup.
        self.effective = session.effective
        self.further_engines = session.further_engines
        traffic = session.traffic(f"{suite}/r{self.trial.repeat}", self.effective)
        try:
            plans = {name: workloads[name].passes(name, traffic) for name in names}
        except ValueError as error:  # of a pool whose size follows from what the servers said
            raise session.failed(f"no prompts can be made: {error}") from error
        # Where nothing is loaded there is nothing to check.
        checked = self.config.right_kv if session.setup.tier is not None else None
        if checked is not None:
            plans[RIGHT_KV] = right_kv.passes(checked, self.config.right_kv_tokens(), traffic)
        session.check_room(plan for each in plans.values() for plan in each)
        self.marks["warm"] = time.monotonic_ns()
        with sampling(self.folder / "probes.jsonl", self.config.probe_interval_s, session.devices):
            for name in names:
                self._workload(session, name, plans[name])
        self.marks["measured"] = time.monotonic_ns()
        if checked is not None:
            self._workload(session, RIGHT_KV, plans[RIGHT_KV], top_logprobs=checked.top)
            self.marks["checked"] = time.monotonic_ns()
        disk = session.setup.disk_folder(session.context)
        if disk is not None:
            # Read last: asking which of a file's pages are cached needs the files, which go with the servers.
            details = {**self.effective.details, "disk": disk_state(disk)}
            self.effective = self.effective.model_copy(update={"details": details})

    def _workload(self, session: Session, name: str, plans: list[PassPlan], *, top_logprobs: int | None = None) -> None:
        records: list[RequestTrace] = []
        try:
            for plan in plans:
                session.reset_before(plan.name, plan.engine)
                result = self._pass(session, plan, top_logprobs)
                records += result.records
                # What was timed is complete by then: requests that fail are for the gates to judge.
                if name != RIGHT_KV:
                    self._check_served(session, plan, result)
        finally:
            write_records(self.folder / f"{name}.requests.jsonl", records)

    def _pass(self, session: Session, plan: PassPlan, top_logprobs: int | None) -> PassResult:
        session.snapshot(f"{plan.label}:start")
        progress = self.say.requests(plan.label, session.group.check_alive)
        load = self.config.load
        processes = processes_for(plan, load.processes)
        if processes < load.processes:
            self.say(f"{plan.label}: client processes: {processes}, for the pass allows no more")
        result = run_in_processes(
            session.targets[plan.engine],
            plan,
            self.job.limits,
            processes,
            progress=progress,
            top_logprobs=top_logprobs,
            cores=load.cores,
        )
        # A server that died mid-pass is the reason, not the broken connections that it left.
        session.group.check_alive()
        drain = session.drain(plan.engine)
        session.snapshot(f"{plan.label}:end")
        session.group.check_alive()
        self.passes.append(
            PassRecord(
                workload=plan.workload,
                name=plan.name,
                round=plan.round,
                concurrency=plan.concurrency,
                requests=len(plan.requests),
                failed=sum(record.status != "ok" for record in result.records),
                start_ns=result.start_ns,
                end_ns=result.end_ns,
                in_flight=result.in_flight,
                loop_lag_max_ns=result.loop_lag_max_ns,
                read_late_p99_ns=result.lateness.p99_ns,
                read_late_max_ns=result.lateness.max_ns,
                edge_late_max_ns=result.lateness.edge_max_ns,
                client_cpu_ns=result.client_cpu_ns,
                client_process_cpu_ns=result.process_cpu_ns if processes > 1 else None,
                engine=plan.engine,
                pool=None if plan.pool is None else _pool(plan.pool),
                ramp_s=plan.ramp_s,
                unsent=result.unsent,
                durable_ns=drain.durable_ns,
                drained=drain.drained,
            )
        )
        return result

    @staticmethod
    def _check_served(session: Session, plan: PassPlan, result: PassResult) -> None:
        """A server that lives but serves nothing has failed; its log knows why, or the first request does."""
        if all(record.status != "ok" for record in result.records):
            logged = log_cause(session.contexts[plan.engine].log)
            why = logged or f"no request of {plan.label} came through: {result.records[0].error}"
            raise session.failed(why, plan.engine)

    def finish(self, reason: str | None) -> TrialRecord:
        """Write the remaining raw files, then ``trial.json``."""
        session, trial, setup = self.session, self.trial, self.attempt.setup
        if session is not None:
            lines = [snapshot.model_dump_json(by_alias=True) + "\n" for snapshot in session.snapshots]
            (self.folder / "counters.jsonl").write_text("".join(lines), encoding="utf-8")
        record = TrialRecord(
            experiment=self.config.experiment,
            setup=trial.setup,
            kind=setup.kind,
            suite=trial.suite,
            repeat=trial.repeat,
            run=trial.run,
            order=trial.order,
            status="completed" if reason is None else "failed",
            reason=reason,
            started_at=self.started_at,
            start_ns=self.marks["begin"],
            end_ns=time.monotonic_ns(),
            startup_ns=self.attempt.startup_ns,
            host=describe_host(self.attempt.devices),
            stack=self.job.stack.stamp.model_dump(mode="json", by_alias=True),
            harness=describe_harness(ROOT),
            config=effective(self.config, trial.setup, trial.suite),
            expected=self._expected(),
            effective=self.effective,
            further_engines=self.further_engines,
            servers=self.attempt.records(),
            passes=self.passes,
            marks=self.marks,
            rss_bytes=self.rss_bytes,
            files=_inventory(self.folder),
        )
        write_atomically(self.folder / "trial.json", record.model_dump_json(by_alias=True, indent=1))
        return record

    def _expected(self) -> dict[str, Any]:
        session, setup = self.session, self.attempt.setup
        block, stack = self.effective.block_size, self.job.stack.config
        return {
            "title": setup.shown_title(self.trial.setup),
            "tier": setup.tier,
            "prefix_caching": setup.prefix_caching,
            "connector": setup.connector(session.context) if session is not None else None,
            "settings": setup.settings(),
            "granularity": setup.granularity(block) if block is not None else None,
            "capacity_bytes": setup.capacity_bytes(),
            "kv_bytes_per_token": session.context.kv_bytes_per_token if session is not None else None,
            "native_modules": setup.native_modules(),
            "native_patterns": stack.native_patterns(setup.native_modules()),
            "native_unlisted": [key for key in setup.native_modules() if not stack.native.get(key)],
            "ours_in_path": setup.ours_in_path,
        }


def _pool(pool: Pool) -> PoolRecord:
    return PoolRecord(size=pool.size, tokens=pool.tokens, order=pool.order)


def _fresh(folder: Path) -> None:
    """Empty the trial's own folder: without ``trial.json`` it holds the rest of an attempt that broke off."""
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "logs").mkdir(parents=True)


def _inventory(folder: Path) -> dict[str, FileEntry]:
    """Size, hash and line count of every raw file, so that a damaged one is noticed when it is read."""
    entries: dict[str, FileEntry] = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name not in ("trial.json", "verdict.json"):
            data = path.read_bytes()
            lines = data.count(b"\n") if path.suffix == ".jsonl" else None
            entries[path.relative_to(folder).as_posix()] = FileEntry(
                bytes=len(data), sha256=hashlib.sha256(data).hexdigest(), lines=lines
            )
    return entries


def write_atomically(path: Path, text: str) -> None:
    """Write and rename, so that a reader sees the whole file or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("w", encoding="utf-8") as out:
        out.write(text + "\n")
        out.flush()
        os.fsync(out.fileno())
    partial.rename(path)
