"""A server with any bad habit: it may start slowly, crash, hang, fork away or leave files behind."""

from __future__ import annotations

import argparse
import http.server
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("--port", type=int, required=True)
parser.add_argument("--delay", type=float, default=0.0, help="seconds until it listens")
parser.add_argument("--loading", type=float, default=0.0, help="seconds of 503 once it listens")
parser.add_argument("--crash-at-start", help="log this engine's death and exit")
parser.add_argument("--crash-after", type=float, help="die with a KeyError so many seconds after it's ready")
parser.add_argument("--ignore-term", action="store_true")
parser.add_argument("--children", default="", help="comma list of: same (session), away (setsid, parent exits), deaf")
parser.add_argument("--shm", default="", help="file to make in /dev/shm and to keep mapped")
parser.add_argument("--key", help="bearer key that is asked for")
parser.add_argument("--say", default="", help="text for the log")
parser.add_argument("--pids", type=Path, help="file to append the pids of all processes to")
args = parser.parse_args()


def note(pid: int) -> None:
    if args.pids:
        with args.pids.open("a") as stream:
            stream.write(f"{pid}\n")


CHILD = """
import os, signal, sys, time
if 'deaf' in sys.argv[1] or 'away' in sys.argv[1]:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if 'away' in sys.argv[1]:
    if os.fork():
        os._exit(0)
    os.setsid()
if sys.argv[2]:
    open(sys.argv[2], 'a').write(f'{os.getpid()}\\n')
time.sleep(600)
"""

note(os.getpid())
if args.say:
    print(args.say, flush=True)
if args.ignore_term:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if args.crash_at_start:
    print(Path(args.crash_at_start).read_text(), file=sys.stderr, flush=True)
    time.sleep(args.delay)
    sys.exit(1)
if args.shm:
    import mmap

    descriptor = os.open(f"/dev/shm/{args.shm}", os.O_CREAT | os.O_RDWR, 0o600)
    os.ftruncate(descriptor, 4096)
    segment = mmap.mmap(descriptor, 4096)
    os.close(descriptor)
for kind in filter(None, args.children.split(",")):
    child = subprocess.Popen([sys.executable, "-S", "-c", CHILD, kind, str(args.pids or "")])
    if "away" in kind:
        child.wait()
time.sleep(args.delay)
ready_at = time.monotonic() + args.loading


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        status = 200 if time.monotonic() >= ready_at else 503
        if args.key and self.headers.get("Authorization") != f"Bearer {args.key}":
            status = 401
        body = json.dumps({"data": [{"id": "model-a"}]}).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


server = http.server.ThreadingHTTPServer(("127.0.0.1", args.port), Handler)
if args.crash_after is not None:

    def crash() -> None:
        time.sleep(args.crash_after)
        try:
            {}["cmpl-17"]
        except KeyError:
            import traceback

            for line in traceback.format_exc().splitlines():
                print(f"(EngineCore pid={os.getpid()}) ERROR 11-29 16:35:01 [core.py:840] {line}", flush=True)
        os._exit(1)

    threading.Thread(target=crash, daemon=True).start()
server.serve_forever()
