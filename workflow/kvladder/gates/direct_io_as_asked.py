"""A tier on disk was read from the disk, not from the page cache.

Protects from host memory that is reported as NVMe: vLLM's file tier asks for O_DIRECT and falls back to buffered files
with a warning where the file system refuses it (an overlay, some network mounts); LMCache accepts ``use_odirect`` and
ignores it (LMCache#1522); and a folder on tmpfs is memory altogether. Evidence: the engine's warning, and how much of
the tier's files lay in the page cache when the passes were over (``mincore``): O_DIRECT leaves nothing there. Decides
where a pass has to be served from disk, or was; a tier that is only written to is reported.
Tolerance: 1 % of the bytes.
"""

from __future__ import annotations

from kvladder.config.records import GateResult
from kvladder.gates.base import O_DIRECT_REFUSED, Evidence, Findings

REQUIRED = True

_MEMORY = ("tmpfs", "ramfs")


def check(evidence: Evidence) -> list[GateResult]:
    """One result a trial: all its workloads use one folder."""
    found = Findings(__name__, REQUIRED, "logs/engine.log; trial.json: effective.details.disk")
    expected = "files read past the page cache (O_DIRECT)"
    setup = evidence.setup
    block = evidence.trial.effective.block_size or 1
    access = setup.file_access(block)
    if access is None:
        found.skip(expected, _without(evidence))
        return found.results
    good, seen = _seen(evidence)
    if not access.direct:
        found.skip(expected, f"the page cache was asked for; {seen}")
        return found.results
    served = any(
        setup.hit_tier(item.name) == "nvme" or window.by_source.get("nvme")
        for item, window in zip(evidence.trial.passes, evidence.windows, strict=True)
    )
    if good is None:
        found.skip(expected, seen)
    elif served:
        found.decide(good, expected, seen)
    else:
        found.skip(expected, f"no pass was served from disk; {seen}")
    return found.results


def _without(evidence: Evidence) -> str:
    """Why there is nothing to check; a key that is known to do nothing is named."""
    asked = [evidence.trial.config.get("setup", {}), evidence.trial.expected.get("connector") or {}]
    if "use_odirect" in str(asked):
        return "use_odirect was asked for, which LMCache accepts and ignores; nothing shows how its files were opened"
    return "this setup has no tier on disk"


def _seen(evidence: Evidence) -> tuple[bool | None, str]:
    """Whether the disk was used directly (None: nobody can tell), and what shows it."""
    disk = evidence.trial.effective.details.get("disk") or {}
    if any(O_DIRECT_REFUSED in log for log in evidence.engine_logs):
        return False, "page cache: the engine logged that its file system refuses O_DIRECT"
    if disk.get("filesystem") in _MEMORY:
        return False, f"memory: the folder is on {disk['filesystem']}"
    if evidence.page_cache is None:
        return None, "how much of the files was cached isn't on record"
    share = f"{disk['cached_bytes']} of {disk['bytes']} B of the files were cached"
    return not evidence.page_cache, f"page cache: {share}" if evidence.page_cache else share
