"""What can go wrong with servers, each with one message for the user."""

from __future__ import annotations

import signal
from pathlib import Path


class ServerFailed(Exception):
    """A server did not get ready, or died.

    ``name`` is the process's name in its group, ``reason`` one line (the log's own error line where there is one),
    ``log`` the file to look into.
    """

    def __init__(self, name: str, reason: str, log: Path) -> None:
        super().__init__(name, reason, log)
        self.name = name
        self.reason = reason
        self.log = log

    def __str__(self) -> str:
        return f"{self.name}: {self.reason} (log: {self.log})"


class Interrupted(KeyboardInterrupt):
    """SIGINT, SIGTERM or SIGHUP reached the job; ``signal`` says which.

    A KeyboardInterrupt, because event loops let only that and SystemExit out of a callback: any other exception that a
    signal handler raises there is logged by the loop and lost.
    """

    def __init__(self, number: int) -> None:
        self.signal = signal.Signals(number)
        super().__init__(f"interrupted by {self.signal.name}")


class PortInUse(Exception):
    """A port that was asked for has a listener already, or none is left to allocate."""


class LeaseTimeout(Exception):
    """The devices or the host slot stayed taken until the deadline; the message names the holders."""


class NotClean(Exception):
    """Something on the machine would spoil or block a trial; the message says what it is and what to do."""
