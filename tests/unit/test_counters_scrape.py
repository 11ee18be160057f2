"""Scraping: real sockets, no proxy, an end to every wait."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from kvladder.counters.scrape import fetch, scrape

PAGE = b"vllm:prompt_tokens_total 5\n"


@contextmanager
def server(*parts: bytes, pause_s: float = 0.0) -> Iterator[str]:
    """A listener that answers every connection with these parts, `pause_s` apart, and closes."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                peer, _ = listener.accept()
            except OSError:
                return
            with peer:
                peer.recv(65536)
                try:
                    for part in parts:
                        peer.sendall(part)
                        time.sleep(pause_s)
                except OSError:
                    pass

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/metrics"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(5)


def response(body: bytes, status: str = "200 OK", length: int | None = None) -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body) if length is None else length}\r\n\r\n".encode() + body


def test_a_snapshot_has_a_page_or_none_for_every_server() -> None:
    with server(response(PAGE)) as url, server(response(b"", "503 Busy")) as busy:
        snapshot = scrape({"engine": url, "lmcache": busy, "gone": "http://127.0.0.1:9/metrics"}, "ready", 2.0)
    assert snapshot.mark == "ready"
    assert snapshot.pages == {"engine": PAGE.decode(), "lmcache": None, "gone": None}


@pytest.mark.parametrize("variable", ["http_proxy", "HTTP_PROXY", "all_proxy"])
def test_proxies_are_ignored(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv(variable, "http://127.0.0.1:9")
    with server(response(PAGE)) as url:
        assert fetch(url, 2.0) == PAGE.decode()


def test_half_a_page_is_no_page() -> None:
    with server(response(PAGE, length=1000)) as url:
        assert fetch(url, 2.0) is None


def test_a_page_that_drips_ends_at_the_deadline() -> None:
    with server(response(PAGE, length=10**6), *[b"x"] * 100, pause_s=0.1) as url:
        begin = time.monotonic()
        assert fetch(url, 0.5) is None
        assert time.monotonic() - begin < 5


def test_bytes_that_are_no_text_do_not_raise() -> None:
    with server(response(b"a_total 1\n\xff\xfe\n")) as url:
        assert fetch(url, 2.0) is not None


@pytest.mark.parametrize("url", ["http://192.0.2.1/metrics", "https://127.0.0.1/metrics", "http://example.org/"])
def test_only_loopback_is_asked(url: str) -> None:
    with pytest.raises(ValueError, match="loopback"):
        fetch(url, 0.1)
