"""When a server is ready: it answers, and the one who answers is ours."""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from kvladder.serving import procfs

_POLL_TIMEOUT_S = 2.0


class StrangerOnPort(Exception):
    """The port is served by a process outside the server's own tree."""


@dataclass(frozen=True)
class Readiness:
    """How to see that a process is ready.

    With ``http_path``: a GET on ``http://host:port`` + path answers 200, and ``check`` (given the parsed JSON body)
    says True. Without: the process listens on the port; nothing connects, so a binary protocol sees no odd client.
    ``key`` goes along as a bearer token. ``deadline_s`` counts from the process's start. ``host`` is an IPv4 address.
    """

    port: int
    http_path: str | None = None
    key: str | None = None
    check: Callable[[Any], bool] | None = None
    deadline_s: float = 600.0
    host: str = "127.0.0.1"

    def __repr__(self) -> str:
        return f"Readiness(port={self.port}, http_path={self.http_path!r}, deadline_s={self.deadline_s})"


def serves(ready: Readiness, tree: Collection[int]) -> bool:
    """Say whether a process of ``tree`` listens on the port; raises StrangerOnPort when another one does."""
    found = procfs.listeners(ready.port, ready.host)
    if not found:
        return False
    own = {inode for pid in tree for inode in procfs.sockets(pid)}
    strange = {listener.inode for listener in found} - own
    if not strange:
        return True
    # A closed listener may linger in the table for a moment: only one that is still there counts.
    if strange & {listener.inode for listener in procfs.listeners(ready.port, ready.host)}:
        owner = procfs.describe_owner(strange)
        raise StrangerOnPort(f"port {ready.port} is served by another process ({owner})")
    return False


def answer(ready: Readiness) -> str | None:
    """Ask once; return None when the answer is the right one, else what was wrong with it.

    A plain socket to a loopback port: no proxy variable is ever looked at.
    """
    if ready.http_path is None:
        return None
    headers = {"Authorization": f"Bearer {ready.key}"} if ready.key else {}
    connection = http.client.HTTPConnection(ready.host, ready.port, timeout=_POLL_TIMEOUT_S)
    try:
        connection.request("GET", ready.http_path, headers=headers)
        response = connection.getresponse()
        body = response.read()
    except (OSError, http.client.HTTPException) as error:
        return f"GET {ready.http_path} failed: {error or type(error).__name__}"
    finally:
        connection.close()
    if response.status != http.client.OK:
        return f"GET {ready.http_path} answered {response.status}"
    if ready.check is None:
        return None
    try:
        accepted = ready.check(json.loads(body))
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        return f"GET {ready.http_path} answered something unexpected: {type(error).__name__}: {error}"
    return None if accepted else f"GET {ready.http_path} answered, but not what a ready server answers"
