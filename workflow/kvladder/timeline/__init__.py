"""Where the time of a request goes: captures with a profiler, one event model, decomposition, figures, Perfetto.

`capture` serves a setup under a profiler; `nsys`, `torch_trace` and `marks` read what profilers and the engine plugin
write; `assemble` makes one timeline of it on the client's clock; `decompose` splits each request's TTFT; `counters`
does so without a profiler. Captures are jobs of their own: a profiled server is never timed for results.
"""
