"""What an engine does with each request, written down with the time: for timelines, never in a timed trial.

With ``KVLADDER_MARKS`` set to a folder, every process of the engine writes ``marks-<pid>.jsonl`` there: one span a
line, on CLOCK_MONOTONIC, which the load client uses too. No profiler knows requests, so this is where they come from:

``accepted`` (front end has the request) · ``arrived`` (scheduler has it) · ``lookup`` (connector asked for hits) ·
``schedule`` · ``execute`` and ``sample`` (one step of the worker) · ``load`` and ``store`` (connector told to begin) ·
``loaded`` and ``stored`` (connector says they are done) · ``copy-load`` and ``copy-store`` (the host copier at work;
bytes) · ``update`` (scheduler takes a step's result) · ``outputs`` (front end passes tokens on)

With ``KVLADDER_MARKS_RANGES`` set to ``nvtx`` or ``torch`` the profiler gets a mark with the clock at every step, by
which its own times are brought onto this clock; with ``nvtx`` each request is a range as well, to be seen in nsys. The
functions it wraps are those of vLLM 0.26.0 and 0.32.0.
"""

import contextlib
import functools
import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TextIO

FOLDER, RANGES = "KVLADDER_MARKS", "KVLADDER_MARKS_RANGES"
CLOCK = "kvladder:clock:"
"""What a profiler's mark begins with; the rest is CLOCK_MONOTONIC in ns."""
REQUEST = "kvladder:request:"
"""What the range of a request begins with; the rest is its id."""


class Marks:
    """The file of this process. Opened when first written to, and anew in a process that was forked."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._pid = 0
        self._file: TextIO | None = None

    def write(self, name: str, start: int, end: int, requests: Iterable[str] = (), **more: Any) -> None:
        """One span, in ns; a moment has ``start`` = ``end``."""
        if self._pid != os.getpid():
            self._pid = os.getpid()
            # Line-buffered: a process that is killed has written all that it did.
            self._file = (self._folder / f"marks-{self._pid}.jsonl").open("a", buffering=1, encoding="utf-8")
        assert self._file is not None  # noqa: S101
        line = {"name": name, "start": start, "end": end, "pid": self._pid, "tid": threading.get_native_id()}
        self._file.write(json.dumps({**line, "requests": list(requests), **more}, separators=(",", ":")) + "\n")

    def moment(self, name: str, requests: Iterable[str] = (), **more: Any) -> None:
        """Something that takes no time."""
        now = time.monotonic_ns()
        self.write(name, now, now, requests, **more)

    @contextlib.contextmanager
    def span(self, name: str, requests: Iterable[str] = (), **more: Any) -> Iterator[None]:
        """Whatever runs inside; ``requests`` is read at its end."""
        start = time.monotonic_ns()
        try:
            yield
        finally:
            self.write(name, start, time.monotonic_ns(), requests, **more)


@functools.cache
def marks() -> Marks | None:
    """The marks of this server; None where nobody asked for them."""
    return Marks(Path(os.environ[FOLDER])) if FOLDER in os.environ else None


@functools.cache
def clock_marker() -> Callable[[], None]:
    """What tells the profiler the time."""
    kind = os.environ.get(RANGES)
    if kind == "nvtx":
        import torch  # noqa: PLC0415

        return lambda: torch.cuda.nvtx.mark(f"{CLOCK}{time.monotonic_ns()}")
    if kind == "torch":
        from torch.profiler import record_function  # noqa: PLC0415

        def mark() -> None:
            with record_function(f"{CLOCK}{time.monotonic_ns()}"):
                pass

        return mark
    return lambda: None


def mark_engine() -> None:
    """Have this process of the engine write its spans, where the environment asks for them; once."""
    log = marks()
    if log is None:
        return
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory  # noqa: PLC0415
    from vllm.v1.core.sched.scheduler import Scheduler  # noqa: PLC0415
    from vllm.v1.engine.async_llm import AsyncLLM  # noqa: PLC0415
    from vllm.v1.engine.output_processor import OutputProcessor  # noqa: PLC0415
    from vllm.v1.worker.worker_base import WorkerWrapperBase  # noqa: PLC0415

    if getattr(Scheduler, "kvladder_marked", False):
        return
    Scheduler.kvladder_marked = True
    _front_end(log, AsyncLLM, OutputProcessor)
    _scheduler(log, Scheduler)
    _worker(log, WorkerWrapperBase)
    _connector(log, KVConnectorFactory)


def _wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Replace a method by ``around(original, *arguments)``."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def method(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    setattr(owner, name, method)


def _front_end(log: Marks, engine: Any, processor: Any) -> None:
    def add_request(original: Any, self: Any, request_id: str, *args: Any, **kwargs: Any) -> Any:
        log.moment("accepted", [request_id])
        return original(self, request_id, *args, **kwargs)

    ranges: dict[str, Any] = {}

    def register(original: Any, self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        if os.environ.get(RANGES) == "nvtx":
            import torch  # noqa: PLC0415

            ranges[request.request_id] = torch.cuda.nvtx.range_start(f"{REQUEST}{request.request_id}")
        return original(self, request, *args, **kwargs)

    def process_outputs(original: Any, self: Any, outputs: Any, *args: Any, **kwargs: Any) -> Any:
        with log.span("outputs", [output.request_id for output in outputs]):
            result = original(self, outputs, *args, **kwargs)
        for output in outputs:
            if output.finish_reason is not None and output.request_id in ranges:
                import torch  # noqa: PLC0415

                torch.cuda.nvtx.range_end(ranges.pop(output.request_id))
        return result

    _wrap(engine, "add_request", add_request)
    _wrap(processor, "add_request", register)
    _wrap(processor, "process_outputs", process_outputs)


def _scheduler(log: Marks, scheduler: Any) -> None:
    def add_request(original: Any, self: Any, request: Any) -> Any:
        log.moment("arrived", [request.request_id], tokens=request.num_prompt_tokens)
        return original(self, request)

    def schedule(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        start = time.monotonic_ns()
        output = original(self, *args, **kwargs)
        log.write("schedule", start, time.monotonic_ns(), output.num_scheduled_tokens)
        return output

    def update(original: Any, self: Any, output: Any, *args: Any, **kwargs: Any) -> Any:
        with log.span("update", output.num_scheduled_tokens):
            return original(self, output, *args, **kwargs)

    _wrap(scheduler, "add_request", add_request)
    _wrap(scheduler, "schedule", schedule)
    _wrap(scheduler, "update_from_output", update)


def _worker(log: Marks, wrapper: Any) -> None:
    def execute(original: Any, self: Any, output: Any, *args: Any, **kwargs: Any) -> Any:
        clock_marker()()
        step = output.num_scheduled_tokens
        if not hasattr(self.worker, "kvladder_step"):
            _wrap(self.worker, "sample_tokens", sample)
        self.worker.kvladder_step = step
        with log.span("execute", step, tokens=list(step.values())):
            return original(self, output, *args, **kwargs)

    def sample(original: Any, *args: Any, **kwargs: Any) -> Any:
        with log.span("sample", original.__self__.kvladder_step):
            return original(*args, **kwargs)

    _wrap(wrapper, "execute_model", execute)


def _connector(log: Marks, factory: Any) -> None:
    def create(original: Any, config: Any, role: Any, *args: Any, **kwargs: Any) -> Any:
        connector = original(config, role, *args, **kwargs)
        (_scheduler_side if role.name == "SCHEDULER" else _worker_side)(log, connector)
        return connector

    _wrap(factory, "create_connector", create)


def _scheduler_side(log: Marks, connector: Any) -> None:
    def lookup(original: Any, request: Any, computed: int) -> Any:
        start = time.monotonic_ns()
        found, later = original(request, computed)
        # None: the connector doesn't know yet and will be asked again.
        log.write("lookup", start, time.monotonic_ns(), [request.request_id], tokens=found, asynchronous=later)
        return found, later

    _wrap(connector, "get_num_new_matched_tokens", lookup)


def _worker_side(log: Marks, connector: Any) -> None:
    def bind(original: Any, metadata: Any) -> Any:
        connector.kvladder_jobs = jobs(metadata)
        return original(metadata)

    def begin(name: str) -> Callable[..., Any]:
        def around(original: Any, *args: Any, **kwargs: Any) -> Any:
            asked = connector.kvladder_jobs.get(name, [])
            if not asked:
                return original(*args, **kwargs)
            with log.span(name, asked):
                return original(*args, **kwargs)

        return around

    def finished(original: Any, *args: Any, **kwargs: Any) -> Any:
        start = time.monotonic_ns()
        stored, loaded = original(*args, **kwargs)
        for name, requests in (("stored", stored), ("loaded", loaded)):
            if requests:
                log.write(name, start, time.monotonic_ns(), sorted(requests))
        return stored, loaded

    connector.kvladder_jobs = {}
    _wrap(connector, "bind_connector_metadata", bind)
    _wrap(connector, "start_load_kv", begin("load"))
    _wrap(connector, "wait_for_save", begin("store"))
    _wrap(connector, "get_finished", finished)


def jobs(metadata: Any) -> dict[str, list[str]]:
    """Requests that a connector is to load and to store, from what its scheduler side sends to its worker side.

    Each connector has a class of its own for that: OffloadingConnector's names its jobs, LMCache's multiprocess
    connector gives each request a direction, Mooncake's a load specification where there is something to load.
    """
    found: dict[str, list[str]] = {"load": [], "store": []}
    for name in found:
        found[name] += [job.req_id for job in getattr(metadata, f"{name}_jobs", {}).values()]
    for request in getattr(metadata, "requests", []):
        name = getattr(request, "request_id", None) or getattr(request, "req_id", None)
        if name is None:
            continue
        direction = getattr(request, "direction", None)
        if direction is not None:
            found["load" if direction == "RETRIEVE" else "store"].append(name)
            continue
        specification = getattr(request, "load_spec", None)
        if specification is not None and getattr(specification, "can_load", True):
            found["load"].append(name)
        else:
            found["store"].append(name)
    return found
