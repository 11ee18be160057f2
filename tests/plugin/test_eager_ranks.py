"""Log probabilities without a compiler: the same ranks, from a function that nothing compiles."""

import pytest
import torch
from vllm.v1.sample import sampler
from vllm.v1.sample.ops import logprobs

from kvladder_engine_plugin import register


def test_ranks_are_counted_without_compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = logprobs.batched_count_greater_than
    monkeypatch.setattr(logprobs, "batched_count_greater_than", compiled)
    monkeypatch.setattr(sampler, "batched_count_greater_than", compiled)
    assert hasattr(compiled, "_torchdynamo_orig_callable")
    register()
    register()
    for module in (logprobs, sampler):
        count = module.batched_count_greater_than
        assert not hasattr(count, "_torchdynamo_orig_callable")
        ranks = count(torch.tensor([[0.1, 0.7, 0.2], [0.5, 0.1, 0.4]]), torch.tensor([[0.2], [0.5]]))
        assert ranks.tolist() == [2, 1]
