"""Servers of one setup, up and read back: what a trial and a start have in common."""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import json
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from kvladder.config import stack as stacks
from kvladder.config.experiment import ExperimentConfig, kv_bytes_per_token
from kvladder.config.records import CounterSnapshot, EffectiveConfig, FurtherEngine, ServerRecord
from kvladder.config.stack import StackConfig, StackStamp
from kvladder.config.traffic import PassName, PassPlan, Prefix, TrafficContext
from kvladder.counters.drain import Drain, files_activity, wait_until_flat
from kvladder.counters.reading import engine_name, parse_pages, seen_from
from kvladder.counters.scrape import scrape
from kvladder.load import Limits, Progress, Target, check_cores, run_pass
from kvladder.serving.errors import NotClean
from kvladder.serving.hygiene import after_stop, before_start
from kvladder.serving.lease import lease
from kvladder.serving.ports import Ports, reserve
from kvladder.serving.process import ProcessSpec, ServerFailed, ServerGroup, servers
from kvladder.setups.base import COUNTER_FILES, SetupConfig, SetupContext
from kvladder.stack import variants
from kvladder.stack.paths import ROOT
from kvladder.trial.engine import SERVED_NAME, engine_spec
from kvladder.trial.readback import read_back, server_info
from kvladder.workloads.base import Prompts, WorkloadConfig

WARM_UP = "warm-up"
"""Name under which unmeasured prompts are drawn: no measured prompt shares a block with them."""


@dataclass(frozen=True, slots=True)
class Stack:
    """An installed stack: its definition, its stamp, its interpreter."""

    folder: Path
    config: StackConfig
    stamp: StackStamp

    @classmethod
    def load(cls, folder: Path, stamp: Path) -> Stack:
        """Read ``stack.yaml`` and the stamp. Raises ConfigError or OSError."""
        return cls(folder, stacks.load(folder), StackStamp.model_validate_json(stamp.read_text(encoding="utf-8")))

    @property
    def python(self) -> Path:
        """Interpreter of the servers. Never resolved: a venv's python is a link that must stay one."""
        return ROOT / self.stamp.interpreter

    @property
    def env(self) -> dict[str, str]:
        """Variables without which a preinstalled stack isn't found: servers don't inherit them."""
        path = os.environ.get("PYTHONPATH")
        return {"PYTHONPATH": path} if self.stamp.source == "preinstalled" and path else {}

    def environment(self, variant: str) -> dict[str, str]:
        """What servers of a setup that runs this variant of the stack need, and say which one it was.

        Raises OSError where the stack has no such variant.
        """
        env = dict(self.env)
        watched = variants.modules(self.stamp.patched_files)
        if watched:
            env[variants.WATCHED] = ",".join(sorted(watched))
        if variant == variants.STOCK:
            stock = variants.folder(self.folder.absolute())
            if not stock.is_dir():
                # An engine would pass over it without a word, and run patched.
                raise FileNotFoundError(f"{stock} is missing: run `snakemake env --forcerun install_stack`")
            env["PYTHONPATH"] = os.pathsep.join([str(stock), *filter(None, [env.get("PYTHONPATH")])])
        return env

    @property
    def caches(self) -> Path:
        """Compile caches of the engines, shared by the trials of a stack so that only the first pays for them."""
        return self.folder / ".cache"


@dataclass(frozen=True, slots=True)
class Job:
    """What every measuring job needs: the experiment, its stack and model, and where progress lines go."""

    config: ExperimentConfig
    stack: Stack
    model_dir: Path
    write: Callable[[str], None]

    @property
    def limits(self) -> Limits:
        """Deadlines of the client."""
        load = self.config.load
        return Limits(connect_s=load.connect_s, request_s=load.request_s, stall_s=load.stall_s)


class Say:
    """Progress lines of one job: which trial, which pass, requests done, time."""

    def __init__(self, name: str, write: Callable[[str], None]) -> None:
        self._name, self._write, self._start, self._last = name, write, time.monotonic(), 0.0

    def __call__(self, text: str) -> None:
        """Write one line, with the seconds since the job began."""
        self._write(f"[{self._name}] {time.monotonic() - self._start:6.1f} s  {text}")

    def requests(self, label: str, check_alive: Callable[[], None]) -> Callable[[Progress], None]:
        """Callback for the client: at most one line in two seconds; ends the pass as soon as a server has died."""

        def report(progress: Progress) -> None:
            check_alive()
            now = time.monotonic()
            if now - self._last >= 2 or progress.done == progress.total:
                self._last = now
                self(f"{label}: {progress.done}/{progress.total} requests")

        return report


@dataclass(slots=True)
class Session:
    """Running servers of one setup, and what was read back from them.

    ``contexts``, ``targets`` and ``infos`` have one entry an engine.
    """

    job: Job
    setup: SetupConfig
    contexts: list[SetupContext]
    group: ServerGroup
    targets: list[Target]
    devices: list[str]
    shape: dict[str, Any]
    infos: list[Future[dict[str, Any] | None]]
    urls: dict[str, str]
    snapshots: list[CounterSnapshot] = field(default_factory=list)

    @property
    def context(self) -> SetupContext:
        """That of the first engine and of the side processes."""
        return self.contexts[0]

    @property
    def effective(self) -> EffectiveConfig:
        """What the first engine and the side processes say of themselves now. Waits for the engine's answer."""
        return self._effective(0)

    @property
    def further_engines(self) -> dict[str, FurtherEngine]:
        """The same of the other engines, with what was asked of each, by server name."""
        return {
            context.server: FurtherEngine(
                connector=self.setup.connector(context), effective=self._effective(context.number)
            )
            for context in self.contexts[1:]
        }

    def _effective(self, number: int) -> EffectiveConfig:
        return read_back(self.setup, self.contexts[number], self.group, self.infos[number].result())

    def snapshot(self, mark: str) -> None:
        """Scrape every server and keep the raw pages under ``mark``."""
        self.snapshots.append(scrape(self.urls, mark))

    def drain(self, engine: int = 0) -> Drain:
        """Wait until the store counters of an engine and of the side processes are flat, and its files, within the
        configured deadline."""
        load, folder = self.job.config.load, self.setup.disk_folder(self.contexts[engine])

        def activity() -> Mapping[str, float] | None:
            pages = parse_pages(scrape(self.urls, "drain").pages)
            found = self.setup.store_activity(seen_from(pages, engine))
            return found if folder is None or found is None else {**found, **files_activity(folder)}

        return wait_until_flat(activity, load.quiet_s, load.drain_s)

    def traffic(self, namespace: str, effective: EffectiveConfig) -> TrafficContext:
        """What workloads draw prompts from; equal for every setup of a block."""
        config = self.job.config
        text = self.shape.get("text_config", self.shape)
        if not isinstance(text.get("vocab_size"), int):
            raise self.failed("the model's config.json has no vocab_size: no prompt can be drawn")
        special: set[Any] = set()
        for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
            ids = text.get(key)
            special |= set(ids) if isinstance(ids, list) else {ids}
        return TrafficContext(
            seed=config.seed,
            namespace=namespace,
            vocab_size=text["vocab_size"],
            block_size=effective.block_size or config.engine.block_size or 16,
            reserved_ids=frozenset(token for token in special if isinstance(token, int)),
            capacity_tokens=self._capacities(effective),
        )

    def _capacities(self, effective: EffectiveConfig) -> dict[str, int]:
        """Tokens by tier, of the device as read back and of the experiment's tier in host memory: equal for every setup
        of a block, also for one that doesn't have it."""
        found = {} if effective.kv_pool_tokens is None else {"gpu": effective.kv_pool_tokens}
        sizes, per_token = self.job.config.host_tier_bytes(), self.context.kv_bytes_per_token
        if len(sizes) == 1 and per_token:
            found["cpu"] = sizes.pop() // per_token
        return found

    def warm_up(self, workload: WorkloadConfig, suite: str) -> int:
        """Send each engine an unmeasured prompt of its own, of the workload's length, twice; returns the first TTFT in
        ns.

        Lazy initialisation of computing, storing and loading is over before the clock starts.
        Raises ServerFailed when a server doesn't answer it.
        """
        output = workload.output_tokens
        tokens = workload.longest_prompt() - output
        # The engine may still be busy answering for its configuration: these prompts need none of it.
        prompts = Prompts(WARM_UP, self.traffic(suite, EffectiveConfig())).requests(len(self.targets), tokens, output)
        times: list[int] = []
        names: tuple[PassName, ...] = ("cold", "first-hit")
        for engine, prompt in enumerate(prompts):
            plan = PassPlan(WARM_UP, "cold", 0, 1, [dataclasses.replace(prompt, index=0)], engine=engine)
            for name in names:
                self.reset_before(name, engine)
                record = run_pass(self.targets[engine], plan, self.job.limits).records[0]
                if record.status != "ok" or record.first_token_ns is None or record.send_ns is None:
                    self.group.check_alive()
                    raise self.failed(f"warm-up request failed: {record.error}", engine)
                times.append(record.first_token_ns - record.send_ns)
                self.drain(engine)
        return times[0]

    def reset_before(self, name: PassName, engine: int = 0) -> None:
        """Empty what the setup wants emptied in an engine before a pass of that name; the tiers below keep what they
        have.

        Engines note finished copies only while they step, and an idle one may not: copied blocks stay in use, which
        makes a reset fail, and what was copied last can't be hit. So a prompt of one token makes it step first; it
        fills no block, so nothing of it is kept. Raises ServerFailed unless the engine says in the end that it did
        reset: it may answer 200 with ``success: false``.
        """
        what = self.setup.reset_before(name)
        if what is None:
            return
        beside = self.setup.host_reset(self.contexts[engine]) if what == "host" else None
        path = "/reset_prefix_cache" + ("?reset_external=true" if what == "host" and beside is None else "")
        deadline = time.monotonic() + self.job.config.load.drain_s
        while True:
            self._nudge(engine)
            status, body = self._post(path, engine)
            try:
                done = status == http.client.OK and (not body.strip() or json.loads(body).get("success", True))
            except (ValueError, AttributeError) as error:
                raise self.failed(f"reset before {name}: unreadable answer {body[:200]!r}", engine) from error
            if done:
                break
            if time.monotonic() >= deadline:
                raise self.failed(f"reset before {name} refused: {status} {body[:200]!r}", engine)
            time.sleep(0.2)
        if beside is not None:
            status, body = self._post(beside[1], engine, port=beside[0])
            if status != http.client.OK:
                raise self.failed(f"reset before {name} refused: {status} {body[:200]!r}", engine)

    def profile(self, what: Literal["start", "stop"]) -> None:
        """Start or stop the first engine's profiler. Raises ServerFailed unless it says that it did."""
        status, body = self._post(f"/{what}_profile", 0)
        if status != http.client.OK:
            raise self.failed(f"{what} of the profile refused: {status} {body[:200]!r}")

    def _nudge(self, engine: int) -> None:
        """One request of one token, unmeasured."""
        prompt = Prompts(f"{WARM_UP}-nudge", self.traffic("nudge", EffectiveConfig())).requests(1, 1, 1)
        plan = PassPlan(WARM_UP, "cold", 0, 1, prompt, engine=engine)
        record = run_pass(self.targets[engine], plan, self.job.limits).records[0]
        if record.status != "ok":
            self.group.check_alive()
            raise self.failed(f"request before a reset failed: {record.error}", engine)

    def _post(self, path: str, engine: int, port: int | None = None) -> tuple[int, bytes]:
        """Status and body of a POST without content, to an engine or to a side process's ``port``. Raises ServerFailed
        where none comes."""
        target = self.targets[engine]
        connection = http.client.HTTPConnection(target.host, port or target.port, timeout=60)
        try:
            connection.request("POST", path, headers={"Authorization": f"Bearer {target.api_key}"})
            response = connection.getresponse()
            return response.status, response.read()
        except (OSError, http.client.HTTPException) as error:
            raise self.failed(f"POST {path} failed: {error}", engine) from error
        finally:
            connection.close()

    def check_room(self, plans: Iterable[PassPlan]) -> None:
        """Raises ServerFailed where the disk of the setup's tier hasn't room for what these passes can store.

        Engines evict no file; one that finds the disk full loses KV in the middle of a pass and goes on. Of a
        conversation the last turn counts, which holds the others, and each turn's own answer; where engines don't share
        their tier, each stores what it is sent.
        """
        folder, per_token = self.setup.disk_folder(self.context), self.context.kv_bytes_per_token
        if folder is None or per_token is None:
            return
        stored: dict[tuple[int, int], dict[int, int]] = {}
        for plan in plans:
            engine = 0 if self.setup.shares_pool else plan.engine
            for request in plan.requests:
                text = request.prompt.text if isinstance(request.prompt, Prefix) else request.prompt
                stored.setdefault((engine, id(text)), {})[len(request.prompt)] = request.output_tokens
        needed = sum(max(turns) + sum(turns.values()) for turns in stored.values()) * per_token
        there = next(path for path in (folder, *folder.parents) if path.exists())
        free = shutil.disk_usage(there).free
        if needed > free:
            raise self.failed(
                f"the tier on disk may need {needed >> 20:,} MiB, and {there} has {free >> 20:,} MiB free: "
                "send fewer prompts, or name a larger disk in `files.path`"
            )

    def failed(self, reason: str, engine: int = 0) -> ServerFailed:
        """An engine's failure with this reason, to be raised."""
        return ServerFailed(engine_name(engine), reason, self.contexts[engine].log)


def model_shape(job: Job) -> dict[str, Any]:
    """The model's config.json: of a generated model from the experiment, of a checkpoint from its folder.

    Raises OSError or ValueError when there is none to read.
    """
    if job.config.model.shape is not None:
        return job.config.model.shape
    shape = json.loads((job.model_dir / "config.json").read_text(encoding="utf-8"))
    if not isinstance(shape, dict):
        raise ValueError(f"{job.model_dir / 'config.json'}: expected a mapping")
    return shape


class Attempt:
    """One attempt to serve a setup: `up` is its context manager; what it started stays readable after a failure."""

    def __init__(self, job: Job, setup: str, namespace: str, folder: Path, say: Say, *, engines: int = 1) -> None:
        self.job, self.say, self.engines = job, say, engines
        self.setup: SetupConfig = job.config.setups[setup]
        # What the tags of all attempts at it share.
        self.common = f"{namespace}-"
        self.namespace = self.common + secrets.token_hex(4)
        # Servers run in another folder, so absolute; links stay links.
        self.folder = Path(os.path.abspath(folder))  # noqa: PTH100
        self.group: ServerGroup | None = None
        self.devices: list[str] = []
        self.startup_ns: int | None = None
        self.pids: list[int] = []
        self.prepare: Callable[[ProcessSpec], ProcessSpec] = lambda spec: spec
        """What is done to each server before it starts: a capture puts a profiler around it."""

    def records(self) -> list[ServerRecord]:
        """Every process that was started."""
        return self.group.records() if self.group is not None else []

    @contextlib.contextmanager
    def _clean_host(self, ports: list[int]) -> Iterator[None]:
        """Nothing of ours lies on the machine before the servers start, and nothing after they've stopped."""
        baseline = before_start(
            tag=self.namespace,
            earlier=self.common,
            ports=ports,
            devices=self.devices,
            shm_bytes=self.setup.shared_memory_bytes() * (1 if self.setup.shares_pool else self.engines),
        )
        for note in baseline.notes:
            self.say(note)
        failing = True
        try:
            yield
            failing = False
        finally:
            notes = list(self.group.notes) if self.group is not None else []
            try:
                notes += after_stop(baseline, tag=self.namespace, ports=ports, devices=self.devices, pids=self.pids)
            except NotClean as error:
                # Why the trial failed in the first place must not be lost; nor a measured trial without a record.
                if not failing and self.group is not None:
                    raise ServerFailed("engine", str(error), self.group.named("engine").spec.log) from error
                notes.append(str(error))
            for note in dict.fromkeys(notes):
                self.say(note)

    @contextlib.contextmanager
    def up(self) -> Iterator[Session]:
        """Lease, ports, servers up and read back; everything stopped and given back at the end.

        Raises `ServerFailed` when a server doesn't come up or has died, the errors of `kvladder.serving` when the
        machine isn't fit to start, ValueError where it hasn't the client's cores.
        """
        config, stack = self.job.config, self.job.stack
        check_cores(config.load.cores)
        with contextlib.ExitStack() as held:
            # A stand-in for tests measures nothing: locks of its own, so that it needn't wait for the machine.
            apart = (
                Path(held.enter_context(tempfile.TemporaryDirectory(prefix="kvladder-locks-")))
                if stack.config.device == "none"
                else None
            )
            taken = held.enter_context(
                lease(
                    config.engine.tensor_parallel if stack.config.device == "cuda" else 0,
                    holder=self.namespace,
                    host_slots=config.host_slots,
                    progress=self.say,
                    folder=apart,
                )
            )
            self.devices = taken.devices
            shape = model_shape(self.job)
            ports: dict[str, Ports] = {}

            def port(name: str) -> int:
                if name not in ports:
                    wanted = [config.engine.port] if name == "engine" and config.engine.port is not None else []
                    ports[name] = held.enter_context(reserve(1 - len(wanted), wanted=wanted, holder=self.namespace))
                return ports[name].ports[0]

            context = SetupContext(
                engine=config.engine,
                model=config.model,
                model_dir=Path(os.path.abspath(self.job.model_dir)),  # noqa: PTH100
                stack=stack.config,
                python=stack.python,
                bin_dir=stack.python.parent,
                folder=self.folder,
                namespace=self.namespace,
                port=port,
                kv_bytes_per_token=kv_bytes_per_token(shape, config.model.dtype),
                engines=self.engines,
            )
            contexts = [context.of_engine(number) for number in range(self.engines)]
            for each in contexts:
                each.folder.mkdir(parents=True, exist_ok=True)
                held.callback(shutil.rmtree, each.folder / COUNTER_FILES, ignore_errors=True)
                disk = self.setup.disk_folder(each)
                if disk is not None:
                    # What counts about a tier on disk is in the counters, and it can be large.
                    held.callback(shutil.rmtree, disk, ignore_errors=True)
            api_key = secrets.token_urlsafe(24)
            specs = self.setup.side_processes(context)
            specs += [engine_spec(self.setup, each, api_key) for each in contexts]
            specs = list(map(self.prepare, specs))
            environment = stack.environment(self.setup.variant)
            held.enter_context(self._clean_host([number for each in ports.values() for number in each.ports]))
            started = time.monotonic_ns()
            self.group = servers(
                [dataclasses.replace(spec, env={**taken.env, **environment, **spec.env}) for spec in specs],
                tag=self.namespace,
                caches=stack.caches,
                hold=[*taken.fds, *(fd for each in ports.values() for fd in each.fds)],
                grace_s=config.engine.stop_s,
                progress=self.say,
            )
            # Entered before the servers, so left after them: a question that hangs ends with the one who was asked.
            asking = held.enter_context(ThreadPoolExecutor(self.engines))
            held.enter_context(self.group)
            self.pids = self.group.tree()
            self.startup_ns = time.monotonic_ns() - started
            yield Session(
                job=self.job,
                setup=self.setup,
                contexts=contexts,
                group=self.group,
                targets=[Target("127.0.0.1", each.port("engine"), SERVED_NAME, api_key) for each in contexts],
                devices=self.devices,
                shape=shape,
                # Takes seconds (the engine collects its whole environment): the warm-up goes on meanwhile.
                infos=[asking.submit(server_info, each.port("engine"), api_key) for each in contexts],
                urls={spec.name: spec.metrics_url for spec in specs if spec.metrics_url is not None},
            )
