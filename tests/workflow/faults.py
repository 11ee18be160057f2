"""Everything that the fault matrix injects, and what the user then sees: the tests' data, and the README's table.

``python tests/workflow/faults.py`` writes the table into the README; a test fails while it differs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

README = Path(__file__).resolve().parents[2] / "README.md"
BEGIN, END = "<!-- faults:begin -->\n", "<!-- faults:end -->\n"

Setup = dict[str, Any]

PLAIN: Setup = {"kind": "plain"}
PREFIX_CACHE: Setup = {"kind": "prefix-cache"}
NATIVE: Setup = {"kind": "native", "cpu_bytes": "64MiB"}
NATIVE_FILES: Setup = {**NATIVE, "files": {"first_hit": "files"}}
SIMPLE_CPU: Setup = {"kind": "simple-cpu", "cpu_bytes": "64MiB"}
LMCACHE: Setup = {"kind": "lmcache-mp", "cpu_bytes": "64MiB"}
MOONCAKE: Setup = {"kind": "mooncake-store", "segment_bytes": "64MiB", "buffer_bytes": "1MiB"}

OLDER = {"KVLADDER_STUB_VERSION": "0.26.0"}

HEALTHY = {
    "plain": PLAIN,
    "prefix-cache": PREFIX_CACHE,
    "native": NATIVE,
    "native-files": NATIVE_FILES,
    "simple-cpu": SIMPLE_CPU,
    "lmcache-mp": LMCACHE,
    "mooncake-store": MOONCAKE,
    "native-files-0.26": {**NATIVE_FILES, "env": OLDER},
    "simple-cpu-0.26": {**SIMPLE_CPU, "env": OLDER},
    "lmcache-mp-0.26": {**LMCACHE, "env": OLDER},
    "mooncake-store-0.26": {**MOONCAKE, "env": OLDER},
}
"""Twins without a fault, measured in the same run: they end valid, whichever version's counters they are read from."""


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong, and how it is seen.

    ``what`` and ``words`` are the README's; ``words`` are found, in this order, in the trial's reason, in the finding
    of its ``advisory`` gate, or in the message of a run that is ``refused``. ``setup`` and ``switch`` say how a
    stand-in engine is made to do it (``tests/stub_engine/faults.py``); without a switch a test of its own injects it.
    """

    name: str
    what: str
    status: Literal["valid", "invalid", "failed", "refused"]
    words: tuple[str, ...] = ()
    switch: str | None = None
    setup: Setup = field(default_factory=lambda: PLAIN)
    advisory: str | None = None
    note: str = ""

    @property
    def row(self) -> str:
        """Its line in the README's table."""
        seen = " … ".join(f"`{words}`" for words in self.words) or self.note
        where = f", with the advisory {self.advisory}" if self.advisory is not None else ""
        return f"| {self.what} | **{self.status}**{where}: {seen} |"

    def served(self) -> Setup:
        """The setup whose engine does it."""
        return {**self.setup, "env": {"KVLADDER_STUB_FAULT": self.switch}}


FAULTS = [
    # What the tier does, against what is said of it.
    Fault(
        "tier-ignored",
        "a tier that takes its configuration and stores nothing",
        "invalid",
        ("hits-as-predicted", "cpu 6400 hit; seen: first-hit 1: none hit", "tier-was-used"),
        "tier-ignored",
        NATIVE,
    ),
    Fault(
        "config-key-ignored",
        "a key of the connector that the engine ignores",
        "invalid",
        ("config-readback", "cpu_bytes_to_use 67108864; seen: connector key cpu_bytes_to_use 1073741824"),
        "key-ignored",
        NATIVE,
    ),
    Fault(
        "prefix-caching-ignored",
        "a prefix cache that is on although it was switched off",
        "invalid",
        ("config-readback", "prefix_caching off; seen: prefix_caching on"),
        "prefix-caching-ignored",
    ),
    Fault(
        "wrong-kv",
        "a tier that gives back another prompt's KV",
        "invalid",
        ("right-kv", "first hits: 8 of 8 prompts beyond"),
        "wrong-kv",
        NATIVE,
    ),
    Fault(
        "wrong-kv-at-first-hit",
        "a tier that is wrong at the first hit only",
        "invalid",
        ("right-kv", "first hits: 8 of 8 prompts beyond"),
        "wrong-kv-at-first-hit",
        LMCACHE,
    ),
    Fault(
        "hash-seed-differs",
        "hash seeds that differ between engine and side process",
        "invalid",
        ("hits-as-predicted", "cpu 6400 hit; seen: first-hit 1: none hit", "tier-was-used"),
        "hash-seed-differs",
        LMCACHE,
    ),
    Fault(
        "pool-not-shared",
        "a pool of two engines in which neither finds what the other stored",
        "invalid",
        ("hits-as-predicted (sharing)", "cpu 1536 hit; seen: first-hit 1: none hit", "tier-was-used"),
        "pool-not-shared",
        LMCACHE,
    ),
    Fault(
        "tier-disk-full",
        "a disk that fills up below the tier on disk",
        "invalid",
        ("hits-as-predicted", "nvme 6400 hit; seen: first-hit 1: nvme 2176 hit", "tier-was-used"),
        "disk-full:20",
        NATIVE_FILES,
    ),
    Fault(
        "results-disk-full",
        "the same, on the disk of the results",
        "failed",
        ("the disk is full: No space left on device",),
    ),
    # A cold pass that isn't cold.
    Fault(
        "tier-not-cleared",
        "a warm cold pass: a tier on disk that still holds an earlier run's prompts",
        "invalid",
        ("cold-is-cold", "0 tokens hit in any tier; seen: nvme 6400"),
        "tier-not-cleared",
        NATIVE_FILES,
    ),
    Fault(
        "equal-prompts",
        "a warm cold pass: prompts that are equal",
        "invalid",
        ("cold-is-cold", "0 tokens hit in any tier; seen: cpu 6144"),
    ),
    Fault(
        "shared-seed",
        "a warm cold pass: two workloads that draw from one seed",
        "invalid",
        ("cold-is-cold", "0 tokens hit in any tier; seen: cpu 6400"),
    ),
    Fault(
        "hits-claimed",
        "hits claimed for prompts that were never sent",
        "invalid",
        ("cold-is-cold", "0 tokens hit in any tier; seen: cpu 6400"),
        "warm-in-cold",
        NATIVE,
    ),
    Fault(
        "reset-does-nothing",
        "a reset that answers 200 and clears nothing",
        "invalid",
        ("gpu-cache-as-configured", "no hit on the device; seen: first-hit 1: gpu 6400"),
        "reset-does-nothing",
        SIMPLE_CPU,
    ),
    Fault(
        "reset-refused",
        "a reset that answers 200 with `success: false`",
        "failed",
        ("reset before first-hit refused: 200 b'{\"success\": false}'",),
        "reset-refused",
        SIMPLE_CPU,
    ),
    # Streams.
    Fault(
        "role-chunk",
        "a first chunk that carries a role and no token",
        "valid",
        (),
        "role-chunk",
        note="TTFT counts up to the first token",
    ),
    Fault(
        "no-text",
        "a stream without any token, one in a hundred",
        "invalid",
        ("all-completed", "0 of 4 tokens"),
        "no-text:%100",
    ),
    Fault(
        "short-output",
        "fewer tokens than asked for, in one stream of a hundred",
        "invalid",
        ("all-completed", "2 of 4 tokens"),
        "short-output:%100",
    ),
    Fault("cut-stream", "streams that all break off", "failed", ("no request", "2 of 4 tokens"), "cut-stream"),
    Fault(
        "stall",
        "a stream that stalls, one in a hundred",
        "invalid",
        ("all-completed", "no byte for 1.5 s"),
        "stall:%100",
    ),
    Fault(
        "http-500-one-percent",
        "HTTP 500 for 1 % of the requests",
        "invalid",
        ("all-completed", "HTTP 500"),
        "http-500:%100",
    ),
    Fault("http-500-always", "HTTP 500 for all of them", "failed", ("warm-up request failed: HTTP 500",), "http-500:1"),
    # Processes.
    Fault(
        "engine-death",
        "an engine that dies in the middle of a pass",
        "failed",
        ("engine: RuntimeError: stand-in: asked to crash in the middle of a pass",),
        "crash-mid-pass:20",
        NATIVE,
    ),
    Fault(
        "engine-death-at-start",
        "an engine that can't start",
        "failed",
        ("engine: ValueError: stand-in: asked to crash at start",),
        "crash-at-start",
    ),
    Fault(
        "engine-hangs-at-stop",
        "an engine that ignores being asked to stop",
        "valid",
        (),
        "hang-at-stop",
        note="it is killed after `engine.stop_s`, and nothing of it stays",
    ),
    Fault(
        "lmcache-death",
        "LMCache's server dies in the middle of a pass",
        "failed",
        ("lmcache: MemoryError: stand-in: asked to die",),
        "side-process-dies:10",
        LMCACHE,
    ),
    Fault(
        "mooncake-death",
        "Mooncake's master is killed in the middle of a pass",
        "failed",
        ("mooncake: killed by SIGKILL",),
        "side-process-dies:10",
        MOONCAKE,
    ),
    Fault(
        "no-compiled-code",
        "a silent fallback to slow Python",
        "invalid",
        ("native-code-loaded", "seen: not loaded"),
        "no-compiled-code",
        LMCACHE,
    ),
    # Counters.
    Fault(
        "counters-absent",
        "token counters that aren't there",
        "invalid",
        ("cold-is-cold", "could not be checked: the engine's token counters are missing"),
        "counters-absent",
        NATIVE,
    ),
    Fault(
        "counters-reset",
        "counters that begin again in the middle of a pass",
        "invalid",
        ("counters-add-up", "first-hit 1: engine restarted inside the window"),
        "counters-reset:40",
        NATIVE,
    ),
    Fault(
        "preemptions",
        "requests that are preempted",
        "invalid",
        ("no-preemption-surprise", "0 preemptions; seen: 1 in warm 3"),
        "preemptions:%100",
        NATIVE,
    ),
    # The comparison, and the machine.
    Fault(
        "kv-pool-differs",
        "a setup whose device KV pool isn't that of its block",
        "invalid",
        ("equal-kv-pool", "32768 tokens, as most setups; seen: 16384 tokens"),
        "pool-differs",
        NATIVE,
    ),
    Fault(
        "client-overload",
        "a client that doesn't get the core it needs",
        "invalid",
        ("client-not-saturated", "first tokens and ends late by"),
        "client-frozen:20",
    ),
    Fault(
        "noisy-neighbour",
        "a neighbour that takes the CPU",
        "valid",
        ("other processes take 10% of the CPU at most",),
        advisory="quiet-host",
    ),
    # Files.
    Fault(
        "truncated-raw-file",
        "a raw file that was cut after it was written",
        "invalid",
        ("raw-files-intact", "counters.jsonl has", "was written with"),
    ),
    Fault(
        "read-only-results",
        "a results folder that can't be written",
        "refused",
        ("kvladder: results/", "can't be written: Permission denied"),
    ),
    Fault(
        "two-runs-at-once",
        "a second run in the same results folder",
        "refused",
        ("kvladder: results/", "is in use by another run"),
    ),
]


def by_name(name: str) -> Fault:
    """One of `FAULTS`."""
    return next(fault for fault in FAULTS if fault.name == name)


def table() -> str:
    """The README's table."""
    return "\n".join(["| what goes wrong | what you see |", "| --- | --- |", *(fault.row for fault in FAULTS)]) + "\n"


def in_readme(text: str) -> tuple[str, str, str]:
    """The README in three: before the table, the table, after it. Raises ValueError without the two marks."""
    before, rest = text.split(BEGIN)
    now, after = rest.split(END)
    return before + BEGIN, now, END + after


if __name__ == "__main__":
    start, _, end = in_readme(README.read_text(encoding="utf-8"))
    README.write_text(start + table() + end, encoding="utf-8")
