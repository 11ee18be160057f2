"""Answers 200 to everything on a port, as a left-over server or a proxy would; prints ``up`` and counts on stdout."""

from __future__ import annotations

import http.server
import sys


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        print("hit", self.path, flush=True)
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *_: object) -> None:
        pass


server = http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler)
print("up", flush=True)
server.serve_forever()
