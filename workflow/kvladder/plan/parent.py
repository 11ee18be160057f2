"""A job must not outlive its workflow: a SIGKILL of snakemake reaches nobody else."""

from __future__ import annotations

import os
import select
import signal
import threading

WORKFLOW_PID = "KVLADDER_WORKFLOW_PID"
"""Environment variable with the id of the snakemake process on this machine."""


def follow_workflow() -> None:
    """Have SIGTERM sent to this process as soon as the workflow's process is gone. Without one it does nothing."""
    pid = int(os.environ.get(WORKFLOW_PID, "0"))
    if pid <= 0 or pid == os.getpid():
        return
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        os.kill(os.getpid(), signal.SIGTERM)
        return
    except OSError:
        return  # a kernel or sandbox without pidfd: the job still ends by itself

    def wait() -> None:
        select.select([handle], [], [])
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, name="follow-workflow", daemon=True).start()
