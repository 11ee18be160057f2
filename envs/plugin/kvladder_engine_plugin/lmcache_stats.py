"""LMCache's in-process counters without their delay.

LMCache's connector collects what it counts and adds it to its Prometheus counters every ten seconds, a number that no
setting changes. A pass takes less, so its tokens and bytes would be those of another pass. With
``KVLADDER_LMCACHE_STATS_S`` set they are added that often. Nothing that is measured goes through here.
"""

import functools
import os
from typing import Any

VARIABLE = "KVLADDER_LMCACHE_STATS_S"


def count_often() -> None:
    """Have LMCache add up its statistics as often as the variable says, where it is set.

    Only when vLLM makes its connector: LMCache imported earlier breaks the start of vLLM's CPU build, which goes
    through all modules that are loaded.
    """
    if VARIABLE not in os.environ:
        return
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory  # noqa: PLC0415

    create = KVConnectorFactory.create_connector
    if getattr(create, "counts_often", False):
        return

    @functools.wraps(create)
    def create_connector(*args: Any, **kwargs: Any) -> Any:
        shorten(float(os.environ[VARIABLE]))
        return create(*args, **kwargs)

    create_connector.counts_often = True  # type: ignore[attr-defined]
    KVConnectorFactory.create_connector = create_connector


def shorten(seconds: float) -> None:
    """Set the interval of all loggers of statistics that LMCache makes from now on."""
    try:
        from lmcache.observability import LMCacheStatsLogger  # noqa: PLC0415
    except ImportError:
        # The connector will say what is missing.
        return
    begin = getattr(LMCacheStatsLogger.__init__, "__wrapped__", LMCacheStatsLogger.__init__)

    @functools.wraps(begin)
    def often(self: Any, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **{**kwargs, "log_interval": seconds})

    LMCacheStatsLogger.__init__ = often
