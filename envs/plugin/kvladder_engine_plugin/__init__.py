"""What kvladder adds to a vLLM server.

- load format ``seeded``: reproducible random weights, so that no checkpoint is needed
  (:mod:`kvladder_engine_plugin.seeded_loader`);
- log probabilities on a CPU without compiling anything (:mod:`kvladder_engine_plugin.eager_ranks`);
- LMCache's in-process counters without their delay (:mod:`kvladder_engine_plugin.lmcache_stats`);
- which source each patched module runs from (:mod:`kvladder_engine_plugin.sources`);
- what the engine does with each request, for timelines (:mod:`kvladder_engine_plugin.marks`,
  :mod:`kvladder_engine_plugin.profiled`);
- offloading spec ``HostTieringOffloadingSpec``: a host memcpy in place of the GPU copier, so that the
  stock KV offloading runs on vLLM's CPU build (:mod:`kvladder_engine_plugin.host_copier`). vLLM finds it
  by ``spec_name`` and ``spec_module_path``; it needs no registration here.
"""

__all__ = ["register"]


def register() -> None:
    """Entry point of the group ``vllm.general_plugins``; vLLM calls it in each of its processes.

    The imports are inside because merely importing this package (for example to read its version) must not
    pull in vLLM and torch.
    """
    from kvladder_engine_plugin.sources import watch_sources  # noqa: PLC0415

    # Before anything else can import what is to be watched.
    watch_sources()
    from kvladder_engine_plugin.eager_ranks import rank_eagerly  # noqa: PLC0415
    from kvladder_engine_plugin.lmcache_stats import count_often  # noqa: PLC0415
    from kvladder_engine_plugin.marks import mark_engine  # noqa: PLC0415
    from kvladder_engine_plugin.seeded_loader import register_seeded_loader  # noqa: PLC0415

    register_seeded_loader()
    rank_eagerly()
    count_often()
    mark_engine()
