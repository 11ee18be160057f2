"""The measuring client: sends one pass of requests and records what came back, when.

Nothing here knows setups, engines or counters: a `PassPlan` goes in, a `PassResult` comes out.
"""

from kvladder.load.client import PassResult, Progress, run_pass
from kvladder.load.processes import check_cores, processes_for, run_in_processes
from kvladder.load.records import RequestTrace, write_records
from kvladder.load.target import Limits, Target

__all__ = [
    "Limits",
    "PassResult",
    "Progress",
    "RequestTrace",
    "Target",
    "check_cores",
    "processes_for",
    "run_in_processes",
    "run_pass",
    "write_records",
]
