"""Fetch /metrics pages from servers on this machine."""

from __future__ import annotations

import http.client
import ipaddress
import time
from collections.abc import Mapping
from urllib.parse import urlsplit

from kvladder.config.records import CounterSnapshot

_CHUNK = 1 << 16
_LARGEST = 64 << 20


def scrape(urls: Mapping[str, str], mark: str, deadline_s: float = 5.0) -> CounterSnapshot:
    """The pages of all servers at one moment, raw; a server that doesn't answer in ``deadline_s`` has None.

    Proxies are never used. Raises ValueError for a URL that isn't plain HTTP on a loopback address.
    """
    now = time.monotonic_ns()
    return CounterSnapshot(t_ns=now, mark=mark, pages={server: fetch(url, deadline_s) for server, url in urls.items()})


def fetch(url: str, deadline_s: float) -> str | None:
    """One page; None when it isn't there within ``deadline_s`` seconds, whole, and with status 200."""
    parts = urlsplit(url)
    if parts.scheme != "http" or not _loopback(parts.hostname):
        raise ValueError(f"{url}: metrics are read over http from a loopback address only")
    end = time.monotonic() + deadline_s
    # http.client knows nothing of proxy variables, unlike urllib.
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=deadline_s)
    try:
        connection.request("GET", parts.path or "/", headers={"Accept": "text/plain", "Connection": "close"})
        response = connection.getresponse()
        if response.status != http.client.OK:
            return None
        body = bytearray()
        while chunk := response.read1(_CHUNK):
            body += chunk
            left = end - time.monotonic()
            if left <= 0 or len(body) > _LARGEST:
                return None
            if connection.sock is not None:
                connection.sock.settimeout(left)
        return body.decode("utf-8", errors="replace") if not response.length else None
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()


def _loopback(host: str | None) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host or "").is_loopback
    except ValueError:
        return False
