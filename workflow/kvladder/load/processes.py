"""A pass that is more than one core can send: several client processes, merged on the one clock they share.

The requests' bytes are made before the processes are forked, so none is made twice. Each process opens the connections
of its share of the slots, and all begin at one moment of CLOCK_MONOTONIC. They take requests from one counter, in the
plan's order: whichever has a free slot sends the next, as a single process would. What they saw is put together request
by request and moment by moment; nothing is averaged.
"""

from __future__ import annotations

import gc
import heapq
import os
import pickle
import signal
import sys
import tempfile
import traceback
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess, parent_process
from socket import SOCK_STREAM, getaddrinfo
from time import monotonic, monotonic_ns, sleep, thread_time_ns
from typing import Any

from kvladder.config.traffic import PassPlan
from kvladder.load.client import Addresses, PassResult, PassRun, Progress, check_plan, different, run_pass
from kvladder.load.decode import RawStream
from kvladder.load.target import Limits, Target
from kvladder.load.wire import Wire, request_bytes

# From the last process being ready to the common start: time for all of them to hear of it.
_START_IN_NS = 20_000_000
_PROGRESS_S = 0.5
# A request's position in the file that all processes read from.
_TICKET_BYTES = array("I").itemsize
# Streams handed over at a time: a pass may have more bytes than should be in memory twice.
_BATCH = 256
# What a stream is made of beside its request, which both sides have.
_SEEN = tuple(field.name for field in fields(RawStream) if field.name != "request")


class ClientProcessError(ChildProcessError):
    """A client process ended before its work: killed from outside, or out of memory."""


def processes_for(plan: PassPlan, asked: int) -> int:
    """How many processes can send a plan: one where requests wait for each other, where the number in flight ramps up
    or where the pass has a deadline, for only one clock sees all of that; else as many as asked, a slot each at least.
    """
    chained = any(request.after is not None for request in plan.requests)
    if chained or plan.pool is not None or plan.ramp_s or plan.deadline_s is not None:
        return 1
    return max(1, min(asked, plan.concurrency, len(plan.requests)))


def check_cores(cores: Sequence[int]) -> None:
    """Raises ValueError for a core that this process may not use."""
    allowed = os.sched_getaffinity(0)
    for core in cores:
        if core not in allowed:
            known = ", ".join(map(str, sorted(allowed)))
            raise ValueError(f"load.cores: {core} isn't among the cores that this process may use: {known}")


def run_in_processes(
    target: Target,
    plan: PassPlan,
    limits: Limits,
    processes: int,
    *,
    progress: Callable[[Progress], None] | None = None,
    top_logprobs: int | None = None,
    cores: Sequence[int] = (),
) -> PassResult:
    """`run_pass` from so many processes, as far as `processes_for` lets the plan have them.

    ``cores`` are the cores that the processes are pinned to, one each in turn, or this thread where it sends the pass
    alone; none: the scheduler places them. ``progress`` is called here, about twice a second and once at the
    end; what it raises ends the pass, as does the exception of a signal handler. Then, and when a process is killed
    (ClientProcessError), the others are killed too; they also end by themselves when this process is gone. Raises
    ValueError for a plan that can't be carried out, and for a core that isn't there.
    """
    check_cores(cores)
    count = processes_for(plan, processes)
    places = _places(cores, count)
    if count == 1:
        with _pinned(places[0]):
            return run_pass(target, plan, limits, progress, top_logprobs)
    check_plan(plan)
    addresses = _addresses(target)
    wires = request_bytes(target, plan.requests, top_logprobs)
    with tempfile.TemporaryFile(buffering=0) as tickets:
        tickets.write(array("I", range(len(plan.requests))).tobytes())
        tickets.seek(0)
        jobs = [
            _Job(target, addresses, replace(plan, concurrency=slots), limits, wires, tickets.fileno(), core)
            for slots, core in zip(_shares(plan.concurrency, count), places, strict=True)
        ]
        with _forked(jobs) as workers:
            return _gathered(plan, workers, progress)


def _shares(concurrency: int, count: int) -> list[int]:
    """Slots of each process; the first ones get what doesn't divide."""
    return [concurrency // count + (place < concurrency % count) for place in range(count)]


def _places(cores: Sequence[int], count: int) -> list[int | None]:
    return [cores[place % len(cores)] if cores else None for place in range(count)]


@contextmanager
def _pinned(core: int | None) -> Iterator[None]:
    """This thread on one core; None: wherever it may be."""
    if core is None:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _addresses(target: Target) -> Addresses:
    """Where the host is; nowhere if its name can't be resolved.

    Looked up before the fork: a lock of the C library that another thread held then is held in the child for ever.
    """
    try:
        return different(getaddrinfo(target.host, target.port, type=SOCK_STREAM))
    except OSError:
        return []


@dataclass(frozen=True, slots=True)
class _Job:
    """What one process is to send: any requests of the plan, ``plan.concurrency`` of them in flight.

    ``tickets`` is the descriptor of a file with the requests' positions. Forked processes share its offset, and the
    kernel gives every reader the next bytes: it is the counter, and a process that is killed can't leave it locked.
    """

    target: Target
    addresses: Addresses
    plan: PassPlan
    limits: Limits
    wires: list[Wire]
    tickets: int
    core: int | None


@dataclass(frozen=True, slots=True)
class _Part:
    """What one process did; ``streams`` of them follow it. ``in_flight`` holds (t_ns, in flight, ended so far)."""

    start_ns: int
    end_ns: int
    in_flight: list[tuple[int, int, int]]
    loop_lag_max_ns: int
    cpu_ns: int
    streams: int


# --- the process that is asked for the pass ---


@dataclass(slots=True)
class _Client:
    """A client process as it is seen from here; ``now`` is None until its connections are open."""

    name: str
    process: BaseProcess
    pipe: Connection
    now: Progress | None = None
    part: _Part | None = None

    def receive(self) -> Any:
        """Its next message. Raises what it raised, or ClientProcessError when it is gone."""
        try:
            message = self.pipe.recv()
        except (EOFError, OSError):
            self.process.join()
            code = self.process.exitcode or 0
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
            raise ClientProcessError(f"{self.name} {how} before its requests had ended") from None
        if isinstance(message, BaseException):
            raise message
        return message

    def take(self) -> None:
        """Note the progress that it reports, or that it has ended."""
        message = self.receive()
        if isinstance(message, _Part):
            self.part = message
        else:
            self.now = message


@contextmanager
def _forked(jobs: Sequence[_Job]) -> Iterator[list[_Client]]:
    """The processes of a pass; whatever happens in the block, none is left behind it."""
    context = get_context("fork")
    clients: list[_Client] = []
    # What is frozen is not looked through by a child's garbage collector, so that its pages stay shared.
    gc.collect()
    gc.freeze()
    try:
        for place, job in enumerate(jobs):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(job, theirs), daemon=True)
            # Noted before it is there: an interrupt may come in between.
            clients.append(_Client(f"client process {place + 1} of {len(jobs)}", process, ours))
            process.start()
            theirs.close()
        yield clients
    finally:
        gc.unfreeze()
        for client in clients:
            if client.process.pid is not None:
                client.process.kill()
                client.process.join()
            client.process.close()
            client.pipe.close()


def _gathered(plan: PassPlan, clients: list[_Client], progress: Callable[[Progress], None] | None) -> PassResult:
    """Start the processes together, wait for all of them, and put together what they saw."""

    def report() -> None:
        if progress is not None:
            progress(_sum(len(plan.requests), clients))

    _wait(clients, lambda client: client.now is not None, report)
    start_ns = monotonic_ns() + _START_IN_NS
    for client in clients:
        client.pipe.send(start_ns)
    _wait(clients, lambda client: client.part is not None, report)
    parts = [client.part for client in clients if client.part is not None]
    streams: dict[int, RawStream] = {}
    for client, part in zip(clients, parts, strict=True):
        whole = len(streams) + part.streams
        while len(streams) < whole:
            for position, seen in client.receive():
                streams[position] = RawStream(plan.requests[position], *seen)
    report()
    return PassResult(
        plan=plan,
        start_ns=min(part.start_ns for part in parts),
        end_ns=max(part.end_ns for part in parts),
        in_flight=merged([part.in_flight for part in parts], len(plan.requests)),
        loop_lag_max_ns=max(part.loop_lag_max_ns for part in parts),
        process_cpu_ns=[part.cpu_ns for part in parts],
        streams=[streams[position] for position in range(len(plan.requests))],
    )


def _wait(clients: list[_Client], over: Callable[[_Client], bool], report: Callable[[], None]) -> None:
    """Take messages until it is ``over`` for every client; report twice a second."""
    reported = monotonic()
    while pending := {client.pipe: client for client in clients if not over(client)}:
        for pipe in wait(list(pending), max(0, reported + _PROGRESS_S - monotonic())):
            pending[pipe].take()  # type: ignore[index]
        if monotonic() - reported >= _PROGRESS_S:
            reported = monotonic()
            report()


def _sum(total: int, clients: Sequence[_Client]) -> Progress:
    known = [client.now for client in clients if client.now is not None]
    return Progress(
        total=total,
        done=sum(now.done for now in known),
        failed=sum(now.failed for now in known),
        in_flight=sum(now.in_flight for now in known),
    )


def merged(series: Sequence[Sequence[tuple[int, int, int]]], total: int) -> list[tuple[int, int, int]]:
    """One series of (t_ns, in flight, eligible incl. those in flight) from each process's (t_ns, in flight, ended).

    All ``total`` requests are eligible from the start, so as many are as haven't ended anywhere.
    """
    flying = ended = 0
    last = [(0, 0)] * len(series)
    rows = []
    changes = ([(now, place, *values) for now, *values in each] for place, each in enumerate(series))
    for now, place, flying_there, ended_there in heapq.merge(*changes):
        flying += flying_there - last[place][0]
        ended += ended_there - last[place][1]
        last[place] = (flying_there, ended_there)
        rows.append((now, flying, total - ended))
    return rows


# --- a client process ---


def _work(job: _Job, pipe: Connection) -> None:
    """Send a share of the pass and hand over what was seen; an exception goes to who asked."""
    try:
        parent = parent_process()
        assert parent is not None  # noqa: S101 (this is a child)
        _settle(job, {pipe.fileno(), parent.sentinel, job.tickets})
        run = _Share(job, pipe, parent.sentinel)
        result = run.run()
        part = _Part(
            start_ns=result.start_ns,
            end_ns=result.end_ns,
            in_flight=result.in_flight,
            loop_lag_max_ns=result.loop_lag_max_ns,
            cpu_ns=sum(result.process_cpu_ns),
            streams=len(run.taken),
        )
        pipe.send(part)
        for start in range(0, len(run.taken), _BATCH):
            batch = run.taken[start : start + _BATCH]
            pipe.send([(at, [getattr(result.streams[at], name) for name in _SEEN]) for at in batch])
    except BaseException as error:
        with suppress(OSError):
            pipe.send(_portable(error))


def _settle(job: _Job, needed: set[int]) -> None:
    """Leave everything of the parent alone that this process has a copy of.

    A signal to the whole group is the parent's to answer. Descriptors are closed but those ``needed``: somebody may
    wait for the end of a pipe that the parent holds, and the other processes must see when it is gone.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    gc.disable()
    for low, high in pairwise([*sorted({0, 1, 2} | needed), os.sysconf("SC_OPEN_MAX")]):
        os.closerange(low + 1, high)
    if job.core is not None:
        os.sched_setaffinity(0, {job.core})


def _portable(error: BaseException) -> BaseException:
    """The exception with its trace-back as a note, or what can be said of one that can't be pickled."""
    text = "".join(traceback.format_exception(error))
    error.add_note(f"in a client process:\n{text}")
    try:
        pickle.loads(pickle.dumps(error))  # noqa: S301 (our own bytes)
    except Exception:
        return RuntimeError(text)
    return error


class _Share(PassRun):
    """The part of a pass that one process sends: it takes the next request that no other has taken.

    It knows nothing of what the others do, so its series has (t_ns, in flight, ended so far).
    """

    def __init__(self, job: _Job, pipe: Connection, parent: int) -> None:
        super().__init__(job.target, job.plan, job.limits, job.wires, pipe.send)
        self.pipe, self.parent = pipe, parent
        self.tickets = job.tickets
        self.addresses = job.addresses
        self.taken: list[int] = []

    async def _resolve(self) -> None:
        """Known already."""

    def _start(self) -> None:
        """Say that the connections are open, and begin when all do."""
        self.pipe.send(self._progress())
        start_ns = self.pipe.recv()
        sleep(max(0, start_ns - monotonic_ns()) / 1e9)
        # Readable as soon as the parent is gone: nobody is left to tell.
        self.loop.add_reader(self.parent, os._exit, 1)
        super()._start()

    def _admit(self) -> None:
        """Give free slots to the next requests; with none left and none in flight the share is done."""
        free = self.slots - len(self.busy) - len(self.waiting)
        now = monotonic_ns()
        while free > 0:
            ticket = os.read(self.tickets, _TICKET_BYTES)
            if not ticket:
                self.unsent = len(self.waiting)  # no connection is opened for what others send
                break
            position = int.from_bytes(ticket, sys.byteorder)
            self.streams[position].eligible_ns = now
            self.taken.append(position)
            self.waiting.append(position)
            free -= 1
        if self.busy or self.waiting:
            self._dispatch()
        else:
            self.end_ns, self.end_cpu_ns = now, thread_time_ns()
            self.loop.stop()

    def _note(self, now: int) -> None:
        self.series.append((now, len(self.busy), self.done))
