"""Start a trial's servers in order, watch them, and end them with everything they started.

    with servers(specs, tag="demo-native-r0", caches=Path("cache")) as group:
        ...
        group.check_alive()

Between the job and each server stands a small supervisor process (see ``supervisor``), so that no way of dying leaves a
server behind. Leaving the ``with`` block stops all of them in reverse order.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, TracebackType
from typing import IO, Any, Self, overload

from kvladder.config.records import ServerRecord
from kvladder.serving import procfs, shm, supervisor
from kvladder.serving.environment import child_env
from kvladder.serving.errors import Interrupted, ServerFailed
from kvladder.serving.readiness import Readiness, StrangerOnPort, answer, serves
from kvladder.serving.rootcause import log_cause

__all__ = ["Interrupted", "ManagedProcess", "ProcessSpec", "Readiness", "ServerFailed", "ServerGroup", "servers"]

JOB_VARIABLE = "KVLADDER_JOB"
"""Marks every process of a group: ``<pid namespace>:<pid>:<start>:<number of the group>`` of the job."""
TAG_VARIABLE = "KVLADDER_TAG"

_POLL_S = 0.1
_PROGRESS_S = 10.0
_SUPERVISOR_SLACK_S = 5.0
_MASK = "***"
_SECRET_NAME = re.compile(r"(TOKEN|API_KEY|SECRET|PASSWORD)$", re.IGNORECASE)
_MIN_SECRET = 6
"""A shorter value is no secret but would blank half the log."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_BOOT = "import sys; sys.path.insert(0, sys.argv[1]); from kvladder.serving.supervisor import main; sys.exit(main())"
_PACKAGE_ROOT = Path(__file__).parents[2]
_group_numbers = itertools.count()


@dataclass(frozen=True)
class ProcessSpec:
    """One process to start.

    ``env`` is set beyond the inherited environment; ``log`` gets standard output and error (appended; its folder is
    made); ``metrics_url`` is where its /metrics page will be, None = it has none; ``secrets`` are names out of ``env``
    or values inside ``argv`` that no record, message or kept log may show. Variables named like a token, key or
    password are taken for secrets anyway. ``beside``: it needn't wait until the process before it is ready.
    """

    name: str
    argv: Sequence[str]
    env: Mapping[str, str]
    cwd: Path
    log: Path
    ready: Readiness
    metrics_url: str | None = None
    secrets: frozenset[str] = field(default=frozenset(), repr=False)
    beside: bool = False

    def secret_values(self) -> list[str]:
        """Return the texts to be masked, the longest first."""
        names = {name for name in self.env if name in self.secrets or _SECRET_NAME.search(name)}
        values = {self.env[name] for name in names} | {text for text in self.secrets if text not in self.env}
        return sorted((value for value in values if len(value) >= _MIN_SECRET), key=len, reverse=True)

    def mask(self, text: str) -> str:
        """Return ``text`` with every secret replaced by ``***``."""
        for value in self.secret_values():
            text = text.replace(value, _MASK)
        return text


class ManagedProcess:
    """One started process; made by ``servers``. All times are CLOCK_MONOTONIC nanoseconds."""

    def __init__(self, spec: ProcessSpec, env: Mapping[str, str]) -> None:
        self.spec = spec
        self.start_ns = 0
        self.ready_ns: int | None = None
        self.exit_code: int | None = None
        """None while it runs or was never started; negative = killed by that signal."""
        self.pid = 0
        """0 until it was started."""
        self.killed: list[str] = []
        """Processes of its tree that had to be killed at the stop, as ``name (pid n)``."""
        self.survivors: list[str] = []
        """Processes that not even SIGKILL ended in time (stuck in the kernel)."""
        self.removed_shm: list[str] = []
        """Names of its own left-overs in /dev/shm that were deleted."""
        self.seen_shm: dict[str, int] = {}
        """New files in /dev/shm that its tree was seen to hold: inode by name."""
        self._env = dict(env)
        self._log_start = 0
        self._error: str | None = None
        self._supervisor: subprocess.Popen[bytes] | None = None
        self._buffer = b""
        self._closed = False
        self._stopping = False
        self._lock = threading.Lock()

    @property
    def name(self) -> str:
        """The spec's name, unique in the group."""
        return self.spec.name

    @property
    def alive(self) -> bool:
        """Whether the server process itself runs."""
        self._read()
        return self.pid > 0 and self.exit_code is None and not self._closed

    def tree(self) -> list[int]:
        """Return the pids of the server and all its descendants, the server first; empty when it's gone."""
        if self._supervisor is None or self._supervisor.returncode is not None:
            return []
        return [process.pid for process in procfs.descendants(self._supervisor.pid) if process.state != "Z"]

    def failure(self) -> ServerFailed | None:
        """Return why the process died although nobody stopped it; None while it runs. Safe from any thread."""
        self._read()
        if self._stopping or self._supervisor is None:
            return None
        if self._error is not None:
            reason = self._error
        elif self.exit_code is not None:
            reason = self._reason_of_exit(self.exit_code)
        elif self._closed:
            reason = "its supervisor process was killed"
        else:
            return None
        return ServerFailed(self.name, self.spec.mask(reason), self.spec.log)

    def record(self) -> ServerRecord:
        """Return the record of this process, with secrets masked."""
        self._read()
        added = {name: value for name, value in self._env.items() if os.environ.get(name) != value}
        hidden = {name for name in added if name in self.spec.secrets or _SECRET_NAME.search(name)}
        return ServerRecord(
            name=self.name,
            argv=[self.spec.mask(argument) for argument in self.spec.argv],
            env={name: _MASK if name in hidden else self.spec.mask(value) for name, value in sorted(added.items())},
            pid=self.pid,
            start_ns=self.start_ns,
            ready_ns=self.ready_ns,
            log=str(self.spec.log),
            exit_code=self.exit_code,
        )

    def log_text(self) -> str:
        """Return what the process wrote to its log since its start."""
        with self.spec.log.open("rb") as stream:
            stream.seek(self._log_start)
            return stream.read().decode(errors="replace")

    def _start(
        self, tag: str, shm_before: Mapping[str, int], hold: Sequence[int], grace_s: float, kill_s: float
    ) -> None:
        self.spec.log.parent.mkdir(parents=True, exist_ok=True)
        with self.spec.log.open("ab") as log:
            self._log_start = log.tell()
            self.start_ns = time.monotonic_ns()
            # Its own process, not preexec_fn: the job may have threads. Held files stay locked until it's gone.
            self._supervisor = subprocess.Popen(
                [sys.executable, "-I", "-X", "utf8", "-c", _BOOT, str(_PACKAGE_ROOT)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
                pass_fds=hold,
                bufsize=0,
            )
        os.set_blocking(self._pipe().fileno(), False)
        order = supervisor.Order(
            argv=list(self.spec.argv),
            env=self._env,
            cwd=str(self.spec.cwd),
            log=str(self.spec.log.absolute()),
            parent=os.getpid(),
            grace_s=grace_s,
            kill_s=kill_s,
            tag=tag,
            shm_before=dict(shm_before),
        )
        self._tell(json.dumps(order))

    def _pipe(self) -> IO[bytes]:
        assert self._supervisor is not None and self._supervisor.stdout is not None  # noqa: S101
        return self._supervisor.stdout

    def _tell(self, line: str) -> None:
        assert self._supervisor is not None and self._supervisor.stdin is not None  # noqa: S101
        data = memoryview(line.encode() + b"\n")
        with contextlib.suppress(BrokenPipeError):  # dead: its end of the other pipe says so
            while data:
                data = data[self._supervisor.stdin.write(data) :]

    def _read(self) -> None:
        """Take in what the supervisor has reported."""
        with self._lock:
            if self._supervisor is None or self._closed:
                return
            while True:
                try:
                    chunk = os.read(self._pipe().fileno(), 65536)
                except BlockingIOError:
                    return
                if not chunk:
                    self._closed = True
                    return
                *lines, self._buffer = (self._buffer + chunk).split(b"\n")
                for line in lines:
                    self._take(json.loads(line))

    def _take(self, event: dict[str, Any]) -> None:
        match event["event"]:
            case "started":
                self.pid, self.start_ns = event["pid"], event["start_ns"]
            case "error":
                self._error = event["message"]
            case "exit":
                self.exit_code = event["code"]
            case "shm":
                self.seen_shm |= event["seen"]
            case "done":
                self.killed = event["killed"]
                self.survivors = event["survivors"]
                self.removed_shm += event["removed"]

    def _reason_of_exit(self, code: int) -> str:
        cause = log_cause(self.spec.log, self._log_start)
        if code >= 0:
            return cause or f"exited with code {code} and wrote no error line"
        how = f"killed by {signal.Signals(-code).name}"
        # A kill from outside has no line of its own; an older error may be chance, so it's only added.
        return f"{how}; last error in its log: {cause}" if cause else how

    def _wait_ready(self, others: Sequence[ManagedProcess], progress: Callable[[str], None]) -> None:
        """Return when it's ready; raises ServerFailed for this one or another one of the group that was started."""
        ready = self.spec.ready
        deadline = time.monotonic() + ready.deadline_s
        next_word = time.monotonic() + _PROGRESS_S
        poll = select.poll()
        poll.register(self._pipe(), select.POLLIN)
        while True:
            for process in (*others, self):
                if failure := process.failure():
                    raise failure
            try:
                state = self._state()
            except StrangerOnPort as error:
                raise ServerFailed(self.name, str(error), self.spec.log) from None
            if state is None:
                self.ready_ns = time.monotonic_ns()
                self._tell("ready")
                return
            now = time.monotonic()
            if now >= deadline:
                cause = log_cause(self.spec.log, self._log_start)
                reason = f"not ready after {ready.deadline_s:g} s: {state}"
                reason += f"; last error in its log: {cause}" if cause else ""
                raise ServerFailed(self.name, self.spec.mask(reason), self.spec.log)
            if now >= next_word:
                next_word += _PROGRESS_S
                progress(f"{self.name}: not ready yet, {deadline - now:.0f} s left: {state}")
            # Wakes at once when the supervisor reports something.
            poll.poll(_POLL_S * 1000)

    def _state(self) -> str | None:
        """Return what is still missing, None when ready."""
        tree = self.tree()
        if not serves(self.spec.ready, tree):
            return f"nothing listens on port {self.spec.ready.port}"
        problem = answer(self.spec.ready)
        # Once more after the answer: it has to come from the listener that was looked at.
        if problem is None and not serves(self.spec.ready, tree):
            return "its listener went away"
        return problem

    def _stop(self, patience_s: float) -> None:
        if self._supervisor is None:
            return
        self._read()
        self._stopping = self.exit_code is None
        self._tell("stop")
        try:
            self._supervisor.wait(patience_s)
        except subprocess.TimeoutExpired:
            self._supervisor.kill()
            self._supervisor.wait()
        self._read()
        for stream in (self._supervisor.stdin, self._supervisor.stdout):
            if stream is not None:
                stream.close()
        self._closed = True

    def _scrub_log(self) -> None:
        """Take secrets out of the log: engines print their own arguments."""
        secrets = [value.encode() for value in self.spec.secret_values()]
        with contextlib.suppress(OSError):
            data = self.spec.log.read_bytes() if secrets else b""
            if any(value in data for value in secrets):
                for value in secrets:
                    data = data.replace(value, _MASK.encode())
                self.spec.log.write_bytes(data)


class ServerGroup(Sequence[ManagedProcess]):
    """The processes of one trial, in start order; a context manager that starts and stops them. See ``servers``."""

    def __init__(
        self,
        specs: Sequence[ProcessSpec],
        tag: str,
        *,
        caches: Path,
        hold: Sequence[int] = (),
        grace_s: float = 30.0,
        kill_s: float = 60.0,
        progress: Callable[[str], None] = lambda _: None,
    ) -> None:
        names = [spec.name for spec in specs]
        if len(set(names)) != len(names):
            raise ValueError(f"process names repeat: {names}")
        me = procfs.read_process(os.getpid())
        start = me.start if me else 0
        self.tag = tag
        self.mark = f"{pid_namespace()}:{os.getpid()}:{start}:{next(_group_numbers)}"
        """Value of KVLADDER_JOB in every process of the group."""
        marks = {JOB_VARIABLE: self.mark, TAG_VARIABLE: tag}
        self._all = [ManagedProcess(spec, child_env(caches, {**spec.env, **marks})) for spec in specs]
        self._hold = tuple(hold)
        self._grace_s = grace_s
        self._kill_s = kill_s
        self._progress = progress
        self._shm_before: dict[str, int] = {}
        self._was_subreaper = supervisor.is_subreaper()
        self._handlers: dict[signal.Signals, Any] = {}
        self._interrupt: int | None = None
        self._raised = False
        self._watchers: list[_Watcher] = []
        self.notes: list[str] = []
        """What the stop had to clean up or could not; one line each, filled on exit."""

    @overload
    def __getitem__(self, index: int) -> ManagedProcess: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[ManagedProcess]: ...
    def __getitem__(self, index: int | slice) -> ManagedProcess | Sequence[ManagedProcess]:
        return self._all[index]

    def __len__(self) -> int:
        return len(self._all)

    def named(self, name: str) -> ManagedProcess:
        """Return the process of that name; raises KeyError."""
        for process in self._all:
            if process.name == name:
                return process
        raise KeyError(name)

    def records(self) -> list[ServerRecord]:
        """Return the records of all processes that were started."""
        return [process.record() for process in self._all if process.start_ns]

    def tree(self) -> list[int]:
        """Return the pids of all servers and their descendants."""
        return [pid for process in self._all for pid in process.tree()]

    def failure(self) -> ServerFailed | None:
        """Return why the first dead process died, None while all run. Safe from any thread."""
        return next((failure for process in self._all if (failure := process.failure())), None)

    def check_alive(self) -> None:
        """Raise ServerFailed when a server or a side process has died. Safe from any thread."""
        if failure := self.failure():
            raise failure

    @contextlib.contextmanager
    def watch(self, on_failure: Callable[[ServerFailed], None]) -> Iterator[None]:
        """Call ``on_failure`` once, from another thread, when a process dies inside the ``with`` block.

        The thread sleeps until a supervisor reports: it costs nothing while all is well.
        """
        watcher = _Watcher(self, on_failure)
        self._watchers.append(watcher)
        watcher.start()
        try:
            yield
        finally:
            watcher.stop()

    def __enter__(self) -> Self:
        try:
            self._install_handlers()
            # Second line of defence: should a supervisor be killed, its orphans come to us.
            supervisor.prctl(supervisor.PR_SET_CHILD_SUBREAPER, 1)
            self._shm_before = shm.listing()
            started: list[ManagedProcess] = []
            for wave in _waves(self._all):
                for process in wave:
                    self._progress(f"{process.name}: starting")
                    process._start(self.tag, self._shm_before, self._hold, self._grace_s, self._kill_s)
                    started.append(process)
                for process in wave:
                    process._wait_ready([other for other in started if other is not process], self._progress)
                    seconds = ((process.ready_ns or 0) - process.start_ns) / 1e9
                    self._progress(f"{process.name}: ready after {seconds:.1f} s")
        except BaseException:
            self._shut_down()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._shut_down()
        if self._interrupt is not None and not self._raised:
            # Came while stopping; the job was asked to end all the same.
            raise Interrupted(self._interrupt) from error

    def _shut_down(self) -> None:
        """Stop all in reverse order. Signals only get noted meanwhile (see ``_on_signal``)."""
        try:
            for watcher in self._watchers:
                watcher.stop()
            patience_s = self._grace_s + self._kill_s + supervisor.STRAY_GRACE_S + _SUPERVISOR_SLACK_S
            for process in reversed(self._all):
                if process.alive:
                    self._progress(f"{process.name}: stopping")
                process._stop(patience_s)
            self._sweep()
            for process in self._all:
                process._scrub_log()
        finally:
            with contextlib.suppress(OSError):
                supervisor.prctl(supervisor.PR_SET_CHILD_SUBREAPER, int(self._was_subreaper))
            self._restore_handlers()

    def _sweep(self) -> None:
        """End what supervisors could not (one was killed itself), delete our shared memory, and note it all."""
        swept = end_marked(self.mark, self._kill_s)
        seen = {name: inode for process in self._all for name, inode in process.seen_shm.items()}
        cleaned = shm.sweep(self._shm_before, seen, self.tag)
        for process in self._all:
            self.notes += [f"{process.name}: had to be killed: {text}" for text in process.killed]
            self.notes += [f"{process.name}: still there after SIGKILL: {text}" for text in process.survivors]
        self.notes += [f"orphan killed: {text}" for text in swept]
        removed = sorted({name for process in self._all for name in process.removed_shm} | set(cleaned.removed))
        self.notes += [f"left-over deleted: {shm.path_of(name)}" for name in removed]
        self.notes += [f"left-over still in use: {shm.path_of(name)}" for name in cleaned.in_use]
        self.notes += [f"new in /dev/shm and not ours as far as seen, kept: {name}" for name in cleaned.foreign]

    def _install_handlers(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return  # Python runs handlers in the main thread only
        for number in _SIGNALS:
            current = signal.getsignal(number)
            # None: set by foreign code and not restorable. SIG_IGN: nohup, or a shell's background job.
            if current is not None and current != signal.SIG_IGN:
                self._handlers[number] = current
                signal.signal(number, self._on_signal)

    def _restore_handlers(self) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers = {}

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """Raise on the first signal, unless the stop is under way: nothing may cut that short.

        Whether it is under way is read from the stack, not from a flag: a signal may arrive in the first instruction of
        ``__exit__``, before any flag could be set.
        """
        first = self._interrupt is None
        self._interrupt = number if first else self._interrupt
        stopping = {ServerGroup.__exit__.__code__, ServerGroup._shut_down.__code__}
        while frame is not None:
            if frame.f_code in stopping:
                return
            frame = frame.f_back
        if first:
            self._raised = True
            raise Interrupted(number)


def _waves(processes: Sequence[ManagedProcess]) -> list[list[ManagedProcess]]:
    """Processes that are started together, in order."""
    waves: list[list[ManagedProcess]] = []
    for process in processes:
        if process.spec.beside and waves:
            waves[-1].append(process)
        else:
            waves.append([process])
    return waves


class _Watcher(threading.Thread):
    def __init__(self, group: ServerGroup, on_failure: Callable[[ServerFailed], None]) -> None:
        super().__init__(name="kvladder-watch", daemon=True)
        self._group = group
        self._on_failure = on_failure
        self._wake_read, self._wake_write = os.pipe()
        self._stopped = False

    def run(self) -> None:
        poll = select.poll()
        poll.register(self._wake_read, select.POLLIN)
        for process in self._group:
            poll.register(process._pipe(), select.POLLIN)
        while True:
            if any(descriptor == self._wake_read for descriptor, _ in poll.poll()):
                return
            if failure := self._group.failure():
                self._on_failure(failure)
                return

    def stop(self) -> None:
        """End the thread and wait for it; harmless when called twice or from ``on_failure``."""
        if self._stopped:
            return
        self._stopped = True
        os.write(self._wake_write, b"x")
        if threading.current_thread() is not self and self.ident is not None:
            self.join()
        os.close(self._wake_read)
        os.close(self._wake_write)


def servers(
    specs: Sequence[ProcessSpec],
    tag: str,
    *,
    caches: Path,
    hold: Sequence[int] = (),
    grace_s: float = 30.0,
    kill_s: float = 60.0,
    progress: Callable[[str], None] = lambda _: None,
) -> ServerGroup:
    """Return a context manager that starts ``specs`` in order, each ready before the next that isn't ``beside`` it, and
    stops all on exit.

    ``tag`` is unique to the trial: it marks processes and files in /dev/shm as ours. ``caches``: see ``child_env``.
    ``hold`` are file descriptors of locks (leases, ports) that stay taken until every server is gone, even when the job
    is killed. A stop is SIGTERM to the server's process group, ``grace_s`` to leave, then SIGKILL to the whole tree and
    at most ``kill_s`` until it's reaped (giving back pinned memory takes seconds). ``progress`` gets one line an event.

    Entering raises ServerFailed (with the log's own reason) when one dies, does not get ready or finds a stranger on
    its port. In the main thread SIGINT, SIGTERM and SIGHUP raise Interrupted, once; while stopping they wait.
    """
    return ServerGroup(specs, tag, caches=caches, hold=hold, grace_s=grace_s, kill_s=kill_s, progress=progress)


def pid_namespace() -> int:
    """Return the inode of this process's pid namespace: pids mean something only inside it."""
    return (procfs.PROC / "self" / "ns" / "pid").stat().st_ino


def end_marked(mark: str, patience_s: float) -> list[str]:
    """Kill every process that carries this KVLADDER_JOB value and reap those that are our children.

    Returns them as ``name (pid n)``. Gives up silently on a process that outlives SIGKILL by ``patience_s``.
    """
    swept: dict[int, str] = {}
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        found = [p for p in procfs.processes() if procfs.environ(p.pid).get(JOB_VARIABLE) == mark]
        for process in found:
            swept[process.pid] = f"{process.name} (pid {process.pid})"
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process.pid, signal.SIGKILL)
        waiting = [pid for pid in swept if (process_now := procfs.read_process(pid)) and _reaped(process_now)]
        if not found and not waiting:
            break
        time.sleep(0.02)
    return list(swept.values())


def _reaped(process: procfs.Process) -> bool:
    """Reap a child of ours if it's dead; say whether it is a child that still has to be waited for."""
    if process.ppid != os.getpid():
        return False
    with contextlib.suppress(ChildProcessError):
        return os.waitpid(process.pid, os.WNOHANG)[0] == 0
    return False
