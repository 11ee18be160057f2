"""Log probabilities on vLLM's CPU build without a C++ compiler.

vLLM ranks the sampled token with one small function under ``torch.compile``, in eager mode too. The first request that
asks for log probabilities waits half a minute for it on two cores, and where the machine has no C++ compiler the engine
dies of it. Uncompiled it gives the same. Written for vLLM 0.32.0; nothing else runs it than such requests.
"""

from vllm.platforms import current_platform


def rank_eagerly() -> None:
    """Put the function itself in the place of its compiled form, on a CPU; calling it again changes nothing."""
    if not current_platform.is_cpu():
        return
    # Only there: on a GPU these modules are slow to load and may touch the device in a process that is to fork.
    from vllm.v1.sample import sampler  # noqa: PLC0415
    from vllm.v1.sample.ops import logprobs  # noqa: PLC0415

    compiled = logprobs.batched_count_greater_than
    if not hasattr(compiled, "_torchdynamo_orig_callable"):
        return
    plain = compiled._torchdynamo_orig_callable
    logprobs.batched_count_greater_than = plain
    sampler.batched_count_greater_than = plain
