"""The small process between a job and one server: whatever happens to the job, the server's whole tree ends.

PR_SET_PDEATHSIG reaches a direct child only, so an engine's worker processes would outlive a killed job. This process
is the subreaper of the server's tree (a descendant whose parent dies becomes its child, whatever session it's in) and
watches the job; when the job dies or asks, it ends every descendant and reaps it. If this process itself is killed, the
server dies by PDEATHSIG and the job, a subreaper too, sweeps the rest.

Protocol. Standard input: one line of JSON (the keys of ``Order``), then ``ready`` and ``stop`` lines; end of file means
that the job is gone. Standard output: one JSON object a line with ``event``:

``started`` (pid, start_ns) · ``error`` (message: could not be started) · ``shm`` (seen: inode by name, of files in
/dev/shm that the tree holds) · ``exit`` (code; negative = signal) · ``done`` (killed, survivors: text a process;
removed: names deleted from /dev/shm)

Standard library only; runs isolated, so that the server's environment never touches it.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypedDict

from kvladder.serving import procfs, shm

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
PR_GET_CHILD_SUBREAPER = 37

ORPHAN_GRACE_S = 5.0
"""Grace in seconds when the job or the server is gone: enough to unlink shared memory."""
STRAY_GRACE_S = 1.0
"""Time between TERM and KILL for processes that left the server's group."""
STARTUP_TICK_S = 0.1
TICK_S = 1.0
_POLL_S = 0.02

_libc = ctypes.CDLL(None, use_errno=True)


class Order(TypedDict):
    """What the job wants: times in seconds, ``parent`` is the job's pid, ``shm_before`` inode by name."""

    argv: list[str]
    env: dict[str, str]
    cwd: str
    log: str
    parent: int
    grace_s: float
    kill_s: float
    tag: str
    shm_before: dict[str, int]


def prctl(option: int, value: int) -> None:
    """Set one process attribute; raises OSError."""
    if _libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def is_subreaper() -> bool:
    """Say whether this process adopts the orphans among its descendants."""
    value = ctypes.c_int(0)
    _libc.prctl(PR_GET_CHILD_SUBREAPER, ctypes.byref(value), 0, 0, 0)
    return bool(value.value)


def _report(event: str, **values: Any) -> None:
    # The job may be dead; the work goes on without a listener.
    with contextlib.suppress(OSError):
        os.write(1, json.dumps({"event": event, **values}).encode() + b"\n")


class _Supervisor:
    def __init__(self, order: Order, wakeup: int, early: bytes) -> None:
        self.order = order
        self.wakeup = wakeup
        self.server = 0
        self.exit_code: int | None = None
        self.seen: dict[str, int] = {}
        self.examined: dict[str, int] = {}
        self.buffer = early
        self.poll = select.poll()
        self.poll.register(wakeup, select.POLLIN)
        self.poll.register(0, select.POLLIN)

    def start(self) -> None:
        me = os.getpid()

        def in_child() -> None:
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != me:  # died between fork and prctl
                os._exit(1)

        with Path(self.order["log"]).open("ab") as log:
            start_ns = time.monotonic_ns()
            child = subprocess.Popen(
                self.order["argv"],
                env=self.order["env"],
                cwd=self.order["cwd"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=in_child,  # noqa: PLW1509 - this process has one thread
            )
        self.server = child.pid
        child.returncode = 0  # reaped here, with all the others
        _report("started", pid=child.pid, start_ns=start_ns)

    def wait(self, seconds: float) -> set[str]:
        """Sleep until a signal, a line from the job or the time; return the words, ``gone`` for a dead job."""
        words = self.words()  # a stop may have come along with the order
        for descriptor, _ in [] if words else self.poll.poll(seconds * 1000):
            if descriptor == self.wakeup:
                if {signal.SIGTERM, signal.SIGINT, signal.SIGHUP} & set(os.read(self.wakeup, 4096)):
                    words.add("stop")
                continue
            chunk = os.read(0, 4096)
            if not chunk:
                self.poll.unregister(0)
                words.add("gone")
            self.buffer += chunk
            words |= self.words()
        if os.getppid() != self.order["parent"]:
            words.add("gone")
        self.reap()
        return words

    def words(self) -> set[str]:
        """Take the complete lines out of what was read."""
        *lines, self.buffer = self.buffer.split(b"\n")
        return {line.decode() for line in lines}

    def reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self.server:
                self.exit_code = os.waitstatus_to_exitcode(status)
                _report("exit", code=self.exit_code)

    def look_at_shm(self) -> None:
        """Note which new files in /dev/shm the tree holds; maps are read only when a name is new."""
        new = shm.new_since(self.order["shm_before"])
        unknown = {name: inode for name, inode in new.items() if self.examined.get(name) != inode}
        if not unknown:
            return
        used = shm.used_by(process.pid for process in procfs.descendants(os.getpid()))
        found = {name: inode for name, inode in unknown.items() if name in used}
        self.examined |= unknown
        if found:
            self.seen |= found
            _report("shm", seen=found)

    def watch(self) -> float:
        """Return when the server has to go or is gone; the answer is the grace in seconds."""
        tick = STARTUP_TICK_S
        while self.exit_code is None:
            words = self.wait(tick)
            if "stop" in words:
                return self.order["grace_s"]
            if "gone" in words:
                return min(ORPHAN_GRACE_S, self.order["grace_s"])
            if "ready" in words:
                tick = TICK_S
            self.look_at_shm()
        # Dead by itself. What it left gets the time to log its own trouble and to unlink its shared memory.
        return min(ORPHAN_GRACE_S, self.order["grace_s"])

    def tree(self) -> list[procfs.Process]:
        return [process for process in procfs.descendants(os.getpid()) if process.state != "Z"]

    def group_lives(self) -> bool:
        return any(process.pgid == self.server for process in self.tree())

    def tree_lives(self) -> bool:
        return bool(self.tree())

    def end(self, grace_s: float) -> None:
        """End every descendant: the server's group politely, strays after it, then by force; report what it took."""
        self.look_at_shm()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.server, signal.SIGTERM)
        self.wait_while(self.group_lives, grace_s)
        for process in self.tree():
            if process.pgid != self.server:
                _kill(process.pid, signal.SIGTERM)
        if not self.group_lives():
            self.wait_while(self.tree_lives, STRAY_GRACE_S)
        killed = [_describe(process) for process in self.tree()]
        self.wait_while(self.kill_tree, self.order["kill_s"])
        survivors = [_describe(process) for process in self.tree()]
        removed = shm.sweep(self.order["shm_before"], self.seen, self.order["tag"]).removed
        _report("done", killed=killed, survivors=survivors, removed=removed)

    def kill_tree(self) -> bool:
        # Again and again: what forks while it is being killed shows up in the next round.
        tree = procfs.descendants(os.getpid())
        for process in tree:
            _kill(process.pid, signal.SIGKILL)
        return bool(tree)

    def wait_while(self, condition: Callable[[], bool], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while condition() and time.monotonic() < deadline:
            time.sleep(_POLL_S)
            self.reap()


def _describe(process: procfs.Process) -> str:
    return f"{process.name} (pid {process.pid})"


def _kill(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def main() -> int:
    """Run one order; the answer is the process's exit status (always 0 once the order was read)."""
    text = b""
    while b"\n" not in text:
        chunk = os.read(0, 65536)
        if not chunk:  # the job was interrupted before it wrote the order
            return 1
        text += chunk
    line, _, early = text.partition(b"\n")
    order: Order = json.loads(line)

    wakeup_read, wakeup_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wakeup_write, warn_on_full_buffer=False)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGCHLD):
        # A handler, not SIG_IGN: exec resets handlers in the server and would keep an ignored signal ignored.
        signal.signal(number, lambda *_: None)
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    # Sent when the thread that started us ends, so it's a wake-up only; the parent's pid decides.
    prctl(PR_SET_PDEATHSIG, signal.SIGUSR1)
    if os.getppid() != order["parent"]:
        return 1

    supervisor = _Supervisor(order, wakeup_read, early)
    try:
        supervisor.start()
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        _report("error", message=f"can't start {order['argv'][0]}: {error}")
        return 0
    supervisor.end(supervisor.watch())
    return 0


if __name__ == "__main__":
    sys.exit(main())
