"""Lock files: freed by the kernel when the last process that holds them is gone, however it died."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import stat
import time
from pathlib import Path

# Fixed places, not TMPDIR: every job on the machine has to look into the same folder.
_BASES = ("/tmp", "/var/tmp")  # noqa: S108 - folders are checked for owner and type below
_HOLDER_CHARS = 200


def runtime_folder(name: str, *, shared: bool = False) -> Path:
    """Return a folder for lock files, made if missing: this user's, or with ``shared`` one for all users.

    It's named after the uid, so that a user without a name or a home has one too. Raises OSError where nothing can be
    made, and PermissionError when the folder belongs to another user or is a link.
    """
    problem = OSError(f"no writable folder for lock files among {', '.join(_BASES)}")
    for base in _BASES:
        top = Path(base) / ("kvladder-shared" if shared else f"kvladder-{os.getuid()}")
        try:
            _make(top, shared)
            _make(top / name, shared)
        except PermissionError:
            raise
        except OSError as error:
            problem = error
            continue
        return top / name
    raise problem


def _make(folder: Path, shared: bool) -> None:
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        pass
    except PermissionError as error:
        raise OSError(f"{folder.parent} can't be written: {error}") from error
    else:
        if shared:
            folder.chmod(0o1777)  # mkdir's mode goes through the umask
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise PermissionError(f"{folder} is not a folder; remove it")
    if not shared and status.st_uid != os.getuid():
        raise PermissionError(f"{folder} belongs to another user (uid {status.st_uid}); remove it")


class LockFile:
    """An flock on one file; ``fd`` may be handed to a supervisor, and then the lock lasts as long as that one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.fd = -1

    def acquire(self, holder: str, *, exclusive: bool = True) -> bool:
        """Try to take the lock, at once; ``holder``, pid and time are left in the file (shared: the last one's)."""
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            # Without O_CREAT first: in a sticky folder the kernel may refuse O_CREAT on another user's file.
            fd = os.open(self.path, flags)
        except FileNotFoundError:
            fd = os.open(self.path, flags | os.O_CREAT, 0o600)
            with contextlib.suppress(PermissionError):
                if stat.S_IMODE(self.path.parent.stat().st_mode) & stat.S_ISVTX:
                    os.fchmod(fd, 0o666)  # every user has to be able to lock it
        try:
            fcntl.flock(fd, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return False
        self.fd = fd
        note = {"holder": holder, "pid": os.getpid(), "since": time.time()}
        os.ftruncate(fd, 0)
        os.pwrite(fd, json.dumps(note).encode(), 0)
        return True

    def holder(self) -> str:
        """Name who holds the lock, for a message; cut and cleaned, as the file's text is another process's word."""
        try:
            note = json.loads(self.path.read_text(errors="replace")[:4096])
            seconds = max(0, int(time.time() - float(note["since"])))
            name = "".join(c for c in str(note["holder"]) if c.isprintable())[:_HOLDER_CHARS]
            return f"{name}, pid {int(note['pid'])}, for {seconds} s"
        except (OSError, ValueError, LookupError, TypeError):
            return "an unknown process"

    def release(self) -> None:
        """Give up this process's share; the lock is free once every process that inherited it is gone as well."""
        if self.fd >= 0:
            os.close(self.fd)  # not LOCK_UN: that would take it from a supervisor that still ends servers
            self.fd = -1
