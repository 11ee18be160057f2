"""Load clients by name."""

from __future__ import annotations

from kvladder.bench.clients.aiperf import AIPerf
from kvladder.bench.clients.base import LoadClient
from kvladder.bench.clients.guidellm import GuideLLM
from kvladder.bench.clients.kvladder import Kvladder
from kvladder.bench.clients.vllm import VllmBench
from kvladder.config.bench import Client

CLIENTS: dict[Client, LoadClient] = {
    "kvladder": Kvladder(),
    "vllm": VllmBench(),
    "aiperf": AIPerf(),
    "guidellm": GuideLLM(),
}
"""Every load client that a config may name."""
