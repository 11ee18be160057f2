"""The clock of a pass: who is sent when, over which connection, until which deadline."""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from socket import IPPROTO_TCP, SO_ERROR, SOCK_NONBLOCK, SOCK_STREAM, SOL_SOCKET, TCP_NODELAY, socket
from time import monotonic_ns, thread_time_ns
from types import FrameType
from typing import Any

import uvloop

from kvladder.config.traffic import PassPlan, Pool, Request
from kvladder.load.clock import monotonic_less_real
from kvladder.load.connection import Connection
from kvladder.load.decode import RawStream, decode_pass
from kvladder.load.lateness import Lateness, lateness
from kvladder.load.order import Order
from kvladder.load.records import RequestTrace
from kvladder.load.target import Limits, Target
from kvladder.load.wire import Wire, request_bytes

_READ_BUFFER = 1 << 20
# Deadlines are this exact at best. Each tick wakes the process: at one request in flight that is a fifth of its CPU.
_TICK_S = 0.05
_PROGRESS_NS = 500_000_000
# Bytes handed to sockets before the loop looks for answers again; each request counts _SEND_COST beyond its bytes. A
# wave of long prompts would otherwise hold back the first chunks that arrive meanwhile.
_TURN_BYTES = 128 << 10
_SEND_COST = 8 << 10
# Connections being opened at a time: a listen queue of 128 that overflows costs a second.
_CONNECTING = 64
# Opened beyond the concurrency, for a stream that breaks its connection, and for servers that close after each answer.
_SPARE = 1
_SPARE_CLOSING = 64
# Servers close idle connections after a few seconds (uvicorn: 5 s): none is used again after this long.
_REUSE_NS = 1_000_000_000
# After [DONE] the end of the HTTP message is due at once; a server that keeps it back doesn't keep the slot.
_DONE_GRACE_NS = 100_000_000
_ATTEMPTS = 3
# Turns of the loop in which cancelled tasks end and what was being closed is gone.
_CLOSING_TURNS = 5
# What a stream may send: room for a prompt that comes back (up to 8 bytes an id) and for chatty chunks.
_BYTES = 1 << 20
_BYTES_PER_PROMPT_TOKEN = 16
_BYTES_PER_OUTPUT_TOKEN = 4 << 10

Addresses = list[tuple[int, Any]]
"""Families and addresses of a host, to be tried in order."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a pass is. ``failed`` counts what fails on the clock; streams too short show only in the records."""

    total: int
    done: int
    failed: int
    in_flight: int


@dataclass
class PassResult:
    """What one pass gave. Times are nanoseconds of CLOCK_MONOTONIC.

    ``in_flight`` holds (t_ns, requests in flight, eligible requests incl. those in flight), on change; while the pass
    ramps up, no more are eligible than may be in flight. ``unsent`` counts requests that the pass's deadline kept back.
    ``loop_lag_max_ns`` is the longest delay of a 50 ms timer beyond its period (the timer itself is good to 1 ms),
    ``process_cpu_ns`` the CPU time of each client process's thread between ``start_ns`` and ``end_ns``.
    """

    plan: PassPlan
    start_ns: int
    end_ns: int
    in_flight: list[tuple[int, int, int]]
    loop_lag_max_ns: int
    process_cpu_ns: list[int]
    streams: list[RawStream]
    unsent: int = 0

    @cached_property
    def records(self) -> list[RequestTrace]:
        """One record a request, in plan order; decoded at the first use, so that a caller can act on the end first."""
        return decode_pass(self.plan, self.streams)

    @cached_property
    def lateness(self) -> Lateness:
        """How late the client was for what had arrived."""
        return lateness(self.streams, self.records)

    @property
    def client_cpu_ns(self) -> int:
        """CPU time that the pass took, all processes together."""
        return sum(self.process_cpu_ns)

    @property
    def failed(self) -> int:
        """Number of failed requests."""
        return sum(record.status == "failed" for record in self.records)


def run_pass(
    target: Target,
    plan: PassPlan,
    limits: Limits,
    progress: Callable[[Progress], None] | None = None,
    top_logprobs: int | None = None,
) -> PassResult:
    """Send a pass and return when every request has ended.

    Blocks, with an event loop of its own (no other may run in this thread). ``progress`` is called on the loop about
    twice a second and once at the end: it must be quick, and what it raises ends the pass. ``top_logprobs`` asks for
    that many log probabilities a position.

    Whatever the server does is a record, never an exception; KeyboardInterrupt, SystemExit and other exceptions of
    signal handlers pass through, with every connection closed. Raises ValueError for a plan that can't be carried out.
    """
    check_plan(plan)
    run = PassRun(target, plan, limits, request_bytes(target, plan.requests, top_logprobs), progress)
    return run.run()


def check_plan(plan: PassPlan) -> None:
    """Raises ValueError for a plan that can't be carried out."""
    if plan.concurrency < 1:
        raise ValueError(f"{plan.label}: concurrency must be at least 1, not {plan.concurrency}")
    after = {request.index: request.after for request in plan.requests}
    if len(after) < len(plan.requests):
        raise ValueError(f"{plan.label}: two requests have the same index")
    if plan.pool is not None:
        _check_pool(plan.label, plan.pool, list(after.values()))
    settled: set[int] = set()
    for index in after:
        chain: list[int] = []
        step: int | None = index
        while step is not None and step not in settled:
            if step not in after:
                raise ValueError(
                    f"{plan.label}: request {chain[-1]} waits for request {step}, which is not in the pass"
                )
            if len(chain) > len(after):
                raise ValueError(f"{plan.label}: requests wait for each other in a circle, request {step} among them")
            chain.append(step)
            step = after[step]
        settled.update(chain)


def _check_pool(label: str, pool: Pool, after: list[int | None]) -> None:
    if pool.size < 1:
        raise ValueError(f"{label}: a pool must have room for one conversation at least, not {pool.size}")
    previous = [index for index in after if index is not None]
    if len(set(previous)) < len(previous):
        raise ValueError(f"{label}: two requests wait for the same one: a conversation has one next turn")
    needed = len(after) if pool.order in ("random", "zipf") else 0
    if len(pool.lots) != needed:
        raise ValueError(f"{label}: order {pool.order}: {len(pool.lots)} lots for {len(after)} requests, not {needed}")
    if pool.weights and (len(pool.weights) != pool.size or min(pool.weights) <= 0):
        raise ValueError(f"{label}: each of the {pool.size} places needs a weight above 0")


def different(found: Iterable[tuple[Any, ...]]) -> Addresses:
    """What `socket.getaddrinfo` found, each address once."""
    return list(dict.fromkeys((family, address) for family, _, _, _, address in found))


def _byte_limit(request: Request) -> int:
    """Bytes that an answer may have; whatever sends more doesn't stop by itself."""
    return _BYTES + _BYTES_PER_PROMPT_TOKEN * len(request.prompt) + _BYTES_PER_OUTPUT_TOKEN * request.output_tokens


@contextmanager
def _undisturbed() -> Iterator[None]:
    """No garbage collection, and other threads (probes) give the interpreter back within 0.5 ms."""
    collecting = gc.isenabled()
    interval = sys.getswitchinterval()
    gc.collect()
    gc.freeze()
    gc.disable()
    sys.setswitchinterval(0.0005)
    try:
        yield
    finally:
        sys.setswitchinterval(interval)
        gc.unfreeze()
        if collecting:
            gc.enable()


class PassRun:
    """State of a running pass. A request is eligible, then has a slot (waiting), then a connection (busy)."""

    def __init__(
        self,
        target: Target,
        plan: PassPlan,
        limits: Limits,
        wires: list[Wire],
        progress: Callable[[Progress], None] | None,
    ) -> None:
        self.target = target
        self.plan = plan
        self.limits = limits
        self.wires = wires
        self.progress = progress
        self.streams = [RawStream(request, byte_limit=_byte_limit(request)) for request in plan.requests]
        # A read goes from the kernel to the parser in one step, so one large buffer serves every connection: a chunk
        # of hundreds of kilobytes takes few reads, and no memory a connection.
        self.buffers = [memoryview(bytearray(_READ_BUFFER))]
        self.monotonic_less_real = monotonic_less_real()
        self.loop = uvloop.new_event_loop()
        self.error: BaseException | None = None

        self.eligible = Order(plan)
        # Grows to the concurrency while the pass ramps up.
        self.slots = 1 if plan.ramp_s else plan.concurrency
        self.expired = self.giving_up = False
        self.kept_back = 0
        self.waiting: deque[int] = deque()
        self.busy: dict[int, Connection] = {}
        self.ready: list[Connection] = []
        self.tasks: set[asyncio.Task[None]] = set()
        self.addresses: Addresses = []
        self.spare = _SPARE
        # A server that refuses connections or closes unused ones is asked for them at need only, until it answers.
        self.open_ahead = True
        self.unsent = len(self.streams)
        self.done = self.failed = 0
        self.turn_bytes = 0
        self.dispatching = self.turning = False
        self.series: list[tuple[int, int, int]] = []
        self.start_ns = self.end_ns = self.start_cpu_ns = self.end_cpu_ns = 0
        self.lag_ns = self.tick_ns = self.progress_ns = self.sweep_ns = 0
        shortest = min(limits.request_s, limits.stall_s)
        self.sweep_every_ns = int(min(0.1, max(_TICK_S, shortest / 20)) * 1e9)

    def run(self) -> PassResult:
        """Run the loop until every request has ended; raises only what `abort` was given."""
        self.loop.set_exception_handler(self._loop_exception)
        with self._signals_deferred():
            try:
                with _undisturbed():
                    self.loop.run_until_complete(self._open_first())
                    self._start()
                    if self.error is None and self.done < len(self.streams):
                        self.loop.run_forever()
            except RuntimeError:
                if self.error is None:  # else a signal stopped the loop before the first connections stood
                    raise
            finally:
                self._close()
        if self.error is not None:
            raise self.error
        if self.progress is not None:
            self.progress(self._progress())
        return PassResult(
            plan=self.plan,
            start_ns=self.start_ns,
            end_ns=self.end_ns,
            in_flight=self.series,
            loop_lag_max_ns=self.lag_ns,
            process_cpu_ns=[self.end_cpu_ns - self.start_cpu_ns],
            streams=self.streams,
            unsent=self.kept_back,
        )

    def abort(self, error: BaseException) -> None:
        """End the pass with an exception that is no request's (a signal, the progress callback, a fault of ours)."""
        self.error = self.error or error
        self.loop.stop()

    @contextmanager
    def _signals_deferred(self) -> Iterator[None]:
        """Let a signal handler's exception end the pass from the loop, not from inside whatever callback runs.

        In a callback of the parser or the loop it could be taken for a fault of the stream, or get lost.
        """
        handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}

        def defer(number: int, frame: FrameType | None) -> None:
            try:
                handlers[number](number, frame)
            except BaseException as error:
                self.error = self.error or error
                if not self.loop.is_closed():
                    self.loop.call_soon_threadsafe(self.loop.stop)

        if threading.current_thread() is threading.main_thread():
            for number in signal.valid_signals():
                handler = signal.getsignal(number)
                if callable(handler):
                    handlers[int(number)] = handler
                    signal.signal(number, defer)
        try:
            yield
        finally:
            for caught, handler in handlers.items():
                signal.signal(caught, handler)

    def _loop_exception(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self.abort(context.get("exception") or RuntimeError(str(context.get("message"))))

    def _close(self) -> None:
        """Close every connection; also after a signal that broke into the loop, which may have left a stop behind."""
        for task in self.tasks:
            task.cancel()
        for connection in [*self.busy.values(), *self.ready]:
            connection.drop()
        self.ready.clear()
        self.waiting.clear()
        for _ in range(_CLOSING_TURNS):
            self.loop.call_soon(self.loop.stop)
            self.loop.run_forever()
        self.loop.close()

    # --- before the clock ---

    async def _open_first(self) -> None:
        """Resolve the host and open the first wave's connections; what fails here is tried again when it is needed."""
        try:
            async with asyncio.timeout(self.limits.connect_s):
                await self._resolve()
        except (OSError, TimeoutError):
            return
        deadline = self.loop.time() + self.limits.connect_s
        self._open_more()
        while self.tasks and (left := deadline - self.loop.time()) > 0:
            await asyncio.wait(self.tasks, timeout=left, return_when=asyncio.FIRST_COMPLETED)

    async def _resolve(self) -> None:
        found = await self.loop.getaddrinfo(self.target.host, self.target.port, type=SOCK_STREAM)
        self.addresses = different(found)

    def _start(self) -> None:
        self.start_cpu_ns = self.end_cpu_ns = thread_time_ns()
        self.start_ns = self.end_ns = self.tick_ns = self.progress_ns = self.sweep_ns = monotonic_ns()
        if self.streams:
            self._note(self.start_ns)
            self.loop.call_soon(self._guarded, self._admit)
            for slot in range(self.slots, self.plan.concurrency):
                self.loop.call_later(self.plan.ramp_s * slot / self.plan.concurrency, self._guarded, self._open_slot)
            if self.plan.deadline_s is not None:
                self.loop.call_later(self.plan.deadline_s, self._guarded, self._expire)
            self.loop.call_later(_TICK_S, self._guarded, self._tick)

    def _guarded(self, callback: Callable[[], None]) -> None:
        try:
            callback()
        except BaseException as error:
            self.abort(error)

    # --- connections ---

    def _open_more(self) -> None:
        """Keep connections for what is in flight and comes next, with the spare ones opened ahead of their need."""
        missing = len(self.waiting) - len(self.ready) - len(self.tasks)
        if self.open_ahead:
            wanted = min(self.plan.concurrency + self.spare, len(self.busy) + self.unsent)
            missing = wanted - len(self.busy) - len(self.ready) - len(self.tasks)
        for _ in range(min(missing, _CONNECTING - len(self.tasks))):
            task = self.loop.create_task(self._connect())
            self.tasks.add(task)
            task.add_done_callback(self._connected)

    async def _connect(self) -> None:
        """Open one connection; when none is left in the making for a waiting request, that request fails."""
        failure = f"cannot resolve host {self.target.host}"
        try:
            async with asyncio.timeout(self.limits.connect_s):
                for family, address in self.addresses:
                    try:
                        self.ready.append(Connection(self, await self._socket(family, address)))
                    except OSError as error:
                        failure = f"cannot connect: {os.strerror(error.errno) if error.errno else error}"
                        continue
                    return
        except TimeoutError:
            failure = f"cannot connect: no connection within {self.limits.connect_s:g} s"
        self.open_ahead = False
        if self.waiting and len(self.tasks) <= len(self.waiting):
            self._end(self.waiting.popleft(), failure)

    async def _socket(self, family: int, address: Any) -> socket:
        sock = socket(family, SOCK_STREAM | SOCK_NONBLOCK)
        try:
            sock.setsockopt(IPPROTO_TCP, TCP_NODELAY, 1)
            # The loop's own sock_connect would look the address up again, in a thread.
            code = sock.connect_ex(address)
            if code == errno.EINPROGRESS:
                await self._writable(sock)
                code = sock.getsockopt(SOL_SOCKET, SO_ERROR)
            if code:
                raise OSError(code, os.strerror(code))
        except BaseException:
            sock.close()
            raise
        return sock

    async def _writable(self, sock: socket) -> None:
        now = self.loop.create_future()
        self.loop.add_writer(sock, lambda: None if now.done() else now.set_result(None))
        try:
            await now
        finally:
            self.loop.remove_writer(sock)

    def _connected(self, task: asyncio.Task[None]) -> None:
        self.tasks.discard(task)
        if task.cancelled():
            return
        error = task.exception()
        if error is not None:
            self.abort(error)
            return
        self._guarded(self._dispatch)

    def lost(self, connection: Connection) -> None:
        """A connection without a stream was closed, or said something that nobody asked for."""
        if connection in self.ready:
            self.ready.remove(connection)
            self.open_ahead = self.open_ahead and connection.used
        connection.drop()

    # --- on the clock ---

    def _admit(self) -> None:
        """Give free slots to eligible requests, in their order; from here on a request's waiting is the client's."""
        if self.expired:
            self._give_up()
            return
        free = self.slots - len(self.busy) - len(self.waiting)
        if free > 0 and self.eligible:
            now = monotonic_ns()
            for _ in range(min(free, len(self.eligible))):
                position = self.eligible.pop()
                self.streams[position].eligible_ns = now
                self.waiting.append(position)
        self._dispatch()

    def _open_slot(self) -> None:
        self.slots += 1
        self._note(monotonic_ns())
        self._admit()

    def _expire(self) -> None:
        """The pass's deadline: what is in flight goes on to its end, nothing else is sent."""
        self.expired = True
        self._give_up()

    def _give_up(self) -> None:
        """End what was never sent; each end may let others in, which end here too."""
        if self.giving_up:
            return
        self.giving_up = True
        while self.waiting or self.eligible:
            position = self.waiting.popleft() if self.waiting else self.eligible.pop()
            self.streams[position].eligible_ns = self.streams[position].eligible_ns or monotonic_ns()
            self.kept_back += 1
            self._end(position, f"not sent: the pass's deadline of {self.plan.deadline_s:g} s was over")
        self.giving_up = False

    def _dispatch(self) -> None:
        """Send waiting requests while there are connections and the loop's turn isn't used up."""
        if self.dispatching:
            return
        self.dispatching = True
        while self.waiting and self.ready and self.turn_bytes < _TURN_BYTES:
            connection = self.ready.pop()
            if connection.usable(monotonic_ns(), _REUSE_NS):
                self._send(connection, self.waiting.popleft())
            else:
                connection.drop()
        if self.waiting and self.turn_bytes >= _TURN_BYTES and not self.turning:
            self.turning = True
            self.loop.call_soon(self._guarded, self._next_turn)
        self.dispatching = False
        self._open_more()

    def _send(self, connection: Connection, position: int) -> None:
        stream = self.streams[position]
        try:
            connection.send(stream, position, self.wires[position])
        except OSError as error:
            # The server closed the connection before it got a byte: another one does, unless that goes on.
            connection.drop()
            stream.send_ns = None
            stream.attempts += 1
            if stream.attempts < _ATTEMPTS:
                self.waiting.appendleft(position)
            else:
                self._end(position, f"connection lost: {error}")
            return
        self.busy[position] = connection
        self.unsent -= 1
        self.turn_bytes += _SEND_COST + self.wires[position].size
        self._note(stream.last_ns)

    def _next_turn(self) -> None:
        self.turn_bytes = 0
        self.turning = False
        self._dispatch()

    def finish(self, connection: Connection, reason: str | None) -> None:
        """A stream is over: complete, or for a reason why it isn't. Its slot goes to the next request at once."""
        position = connection.position
        stream = self.streams[position]
        if stream.end_ns is None or reason is not None:
            stream.end_ns = connection.now
        del self.busy[position]
        if connection.release():
            self.ready.append(connection)
        else:
            connection.drop()
            if reason is None:
                self.spare = min(self.plan.concurrency, _SPARE_CLOSING)
        self.open_ahead = self.open_ahead or reason is None
        self._end(position, reason)

    def _end(self, position: int, reason: str | None) -> None:
        stream = self.streams[position]
        stream.reason = reason
        if stream.send_ns is None:
            self.unsent -= 1
        self.failed += reason is not None or stream.http_status != 200
        self.done += 1
        self.eligible.ended(position)
        now = monotonic_ns()
        self._note(now)
        if self.done == len(self.streams):
            self.end_ns = now
            self.end_cpu_ns = thread_time_ns()
            self.loop.stop()
        else:
            self._admit()

    def _note(self, now: int) -> None:
        flying = len(self.busy)
        eligible = flying + len(self.waiting) + len(self.eligible)
        if self.slots < self.plan.concurrency:
            eligible = min(eligible, self.slots)
        self.series.append((now, flying, eligible))

    # --- timers ---

    def _tick(self) -> None:
        now = monotonic_ns()
        self.monotonic_less_real = monotonic_less_real()
        self.lag_ns = max(self.lag_ns, now - self.tick_ns - int(_TICK_S * 1e9))
        if now - self.sweep_ns >= self.sweep_every_ns:
            self.sweep_ns = now
            self._sweep(now)
        if self.progress is not None and now - self.progress_ns >= _PROGRESS_NS:
            self.progress_ns = now
            self.progress(self._progress())
        self.tick_ns = now  # what this took counts as well: the loop was held up
        self.loop.call_later(_TICK_S, self._guarded, self._tick)

    def _sweep(self, now: int) -> None:
        """End the streams that are past a deadline, or whose connection is gone."""
        for connection in list(self.busy.values()):
            stream = connection.stream
            if stream is None or stream.send_ns is None:
                continue
            connection.now = now
            if connection.done_ns:
                if now - connection.done_ns > _DONE_GRACE_NS:
                    stream.anomalies.append("response left open after [DONE]")
                    self.finish(connection, None)
            elif now - stream.send_ns > self.limits.request_s * 1e9:
                self.finish(connection, f"not finished within {self.limits.request_s:g} s")
            elif now - stream.last_ns > self.limits.stall_s * 1e9:
                self.finish(connection, f"no byte for {self.limits.stall_s:g} s")
            elif now - stream.last_ns > self.sweep_every_ns:
                connection.check()

    def _progress(self) -> Progress:
        return Progress(total=len(self.streams), done=self.done, failed=self.failed, in_flight=len(self.busy))
