"""A measuring job in miniature: brings up the servers of a JSON file and says on stdout what happens to it.

Usage: job.py ORDER.json {sleep|asyncio|uvloop|fork}
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from pathlib import Path

from kvladder.serving.process import Interrupted, ProcessSpec, Readiness, servers


def say(*words: object) -> None:
    print(*words, flush=True)


async def tick() -> None:
    """Keep callbacks running, so that a signal may well arrive inside one."""
    loop = asyncio.get_running_loop()

    def again() -> None:
        loop.call_later(0.001, again)

    again()


async def idle() -> None:
    say("READY")
    await asyncio.gather(*(asyncio.sleep(600) for _ in range(3)), tick())


order = json.loads(Path(sys.argv[1]).read_text())
specs = [
    ProcessSpec(
        name=item["name"],
        argv=item["argv"],
        env={},
        cwd=Path.cwd(),
        log=Path(item["log"]),
        ready=Readiness(port=item["port"], http_path="/health", deadline_s=item["deadline_s"]),
    )
    for item in order["specs"]
]
before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
code = 0
try:
    with servers(
        specs,
        order["tag"],
        caches=Path(order["caches"]),
        grace_s=order["grace_s"],
        progress=lambda line: say("PROGRESS", line),
    ) as group:
        say("SUPERVISORS", *(process._supervisor.pid for process in group))
        match sys.argv[2]:
            case "asyncio":
                asyncio.run(idle())
            case "uvloop":
                import uvloop

                uvloop.run(idle())
            case "fork":
                # A forked child keeps the pipes to the supervisors open after the job is dead.
                if os.fork() == 0:
                    time.sleep(3)
                    os._exit(0)
                say("READY")
                time.sleep(600)
            case _:
                say("READY")
                time.sleep(600)
except Interrupted as interrupt:
    say("INTERRUPTED", interrupt.signal.name)
    code = 128 + interrupt.signal
say("HANDLERS", all(signal.getsignal(number) == handler for number, handler in before.items()))
sys.exit(code)
