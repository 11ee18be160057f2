"""``rooflines/<host>.json``: what the links of one machine did at best, and which files an experiment has of them."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, model_validator

from kvladder.config.base import Record, Strict
from kvladder.config.records import HostRecord

FOLDER = "rooflines"
"""Below ``results/<experiment>``: one file a host and boot."""

OLD_FILE = "rooflines.json"
"""Where schema 1 was written, beside `FOLDER`'s place: one file an experiment, which doesn't say of which host."""


DISK_TOLERANCE = 0.5
"""How far a disk may exceed its roofline, relative, in any case. It is often a virtual one that others share and whose
host caches it, so what was measured once is no constant; a wrong claim is off by factors."""

QUIET = 0.10
"""Share of the CPU that others may take while rooflines are measured, as in the gate quiet-host."""


def allowed(link: str | None, tolerance: float) -> float:
    """How far a rate may lie above the roofline of ``link``, relative, where ``tolerance`` is what others get."""
    return max(tolerance, DISK_TOLERANCE) if link is not None and link.startswith("disk_") else tolerance


class Roofline(Strict):
    """Rates of one link, measured with copies of one size by some threads, in bytes per second."""

    link: str = Field(
        description="pinned_h2d, pinned_d2h, pageable_…, host_memcpy, tcp_loopback, transfer_engine_read, "
        "disk_read_direct, …"
    )
    bytes: int = Field(gt=0, description="Bytes that all threads moved together in one repeat.")
    threads: int = Field(default=1, ge=1, description="Threads, or streams, that moved them at once.")
    chunk: int | None = Field(
        default=None, description="Bytes of one file on a disk, or of one object through the transfer engine."
    )
    repeats: int = Field(ge=1)
    median: float = Field(
        gt=0, allow_inf_nan=False, description="Over the repeats, a first one that only warms left out."
    )
    min: float = Field(gt=0, allow_inf_nan=False)
    max: float = Field(gt=0, allow_inf_nan=False, description="The fastest repeat: the ceiling.")

    @model_validator(mode="after")
    def _ordered(self) -> Roofline:
        if not self.min <= self.median <= self.max:
            raise ValueError(f"min {self.min:g}, median {self.median:g} and max {self.max:g} are not in this order")
        return self


class Rooflines(Record):
    """The links of one machine. What couldn't be measured isn't there, never 0; ``problems`` say why."""

    schema_version: int = Field(default=2, alias="schema", ge=1, le=2, description="Version of this file's format.")
    host: HostRecord | None = Field(default=None, description="Where it was measured; schema 1 doesn't say.")
    measured_at: str | None = Field(default=None, description="UTC, ISO 8601.")
    seconds: float | None = Field(default=None, description="What measuring took.")
    cpu_other: float | None = Field(
        default=None, ge=0, allow_inf_nan=False, description="Share of all cores that other processes took, 0–1."
    )
    links: list[Roofline] = Field(default_factory=list)
    problems: list[str] = Field(default_factory=list, description="Why links are missing.")

    def ceiling(self, link: str, moved: int) -> Roofline | None:
        """The fastest measurement of a link that says something about moving that many bytes; None: there is none.

        Bytes that fill no cache twice can't move at a cache's speed: of copies smaller than ``moved`` only the largest
        counts, and everything from there on.
        """
        mine = [item for item in self.links if item.link == link]
        least = max((item.bytes for item in mine if item.bytes <= moved), default=0)
        return max((item for item in mine if item.bytes >= least), key=lambda item: item.max, default=None)


def files(experiment: Path) -> list[Path]:
    """All files of rooflines below ``results/<experiment>``, sorted."""
    old = experiment / OLD_FILE
    return [*([old] if old.is_file() else []), *sorted((experiment / FOLDER).glob("*.json"))]


def load(experiment: Path) -> list[Rooflines]:
    """Every file of rooflines of an experiment that can be read, in the order of `files`.

    A file that can't is as good as none: what was to be compared with it isn't checked.
    """
    found = []
    for path in files(experiment):
        try:
            found.append(Rooflines.model_validate_json(path.read_bytes()))
        except (OSError, ValueError):
            continue
    return found


def of_host(known: list[Rooflines], host: HostRecord) -> tuple[Rooflines | None, str | None]:
    """What was measured where a trial ran, and in words what keeps it from being evidence (None: nothing does).

    Same machine, same boot, same kind of GPU. A file that names no host may be of this one, and one that was measured
    beside other work shows less than the link can do: they are returned to show percentages, with a reason not to
    decide by them. ``unknown`` is no identity, so it is never the same.
    """
    if not known:
        return None, "no roofline: none was measured (snakemake probe)"
    for item in reversed(known):
        if item.host is not None and _same(item.host, host):
            if item.cpu_other is not None and item.cpu_other <= QUIET:
                return item, None
            share = "nobody knows how much" if item.cpu_other is None else f"{item.cpu_other:.0%}"
            return item, (
                f"other processes took {share} of the CPU while the rooflines were measured: remove their file and "
                "measure them again (snakemake probe)"
            )
    for item in known:
        if item.host is None:
            return item, "the rooflines don't say of which host they are, so no trial was judged by them"
    return None, "no roofline: none was measured on this host since it booted"


def _same(one: HostRecord, other: HostRecord) -> bool:
    """Whether what was measured on ``one`` holds for ``other``: its id, and every kind of GPU that it has."""
    kinds, wanted = ({gpu.get("name") for gpu in host.gpus} for host in (one, other))
    return one.host_id == other.host_id != "unknown" and kinds >= wanted
