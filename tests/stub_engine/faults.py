"""The stand-ins' switches, FOR TESTS ONLY: what goes wrong, and from which request on.

``KVLADDER_STUB_FAULT`` holds names of `FAULTS`, separated by commas. ``name`` alone begins where the fault says,
``name:7`` at request 7 (counted from 1, the two of the warm-up included), ``name:%100`` strikes each hundredth.
"""

from __future__ import annotations

import mmap
import os
import sys
from pathlib import Path

FAULTS = {
    "crash-at-start": "ends with a traceback before it listens",
    "crash-mid-pass": "ends in the middle of a request (5)",
    "hang-at-stop": "ignores SIGTERM and SIGINT",
    "tier-ignored": "takes the connector's configuration and stores nothing",
    "key-ignored": "runs the connector with a default in place of the capacity that was asked for",
    "prefix-caching-ignored": "runs with the prefix cache on, whatever was asked for",
    "pool-differs": "makes a device pool of half the size",
    "warm-in-cold": "claims hits for prompts it has never seen",
    "wrong-kv": "gives another prompt's log probabilities at every hit",
    "wrong-kv-at-first-hit": "does so when a prompt is hit for the first time, and not later",
    "tier-not-cleared": "keeps its tier on disk in the folder KVLADDER_STUB_TIER, not in the one it was given",
    "disk-full": "the disk of its tier is full from block n (1) on",
    "reset-does-nothing": "answers a reset with success and keeps everything",
    "reset-refused": "answers a reset with 200 and success: false",
    "role-chunk": "sends a chunk without a token before it computes anything",
    "no-text": "sends the whole stream without any token (3)",
    "short-output": "stops after half of the output tokens, and says so in its usage (3)",
    "cut-stream": "closes the connection after half of the output tokens (3)",
    "stall": "sends headers and then nothing (3)",
    "http-500": "answers 500 (3)",
    "preemptions": "counts a preemption a request (3)",
    "counters-absent": "has no token counters on its /metrics page",
    "counters-reset": "begins all counters again from 0 (5)",
    "client-frozen": "stops the client's process for a third of a second, as a host without a core to spare does (5)",
    "no-compiled-code": "runs without the file that stands for compiled code",
    "side-process-dies": "of a side process: ends at the n-th (3) store",
    "hash-seed-differs": "of a side process: hashes with a seed of its own",
    "pool-not-shared": "of a side process: gives each engine only what it stored itself",
}


class Faults:
    """Which faults are asked for, and at which request they begin. Ends the process for a name it doesn't know."""

    def __init__(self, text: str) -> None:
        self._when: dict[str, str] = {}
        for entry in filter(None, text.split(",")):
            name, _, when = entry.partition(":")
            if name not in FAULTS:
                sys.exit(f"unknown fault {name!r}; faults are: {', '.join(FAULTS)}")
            self._when[name] = when

    @classmethod
    def asked(cls) -> Faults:
        """Those of the environment."""
        return cls(os.environ.get("KVLADDER_STUB_FAULT", ""))

    def __contains__(self, name: str) -> bool:
        return name in self._when

    def hits(self, name: str, request: int, default: int = 3) -> bool:
        """Whether it applies to this request, counted from 1."""
        when = self._when.get(name)
        if when is None:
            return False
        return request % int(when[1:]) == 0 if when.startswith("%") else request >= int(when or default)

    def at(self, name: str, request: int, default: int) -> bool:
        """Whether this is the request at which something happens once."""
        return name in self._when and request == int(self._when[name] or default)


def map_as_compiled(program: str, faults: Faults) -> mmap.mmap | None:
    """Map a program's own text: Python doesn't, so that a mapped one can stand for a compiled extension."""
    if "no-compiled-code" in faults:
        return None
    with Path(program).open("rb") as file:
        return mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
