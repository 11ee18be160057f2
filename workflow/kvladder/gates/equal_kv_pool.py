"""All setups of a block have the same device KV pool.

Protects from comparisons of different pools: memory profiling of one server counts what another holds, and the state of
the compile cache moves an unfixed pool by tens of thousands of tokens. Evidence: the pool and the block size that each
engine reports. Tolerance: less than one block, for engines that round. The odd one out is invalid; with no majority all
are.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvladder.config.records import GateResult
from kvladder.gates.base import Evidence, Findings, TrialKey, majority

REQUIRED = True


def check_block(evidences: Sequence[Evidence]) -> dict[TrialKey, list[GateResult]]:
    """One result a trial."""
    pools = {item.key: item.trial.effective.kv_pool_tokens for item in evidences}
    known = {key: pool for key, pool in pools.items() if pool is not None}
    usual = majority(known) if known else None
    results = {}
    for item in evidences:
        found = Findings(__name__, REQUIRED, "trial.json: effective.kv_pool_tokens of the block's trials")
        pool, block = pools[item.key], item.trial.effective.block_size or 1
        if pool is None:
            found.unreadable("the pool of the other setups", "the engine did not report its KV pool")
        elif usual is None:
            seen = ", ".join(f"{key[0]} {value}" for key, value in known.items())
            found.decide(False, "the same pool in all setups", f"{seen} tokens")
        else:
            found.decide(abs(pool - usual) < block, f"{usual} tokens, as most setups", f"{pool} tokens")
        results[item.key] = found.results
    return results
