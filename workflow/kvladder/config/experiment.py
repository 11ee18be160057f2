"""The experiment: what a config file may say.

Example, defaults and every key: ``config/README.md``. A failed check raises `ConfigError` with the key, the value and
what is allowed, before anything starts.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ConfigDict, Field, ValidationError, field_validator, model_validator

from kvladder.config import registry
from kvladder.config.base import POOL_BYTES, Bytes, Name, Strict
from kvladder.config.references import REFERENCES
from kvladder.config.traffic import RIGHT_KV
from kvladder.config.yaml import ConfigError, problems

Scalar = str | int | float | bool | None

RIGHT_KV_TOKENS, RIGHT_KV_TAIL = 512, 9
"""Tokens of a right-kv prompt that are to be loaded, and those after them that are always computed."""

RIGHT_KV_CHUNKS = (256, 128, 16)
"""Units that setups hit in: a prompt of whole units of the largest is hit alike in all of them."""

OWN_ARGUMENTS = frozenset({"model", "served-model-name", "host", "port", "api-key"})
"""vLLM arguments that kvladder sets itself: with others the client would miss the server, or another one answer."""


def _check_arguments(arguments: dict[str, Scalar]) -> dict[str, Scalar]:
    """Refuse vLLM arguments that are kvladder's own."""
    for name in arguments:
        if name.removeprefix("--").replace("_", "-") in OWN_ARGUMENTS:
            hint = ": use engine.port" if name.removeprefix("--") == "port" else ""
            raise ValueError(f"{name!r} is set by kvladder{hint}; its own are: {', '.join(sorted(OWN_ARGUMENTS))}")
    return arguments


Arguments = Annotated[dict[str, Scalar], AfterValidator(_check_arguments)]
"""vLLM arguments by name, without kvladder's own."""


class _Finite(Strict):
    """Settings with numbers: ``.inf`` is a deadline that no clock counts to, and a tolerance that tolerates all."""

    model_config = ConfigDict(allow_inf_nan=False)


class ModelConfig(Strict):
    """The model every setup serves. ``weights: seeded`` and ``dummy`` need a shape only, nothing is downloaded."""

    weights: Literal["seeded", "dummy", "checkpoint"] = Field(
        default="seeded",
        description="seeded: random weights of normal scale from `seed`, generated in the engine. dummy: the engine's "
        "own tiny uniform numbers (speed only; no evidence for right-kv). checkpoint: real weights at `path`.",
    )
    path: str | None = Field(
        default=None, description="Folder or hub name of a checkpoint; only with weights: checkpoint."
    )
    seed: int = Field(default=0, ge=0, description="Seed of the generated weights.")
    shape: dict[str, Any] | None = Field(
        default=None,
        description="Content of the model's config.json (Llama style keys) for weights: seeded and dummy.",
    )
    dtype: Literal["bfloat16", "float16", "float32"] = Field(default="bfloat16", description="Type of weights and KV.")

    @model_validator(mode="after")
    def _one_source(self) -> ModelConfig:
        if (self.weights == "checkpoint") != (self.path is not None):
            raise ValueError("`path` goes with weights: checkpoint, and only with it")
        if (self.weights == "checkpoint") == (self.shape is not None):
            raise ValueError("`shape` goes with weights: seeded or dummy, and only with them")
        return self


class EngineConfig(_Finite):
    """Engine settings that are equal in every setup, so that setups differ in their KV tier alone."""

    max_model_len: int = Field(ge=16, description="Longest prompt plus output, in tokens.")
    kv_pool_bytes: Bytes | None = Field(
        default=None,
        description="Device KV pool of each GPU in bytes (--kv-cache-memory-bytes): fixed, so equal in every setup.",
    )
    kv_pool_blocks: int | None = Field(
        default=None,
        ge=2,
        description="Device KV pool in blocks (--num-gpu-blocks-override) where bytes aren't enough.",
    )
    block_size: int | None = Field(default=None, ge=1, description="KV block in tokens; unset: the engine's default.")
    tensor_parallel: int = Field(
        default=1, ge=1, description="GPUs that share the model (--tensor-parallel-size); a trial holds as many."
    )
    max_num_seqs: int = Field(default=64, ge=1, description="Requests the scheduler runs at once.")
    max_num_batched_tokens: int | None = Field(default=None, ge=1, description="Tokens a scheduler step may take.")
    cpu_threads: str | None = Field(
        default=None, description="CPU stack: cores that the engine's threads bind to, e.g. '0-1'. Never automatic."
    )
    eager: bool = Field(default=True, description="No compilation and no graphs: quick starts; off for decode numbers.")
    port: int | None = Field(
        default=None, ge=1, le=65535, description="Port of the engine's API on loopback; unset: a free one."
    )
    args: Arguments = Field(
        default_factory=dict, description="Any vLLM argument: `max-num-seqs: 4`; true = a bare flag."
    )
    env: dict[str, str] = Field(default_factory=dict, description="Environment variables of every process of a trial.")
    ready_s: float = Field(default=600, gt=0, description="Deadline for a server to be ready, in seconds.")
    stop_s: float = Field(
        default=30, gt=0, description="Patience with a server that has been asked to stop, in seconds."
    )

    def pool_bytes(self, model: ModelConfig) -> int | None:
        """Device pool in bytes over all GPUs as far as the configuration says; None where only the engine knows."""
        if self.kv_pool_blocks is None:
            return None if self.kv_pool_bytes is None else self.kv_pool_bytes * self.tensor_parallel
        per_token = None if model.shape is None else kv_bytes_per_token(model.shape, model.dtype)
        if self.block_size is None or per_token is None:
            return None
        return self.kv_pool_blocks * self.block_size * per_token


class LoadConfig(_Finite):
    """The client: its processes, its deadlines and that of the drain between passes, in seconds."""

    connect_s: float = Field(default=10, gt=0, description="Deadline to open a connection.")
    request_s: float = Field(default=600, gt=0, description="Deadline of one request, first byte to last.")
    stall_s: float = Field(default=120, gt=0, description="Longest silence in a stream.")
    drain_s: float = Field(default=60, gt=0, description="Longest wait for store traffic to go flat.")
    quiet_s: float = Field(default=0.5, gt=0, description="How long store traffic must be flat to count as drained.")
    processes: int = Field(
        default=1,
        ge=1,
        description="Client processes, for loads that one core can't send. Passes of conversations, and those that "
        "ramp up or have a deadline, are sent by one all the same.",
    )
    cores: list[Annotated[int, Field(ge=0)]] = Field(
        default_factory=list,
        description="Cores that client processes are pinned to, one each; none: the scheduler places them.",
    )

    @model_validator(mode="after")
    def _a_core_each(self) -> LoadConfig:
        if self.cores and not len(self.cores) == len(set(self.cores)) == self.processes:
            raise ValueError(f"cores: {self.processes} client processes need as many different cores, not {self.cores}")
        return self


class GateConfig(_Finite):
    """Which checks decide. A required gate that fails makes a trial invalid; an advisory one is shown."""

    advisory: list[str] = Field(default_factory=list, description="Gates that are reported but don't decide.")
    off: list[str] = Field(default_factory=list, description="Gates that aren't run; the report says so.")
    min_concurrency_held: float = Field(default=0.95, gt=0, le=1, description="Least share of the asked concurrency.")
    load_tolerance: float = Field(
        default=0.10, gt=0, lt=1, description="Load bytes against hit tokens times bytes per token, relative."
    )
    right_kv_factor: float = Field(
        default=3,
        ge=1,
        description="right-kv: a hit may be this many times as far from its cold pass (log probability) as the "
        "farthest hit of the block's prefix-cache.",
    )
    right_kv_floor: float = Field(
        default=0.07,
        gt=0,
        description="right-kv: how far a hit may be in any case; where prefix-cache answers to the bit as its cold "
        "pass, its own spread is 0. On the cpu stack right hits were 0.05 off at most, wrong ones 0.11 and more.",
    )
    right_kv_control: float = Field(
        default=0.2,
        gt=0,
        description="right-kv: how far hits of prefix-cache may be from its own cold pass and still be a measure.",
    )
    roofline_tolerance: float = Field(
        default=0.05, ge=0, lt=1, description="How far a claimed rate may lie above its link's roofline, relative."
    )

    @field_validator("advisory", "off")
    @classmethod
    def _known(cls, names: list[str]) -> list[str]:
        for name in names:
            if name not in registry.kinds("gates"):
                raise ValueError(f"unknown gate {name!r}; gates are: {', '.join(registry.kinds('gates'))}")
            if name == "raw-files-intact":
                raise ValueError("raw-files-intact always decides: nothing can be said of files that were changed")
        return names


class RightKvConfig(Strict):
    """Prompts that are sent once more after all workloads, to compare a hit's log probabilities with computing them.

    They change nothing that was measured, so they don't belong to what defines a trial.
    """

    prompts: int = Field(
        default=8, ge=8, description="Prompts, one after the other; on fewer than 8 chance decides too much."
    )
    prompt_tokens: int | None = Field(
        default=None,
        ge=1,
        description="Length of each prompt in tokens; unset: 521, two chunks of 256 and a tail of 9, so that setups "
        "which hit in units of 16, 128 or 256 tokens load the same and compute the same; less where `engine` allows "
        "no more.",
    )
    output_tokens: int = Field(
        default=2,
        ge=1,
        description="Tokens generated by each request. The first is compared; with one more, engines that note a "
        "finished block a step late have stored it.",
    )
    top: int = Field(
        default=20, ge=5, le=20, description="Log probabilities compared: those of the most probable tokens."
    )


class TimelineConfig(_Finite):
    """Captures for timelines: a cold pass, the first hit and one later hit of each workload, under a profiler, on
    servers of their own."""

    workloads: list[Name] = Field(min_length=1, description="Workloads to capture, by name.")
    setups: list[Name] | None = Field(default=None, description="Setups to capture; unset: all.")
    profiler: Literal["auto", "nsys", "torch"] = Field(
        default="auto",
        description="nsys: Nsight Systems, every process on the GPU. torch: torch's profiler in the engine's workers. "
        "auto: nsys where it is found on a machine with a GPU, else torch.",
    )
    deadline_s: float = Field(default=60, gt=0, description="Longest wait for a profiler to write its file.")


class ExperimentConfig(_Finite):
    """A whole config file."""

    experiment: Name = Field(description="Name of the experiment: folder under results/ and name of the report.")
    title: str | None = Field(default=None, description="Heading of the report.")
    stack: Name = Field(description="Folder under envs/ whose packages the servers run from.")
    seed: int = Field(default=0, ge=0, description="Seed of prompts and of the order of trials.")
    repeats: int = Field(default=3, ge=1, le=1000, description="Blocks: in each, every setup runs every suite once.")
    baseline: Name = Field(default="plain", description="Setup that ratios are taken against.")
    start: Literal["separate", "folded"] = Field(
        default="separate",
        description="separate: each setup is brought up once before anything is measured. folded: its first trial is.",
    )
    budget_s: float | None = Field(
        default=None, gt=0, description="No trial starts that can't finish in this many seconds."
    )
    host_slots: int = Field(
        default=1, ge=1, description="Trials that may share this machine; 1 for numbers that count."
    )
    model: ModelConfig = Field(description="What every setup serves.")
    engine: EngineConfig = Field(description="Settings that are equal in every setup.")
    setups: dict[Name, Any] = Field(min_length=1, description="What is compared: name to settings, by `kind`.")
    workloads: dict[Name, Any] = Field(min_length=1, description="What is sent: name to settings, by `kind`.")
    suites: dict[Name, list[Name]] | None = Field(
        default=None, description="Workloads that share one server lifetime, in order; unset: each is its own suite."
    )
    load: LoadConfig = Field(default_factory=LoadConfig, description="The client.")
    gates: GateConfig = Field(default_factory=GateConfig, description="Validity checks.")
    right_kv: RightKvConfig | None = Field(
        default_factory=RightKvConfig,
        description="Passes after the timed ones that show whether loaded KV is the right KV, in setups with a tier; "
        "null: none.",
    )
    probe_interval_s: float = Field(default=0.5, gt=0, description="Distance of host and device samples.")
    compare_with: str | None = Field(
        default=None,
        description="Published table that the report shows beside what was measured here: `vllm-offload-bench`.",
    )
    timelines: TimelineConfig | None = Field(
        default=None, description="What `snakemake timelines` captures; unset: nothing. No part of any trial."
    )

    @field_validator("experiment")
    @classmethod
    def _not_reserved(cls, name: str) -> str:
        if name == "published":
            raise ValueError("'published' is the folder of published results: take another name")
        return name

    @field_validator("compare_with")
    @classmethod
    def _published(cls, name: str | None) -> str | None:
        if name is not None and name not in REFERENCES:
            raise ValueError(f"no published table {name!r}; there is: {', '.join(REFERENCES)}")
        return name

    @field_validator("setups", "workloads", mode="before")
    @classmethod
    def _by_kind(cls, value: Any, info: Any) -> Any:
        if not isinstance(value, dict):
            raise ValueError("expected a mapping of names to settings")
        # Missing where the engine's own settings are wrong, which is said then.
        engine, model = info.data.get("engine"), info.data.get("model")
        pool = engine.pool_bytes(model) if engine is not None and model is not None else None
        return {name: _entry(info.field_name, name, entry, {POOL_BYTES: pool}) for name, entry in value.items()}

    @model_validator(mode="after")
    def _fits(self) -> ExperimentConfig:
        if self.engine.kv_pool_bytes is None and self.engine.kv_pool_blocks is None:
            raise ValueError(
                "engine: set kv_pool_bytes or kv_pool_blocks: a pool taken from free memory isn't equal over setups"
            )
        for name, workload in self.workloads.items():
            if workload.longest_prompt() > self.engine.max_model_len:
                raise ValueError(
                    f"workloads.{name}: prompt and output are {workload.longest_prompt()} tokens, "
                    f"engine.max_model_len is {self.engine.max_model_len}"
                )
            self._pool_holds(name, workload.longest_prompt())
            self._tier_has_one_size(name, workload.sized_by)
        if RIGHT_KV in self.workloads:
            raise ValueError(f"workloads.{RIGHT_KV}: the name is taken by the passes of `right_kv`: use another")
        self._right_kv_fits()
        for suite, names in self.suite_map().items():
            for name in names:
                if name not in self.workloads:
                    raise ValueError(
                        f"suites.{suite}: unknown workload {name!r}; workloads are: {', '.join(self.workloads)}"
                    )
            if not names or len(set(names)) != len(names):
                raise ValueError(f"suites.{suite}: name each workload once, at least one")
        self._timelines_fit()
        if self.baseline not in self.setups:
            raise ValueError(f"baseline: {self.baseline!r} is no setup; setups are: {', '.join(self.setups)}")
        return self

    def _timelines_fit(self) -> None:
        if self.timelines is None:
            return
        for key, names, known in (
            ("workloads", self.timelines.workloads, self.workloads),
            ("setups", self.timelines.setups or [], self.setups),
        ):
            for name in names:
                if name not in known:
                    raise ValueError(f"timelines.{key}: unknown {name!r}; {key} are: {', '.join(known)}")
        several = [name for name in self.timelines.workloads if self.workloads[name].engines > 1]
        if several:
            raise ValueError(f"timelines.workloads: {several[0]!r} needs several engines; captures have one")

    def _pool_holds(self, name: str, tokens: int) -> None:
        """A prompt that the device pool can't hold would wait in the scheduler for ever."""
        pool = self.pool_tokens()
        if pool is not None and tokens > pool:
            raise ValueError(
                f"workloads.{name}: one request needs {tokens} tokens of KV, the pool holds {pool}: "
                "raise engine.kv_pool_*"
            )

    def _tier_has_one_size(self, name: str, tiers: Collection[str]) -> None:
        """Every setup gets the same prompts, so how many there are can't follow from a tier that setups differ in."""
        if "cpu" in tiers and len(self.host_tier_bytes()) != 1:
            sizes = ", ".join(f"{size} B" for size in sorted(self.host_tier_bytes())) or "none"
            raise ValueError(
                f"workloads.{name}: a multiple of the tier in host memory needs one size of it in all setups that "
                f"have it, so that every setup gets the same prompts; there are: {sizes}"
            )

    def _right_kv_fits(self) -> None:
        if self.right_kv is None:
            return
        most = min(self.engine.max_model_len, self.pool_tokens() or self.engine.max_model_len) - 1
        if self.right_kv.output_tokens > most:
            # Refused by the engine when everything else is measured.
            raise ValueError(
                f"right_kv.output_tokens: {self.right_kv.output_tokens}, at most {most}: engine.max_model_len and the "
                "device pool must hold prompt and output"
            )
        asked, room = self.right_kv.prompt_tokens, self._right_kv_room(self.right_kv)
        if asked is not None and asked > room:
            raise ValueError(
                f"right_kv.prompt_tokens: {asked}, at most {room}: engine.max_model_len must hold "
                "prompt and output, the device pool all prompts and one more"
            )

    def _right_kv_room(self, right_kv: RightKvConfig) -> int:
        """Longest prompt of `right_kv`: one has to fit into the model's length, all of them into the device pool.

        The prefix cache is what hits are measured against, and it holds nothing that the pool has no room for.
        """
        room, pool = self.engine.max_model_len, self.pool_tokens()
        if pool is not None:
            block = self.engine.block_size or 1
            room = min(room, pool // (right_kv.prompts + 1) // block * block)
        return max(room - right_kv.output_tokens, 1)

    def right_kv_tokens(self) -> int:
        """Length of the prompts of `right_kv`, which is set: as configured, else up to 512 tokens in whole chunks and
        a tail of 9 that is computed in every setup."""
        assert self.right_kv is not None  # noqa: S101 (asked only where it is set)
        if self.right_kv.prompt_tokens is not None:
            return self.right_kv.prompt_tokens
        room = self._right_kv_room(self.right_kv)
        for chunk in RIGHT_KV_CHUNKS:
            chunks = min((room - RIGHT_KV_TAIL) // chunk, RIGHT_KV_TOKENS // chunk)
            if chunks > 0:
                return chunks * chunk + RIGHT_KV_TAIL
        return room

    def short_prompts(self) -> list[str]:
        """In words, which workloads are too short for which setups ever to hit: known before anything is measured.

        Nothing of an engine that takes longer blocks than `engine.block_size` says, as hybrid models make it.
        """
        block = self.engine.block_size or 1
        found = []
        for name, workload in self.workloads.items():
            longest = workload.longest_prompt() - workload.output_tokens
            for setup, settings in self.setups.items():
                if settings.tier is not None and not settings.expected_hit(longest, block):
                    unit = settings.granularity(block)
                    found.append(
                        f"workloads.{name}: its prompts have {longest} tokens at most and {setup} hits in units of "
                        f"{unit}: nothing will be hit, and its tier can't be checked"
                    )
        return found

    def pool_tokens(self) -> int | None:
        """Device pool in tokens as far as the config says; None where only the engine knows."""
        if self.engine.kv_pool_blocks is not None:
            return None if self.engine.block_size is None else self.engine.kv_pool_blocks * self.engine.block_size
        per_token, pool = self.kv_bytes_per_token(), self.engine.pool_bytes(self.model)
        return None if per_token is None or pool is None else pool // per_token

    def host_tier_bytes(self) -> set[int]:
        """Sizes of the tiers in host memory of all setups that have one; a pool that follows from it needs just one."""
        return {size for setup in self.setups.values() if (size := setup.capacity_bytes().get("cpu")) is not None}

    def kv_bytes_per_token(self) -> int | None:
        """Bytes of KV that one token takes on one rank group, from the model's shape; None where it can't be known."""
        return None if self.model.shape is None else kv_bytes_per_token(self.model.shape, self.model.dtype)

    def timeline_setups(self) -> list[str]:
        """Setups that `timelines` captures; empty where it is unset."""
        if self.timelines is None:
            return []
        return list(self.timelines.setups if self.timelines.setups is not None else self.setups)

    def engines(self, suite: str | None = None) -> int:
        """Engines of one setup that a suite's workloads need at once; the most of all suites where none is given."""
        names = self.workloads if suite is None else self.suite_map()[suite]
        return max(int(self.workloads[name].engines) for name in names)

    def suite_map(self) -> dict[str, list[str]]:
        """Suites with the default filled in: each workload its own suite."""
        return self.suites if self.suites is not None else {name: [name] for name in self.workloads}


def kv_bytes_per_token(shape: dict[str, Any], dtype: str) -> int | None:
    """Bytes of K and V for one token over all layers, from a model's config.json; None where the keys aren't there.

    Multimodal models keep the language model's sizes in ``text_config``; GPT-2 style names are understood. A missing
    size is never replaced by a default.
    """
    text = shape.get("text_config", shape)
    if not isinstance(text, dict):
        return None

    def size(*names: str) -> int | None:
        value = next((text[name] for name in names if text.get(name) is not None), None)
        return value if isinstance(value, int) and value > 0 else None

    layers, heads = size("num_hidden_layers", "n_layer"), size("num_attention_heads", "n_head")
    kv_heads = size("num_key_value_heads") if text.get("num_key_value_heads") is not None else heads
    hidden = size("hidden_size", "n_embd")
    head_dim = size("head_dim") or (hidden // heads if hidden and heads else None)
    if not (layers and kv_heads and head_dim):
        return None
    return int(2 * layers * kv_heads * head_dim * (4 if dtype == "float32" else 2))


def _entry(family: Literal["setups", "workloads"], name: str, entry: Any, context: dict[str, Any]) -> Any:
    if not isinstance(entry, dict) or "kind" not in entry:
        raise ValueError(f"{family}.{name}: needs a `kind`, one of: {', '.join(registry.kinds(family))}")
    try:
        return registry.load(family, str(entry["kind"])).CONFIG.model_validate(entry, context=context)
    except ValidationError as error:
        raise ValueError("; ".join(problems(error, f"{family}.{name}."))) from None
    except ValueError as error:
        raise ValueError(f"{family}.{name}: {error}") from None


def validate(data: dict[str, Any]) -> ExperimentConfig:
    """Validate a loaded config.

    Raises ConfigError whose message has one line a problem: key, what is wrong, the value.
    """
    try:
        return ExperimentConfig.model_validate(data)
    except ValidationError as error:
        raise ConfigError("\n".join(problems(error))) from None


@dataclass(frozen=True, slots=True)
class Trial:
    """One planned trial: ``order`` is its place in the seeded, blocked interleaving."""

    setup: str
    suite: str
    repeat: int
    run: str
    order: int

    @property
    def folder(self) -> Path:
        """Path below ``results/<experiment>``."""
        return Path("trials", self.setup, self.suite, f"r{self.repeat}-{self.run}")


def effective(config: ExperimentConfig, setup: str, suite: str) -> dict[str, Any]:
    """All that defines a trial of this setup and suite, with defaults filled in, and what was checked after it."""
    right_kv = None
    if config.right_kv is not None:
        right_kv = config.right_kv.model_dump(mode="json") | {"prompt_tokens": config.right_kv_tokens()}
    return _definition(config, setup, suite, exclude_defaults=False) | {"right_kv": right_kv}


def _definition(config: ExperimentConfig, setup: str, suite: str, *, exclude_defaults: bool) -> dict[str, Any]:
    def dump(part: Strict) -> dict[str, Any]:
        return part.model_dump(mode="json", by_alias=True, exclude_defaults=exclude_defaults)

    return {
        "stack": config.stack,
        "seed": config.seed,
        "model": dump(config.model),
        "engine": dump(config.engine),
        "setup": dump(config.setups[setup]),
        "workloads": {name: dump(config.workloads[name]) for name in config.suite_map()[suite]},
        "load": dump(config.load),
    }


def run_id(config: ExperimentConfig, setup: str, suite: str) -> str:
    """Eight hex digits: the hash of what defines a trial. Equal config, equal run; anything else is kept apart.

    Defaults are left out, so that a later version's new key doesn't disown what was measured before it; so is the
    setup's title, which only the report shows.
    """
    definition = _definition(config, setup, suite, exclude_defaults=True)
    definition["setup"].pop("title", None)
    return _hash(definition)


def plan(config: ExperimentConfig) -> list[Trial]:
    """Every trial, in order: blocks (repeats) one after the other, setups shuffled inside each by the seed.

    The order inside block k depends on seed and k alone, so one more repeat changes nothing before it.
    """
    trials: list[Trial] = []
    for repeat in range(config.repeats):
        cells = [(setup, suite) for suite in config.suite_map() for setup in config.setups]
        random.Random(f"{config.seed}:{repeat}").shuffle(cells)  # noqa: S311 (an order, no secret)
        for setup, suite in cells:
            trials.append(Trial(setup, suite, repeat, run_id(config, setup, suite), len(trials)))
    return trials


def start_id(config: ExperimentConfig, setup: str, *content: str) -> str:
    """Eight hex digits: the hash of all that defines how a setup is brought up; ``content`` are hashes of code."""
    dump = config.model_dump(mode="json", by_alias=True, include={"stack", "model", "engine"})
    several = [config.engines()] if config.engines() > 1 else []
    return _hash([dump, config.setups[setup].model_dump(mode="json"), *content, *several])


def model_id(config: ExperimentConfig) -> str:
    """Eight hex digits that name the model's folder."""
    return _hash(config.model.model_dump(mode="json"))


def block_id(trials: list[Trial]) -> str:
    """Eight hex digits: the hash of a block's trials, in any order."""
    return _hash(sorted([trial.setup, trial.suite, trial.run] for trial in trials))


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, ensure_ascii=False).encode()).hexdigest()[:8]
