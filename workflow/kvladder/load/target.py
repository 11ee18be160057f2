"""Where requests go and how long anything may take."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_HEADER_VALUE = re.compile(r"[\x21-\x7e]+")


@dataclass(frozen=True, slots=True)
class Target:
    """An OpenAI-style completions endpoint, spoken to directly: proxy variables of the environment have no effect.

    ``host`` is a name or an address without a scheme; ``api_key`` is sent as a bearer token and stays out of ``repr``.
    Raises ValueError for a host, path or key that doesn't fit into an HTTP header.
    """

    host: str
    port: int
    model: str
    api_key: str | None = field(default=None, repr=False)
    path: str = "/v1/completions"

    def __post_init__(self) -> None:
        for name, value in (("host", self.host), ("path", self.path), ("api_key", self.api_key)):
            if value is not None and not _HEADER_VALUE.fullmatch(value):
                raise ValueError(f"{name} must be printable ASCII without blanks")
        if not self.path.startswith("/"):
            raise ValueError(f"path must start with '/', not {self.path!r}")
        if not 0 < self.port < 65536:
            raise ValueError(f"port must be 1-65535, not {self.port}")


@dataclass(frozen=True, slots=True)
class Limits:
    """Deadlines in seconds; no wait of the client is without one.

    ``connect_s`` bounds the opening of a connection (name resolution included), ``request_s`` a whole request from its
    first byte sent, ``stall_s`` the longest silence, from the request's first byte to the end of the stream. Any byte
    ends a silence, keep-alive comments too, for they say that the server is alive; a stream of nothing but comments
    therefore ends at ``request_s``. ``stall_s`` must be longer than the longest time to first token.
    """

    connect_s: float
    request_s: float
    stall_s: float

    def __post_init__(self) -> None:
        for name in ("connect_s", "request_s", "stall_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be a positive number of seconds, not {getattr(self, name)}")
