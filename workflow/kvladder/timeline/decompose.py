"""Where the TTFT of a request went: every instant of it belongs to one part, so parts and remainder add up exactly.

``client_http``: until the engine's front end has the request, from there to the scheduler unless that is busy, and from
the scheduler having the token until the client has it. ``queue``: other requests' steps and copies, on the host and on
the device, and the wait before anything is done for it. ``scheduler``: scheduling, taking results, steps without work.
``lookup``: from the first to the last question for hits. ``load_wait``: the rest of the time from when the connector is
told to load until it says that it has: RPC, polling. ``transfer``: copies that bring its KV. ``staging``: copies inside
the device, and kernels of another process, while it loads. ``recompute``: the worker's steps with it, up to the one
that gave its first token, on the host and on the device. ``sampling``: from the end of that step's computing until the
scheduler has its result. ``next_step``: of that time what the worker needs to launch the step after it. An engine that
schedules asynchronously does so before it takes a result, so the first token waits for it.

Where several go on at once, the order of claims in `_one` says which of them has the time. What no mark and no device
event covers is the remainder.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvladder.counters.reading import ENGINE
from kvladder.timeline.assemble import Request, Timeline
from kvladder.timeline.marks import Mark
from kvladder.timeline.model import Event, clip, subtract, total, union

PARTS = (
    "client_http",
    "queue",
    "scheduler",
    "lookup",
    "load_wait",
    "transfer",
    "staging",
    "recompute",
    "sampling",
    "next_step",
)
"""In the order of a request's life, as far as it has one."""

Intervals = list[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Decomposition:
    """The TTFT of one request in ns.

    ``parts`` has every one of `PARTS`; None: not known, its time is in another part or in the ``remainder``.
    ``transfer_busy`` is the time in which its KV was copied, ``transfer_hidden`` that of it in which the worker was
    computing for it already; ``transfer_count`` copies were launched by ``transfer_calls`` API calls. ``until_copies``
    is from the start of its load to the first of them, ``after_copies`` from the last one until the connector says that
    the load is done.
    """

    request: Request
    parts: dict[str, int | None]
    remainder: int
    problem: str | None = None
    loaded_tokens: int | None = None
    computed_tokens: int | None = None
    transfer_bytes: int | None = None
    transfer_busy: int | None = None
    transfer_hidden: int | None = None
    transfer_count: int | None = None
    transfer_calls: int | None = None
    until_copies: int | None = None
    after_copies: int | None = None
    lookups: int = 0

    @property
    def unexplained(self) -> float:
        """The remainder's share of the TTFT, 0–1."""
        return self.remainder / self.request.ttft if self.request.ttft else 0.0

    @property
    def rate(self) -> float | None:
        """Bytes per second while its KV was copied."""
        if not self.transfer_bytes or not self.transfer_busy:
            return None
        return self.transfer_bytes * 1e9 / self.transfer_busy


def decompose(timeline: Timeline) -> list[Decomposition]:
    """Every request of a timeline, in the order they were sent."""
    return [_one(timeline, request) for request in timeline.requests]


@dataclass(slots=True)
class _Marks:
    """The marks of one request until it had its first token, by name."""

    request: Request
    all: Sequence[Mark]

    def named(self, name: str) -> list[Mark]:
        return [mark for mark in self.all if mark.name == name and any(map(self.request.is_of, mark.requests))]

    def tokens(self, mark: Mark) -> int:
        """Its tokens in a step."""
        both = zip(mark.requests, mark.tokens, strict=False)
        return sum(number for name, number in both if self.request.is_of(name))


def _one(timeline: Timeline, request: Request) -> Decomposition:
    inside = [mark for mark in timeline.marks if mark.end >= request.send and mark.start <= request.first_token]
    mine = _Marks(request, inside)
    arrived, updates, lookups = mine.named("arrived"), mine.named("update"), mine.named("lookup")
    number = _steps_to_first_token(mine, _loaded(timeline, request, lookups))
    steps = mine.named("execute")[:number]
    if not arrived or not steps:
        why = "the marks say nothing of this request"
        return Decomposition(request, dict.fromkeys(PARTS), request.ttft, problem=why)
    done = updates[number - 1]
    loads = mine.named("load")
    finished = [mark.end for mark in mine.named("loaded") if mark.end <= done.end]
    window = (loads[0].start, max(finished, default=max(load.end for load in loads))) if loads else None
    copies, staging, others_copies = _moved(timeline, request, window)
    samples = [mark for mark in mine.named("sample") if mark.start >= steps[-1].start]
    kernels, others_kernels = _kernels(timeline, steps)
    launched = samples[0].end if samples else steps[-1].end
    begin = min([*(mark.start for mark in lookups), steps[0].start])

    own: Intervals = [*((step.start, step.end) for step in steps), *kernels]
    moved = union((copy.start, copy.end) for copy in copies)
    others = [
        (mark.start, mark.end)
        for mark in inside
        if _is_work(mark) and mark.requests and not any(map(request.is_of, mark.requests))
    ]
    accepted = mine.named("accepted")
    claims: list[tuple[str, Intervals]] = [
        ("client_http", [(request.send, (accepted or arrived)[0].start), (done.end, request.first_token)]),
        ("queue", subtract(_held_up(timeline, request, steps), union(kernels))),
        ("recompute", own),
        ("next_step", [(mark.start, mark.end) for mark in inside if _is_work(mark) and mark.start >= launched]),
        ("sampling", [(samples[0].start, done.end)] if samples else []),
        ("transfer", moved),
        ("staging", [(event.start, event.end) for event in staging]),
        ("lookup", [(mark.start, mark.end) for mark in lookups]),
        # An engine in another request's step neither asks again nor sees that a load is done.
        ("queue", [*others, *others_kernels, *((copy.start, copy.end) for copy in others_copies)]),
        ("lookup", [(lookups[0].start, lookups[-1].end)] if lookups else []),
        ("load_wait", [window] if window else []),
        ("scheduler", [(mark.start, mark.end) for mark in inside if _is_overhead(mark)]),
        ("queue", [(arrived[0].start, begin)]),
        ("client_http", [(request.send, arrived[0].start)]),
    ]
    parts, remainder = _shared_out(claims, request)
    # A load of which no copy was seen has been waited for; how long it copied nobody knows.
    known = {name: None if name in ("transfer", "staging") and window and not copies else parts[name] for name in PARTS}
    left = subtract(moved, union(own))
    counted = bool(copies)
    return Decomposition(
        request,
        known,
        remainder,
        loaded_tokens=_loaded(timeline, request, lookups),
        computed_tokens=sum(map(mine.tokens, steps)) if all(step.tokens for step in steps) else None,
        transfer_bytes=_sum([copy.bytes if copy.requests else None for copy in copies]) if counted else None,
        transfer_busy=total(moved) if counted else None,
        transfer_hidden=total(moved) - total(left) if counted else None,
        transfer_count=sum(copy.count for copy in copies) if counted else None,
        transfer_calls=sum(copy.calls for copy in copies) if counted else None,
        until_copies=copies[0].start - window[0] if counted and window else None,
        after_copies=window[1] - max(copy.end for copy in copies) if counted and window else None,
        lookups=len(lookups),
    )


def _steps_to_first_token(mine: _Marks, loaded: int | None) -> int:
    """Steps of a request up to the one that gave its first token: the one with the prompt's last tokens.

    Where the marks don't add up to a prompt (what the device's own cache holds is in none of them), those whose result
    the scheduler had when the front end first passed something on. 0: the marks say nothing of it.
    """
    updates, outputs = mine.named("update"), mine.named("outputs")
    done = loaded or 0
    for number, step in enumerate(mine.named("execute"), 1):
        done += mine.tokens(step)
        if done >= mine.request.prompt_tokens and number <= len(updates):
            return number
    return sum(update.end <= outputs[0].start for update in updates) if outputs else 0


def _is_work(mark: Mark) -> bool:
    return mark.name in ("execute", "sample")


def _is_overhead(mark: Mark) -> bool:
    return mark.name in ("schedule", "update") or (mark.name == "execute" and not mark.requests)


def _shared_out(claims: Sequence[tuple[str, Intervals]], request: Request) -> tuple[dict[str, int], int]:
    """Give every instant of the TTFT to the first claim that has it. Returns parts and what nobody has."""
    left = [(request.send, request.first_token)]
    parts = dict.fromkeys(PARTS, 0)
    for name, intervals in claims:
        before = total(left)
        left = subtract(left, union(clip(intervals, request.send, request.first_token)))
        parts[name] += before - total(left)
    return parts, total(left)


def _moved(
    timeline: Timeline, request: Request, window: tuple[int, int] | None
) -> tuple[list[Event], list[Event], list[Event]]:
    """Copies that bring this request's KV, what stages it, and other requests' copies, inside the window of its load.

    A copy that isn't tagged counts for every request that loads at that time: each of them waits for it.
    """
    if window is None:
        return [], [], []
    copies: list[Event] = []
    staging: list[Event] = []
    others: list[Event] = []
    for event in timeline.events:
        if event.end <= window[0] or event.start >= window[1]:
            continue
        tagged = any(map(request.is_of, event.requests))
        if event.requests and not tagged:
            if event.kind in ("h2d", "cpu_copy") and event.name != "copy-store":
                others.append(event)
            continue
        loads = event.name == "copy-load" if event.kind == "cpu_copy" else event.kind == "h2d"
        if loads and (tagged or event.process != ENGINE or event.kind == "cpu_copy"):
            copies.append(event)
        elif event.process != ENGINE and event.kind in ("d2d", "kernel"):
            staging.append(event)
    return copies, staging, others


def _kernels(timeline: Timeline, steps: Sequence[Mark]) -> tuple[Intervals, Intervals]:
    """Kernels of these steps that don't sample, and all kernels of other steps before the last of them."""
    wanted = {(step.start, step.end) for step in steps}
    numbers = {event.step for event in timeline.events if event.kind == "step" and (event.start, event.end) in wanted}
    last = max((number for number in numbers if number is not None), default=0)
    own: Intervals = []
    others: Intervals = []
    for event in timeline.events:
        if event.kind != "kernel" or event.step is None or event.step > last:
            continue
        if event.step not in numbers:
            others.append((event.start, event.end))
        elif not event.name.startswith("sample: "):
            own.append((event.start, event.end))
    return own, others


def _held_up(timeline: Timeline, request: Request, steps: Sequence[Mark]) -> Intervals:
    """When the inputs of these steps waited for other requests' KV: both go through the same copy engine, in order, and
    a few KB behind a GB hold a step up."""
    loads = [event for event in timeline.events if event.kind == "h2d" and event.requests]
    kv = union((event.start, event.end) for event in loads if not any(map(request.is_of, event.requests)))
    waits = union(
        (event.launched, event.start)
        for event in timeline.events
        if event.kind == "h2d" and event.process == ENGINE and not event.requests and event.launched is not None
        if any(step.start <= event.launched <= step.end for step in steps)
    )
    return [part for start, end in waits for part in clip(kv, start, end)]


def _loaded(timeline: Timeline, request: Request, lookups: Sequence[Mark]) -> int | None:
    """Tokens that the connector said it would load, from the last lookup that knew."""
    known = [mark.tokens[0] for mark in lookups if mark.tokens]
    return known[-1] if known else (0 if not lookups and timeline.marks else None)


def _sum(values: Sequence[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None
