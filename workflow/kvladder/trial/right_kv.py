"""The passes that check whether a tier gives back the KV that was stored: ``right-kv``, after everything timed.

The same prompts cold, as a first hit and as a later one, one request in flight, with the log probabilities of the most
probable tokens. ``kvladder.gates.right_kv`` compares them.
"""

from __future__ import annotations

from kvladder.config.experiment import RightKvConfig
from kvladder.config.traffic import RIGHT_KV, PassPlan, TrafficContext
from kvladder.workloads.base import Prompts, rounds


def passes(config: RightKvConfig, prompt_tokens: int, context: TrafficContext) -> list[PassPlan]:
    """Cold, first hit, warm, over ``config.prompts`` prompts of ``prompt_tokens`` that no workload sends.

    Equal for every setup of a block. Raises ValueError when the vocabulary can't give every prompt a first block of
    its own.
    """
    requests = Prompts(RIGHT_KV, context).requests(config.prompts, prompt_tokens, config.output_tokens)
    return rounds(RIGHT_KV, requests, concurrency=1, warm_passes=2)
