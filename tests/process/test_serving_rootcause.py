"""The line that says why, out of what engines really write."""

from __future__ import annotations

import pytest

from kvladder.serving.rootcause import root_cause


def engine(*lines: str, source: str = "EngineCore pid=7") -> str:
    return "".join(f"({source}) ERROR 11-29 16:35:01 [core.py:840] {line}\n" for line in lines)


TRACE = "Traceback (most recent call last):"
CASES = {
    "engine, then only pointers": (
        engine(TRACE, '  File "core.py", line 1', "    x()", "ValueError: No available memory for the cache blocks.")
        + f"(APIServer pid=6) {TRACE}\n(APIServer pid=6)   File x\n"
        + "(APIServer pid=6) RuntimeError: Engine core initialization failed. See root cause above. Failed: {}\n",
        "ValueError: No available memory for the cache blocks.",
    ),
    # C2: the metrics code of an engine that lives on, and streams nothing any more.
    "metrics code that dies in the output loop": (
        engine(
            "AsyncLLM output_handler failed.",
            TRACE,
            '  File "loggers.py", line 1107, in record',
            "    self.counter_prompt_tokens_by_source.inc(by_source)",
            "ValueError: Counters can only be incremented by non-negative amounts.",
            source="APIServer pid=6",
        )
        + '(APIServer pid=6) INFO:     127.0.0.1:40000 - "GET /health HTTP/1.1" 200 OK\n',
        "ValueError: Counters can only be incremented by non-negative amounts.",
    ),
    "bare exception name": (f"{TRACE}\n  File x\nAssertionError\n", "AssertionError"),
    "later noise after the pointer": (
        engine(TRACE, "  File x", "KeyError: 'cmpl-1'")
        + engine("AsyncLLM output_handler failed.", TRACE, "  File y", source="APIServer pid=6")
        + engine(
            "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue. See stack trace (above).",
            source="APIServer pid=6",
        )
        + f"{TRACE}\n  File z\nConnectionResetError: [Errno 104] Connection reset by peer\n",
        "KeyError: 'cmpl-1'",
    ),
    "handled one first, the last counts": (
        f"{TRACE}\n  File x\nImportError: no flash attention\nstarting\n"
        f"{TRACE}\n  File y\nOSError: [Errno 98] in use\n",
        "OSError: [Errno 98] in use",
    ),
    "chained": (
        f"{TRACE}\n  File x\nKeyError: 'a'\n\nDuring handling of the above exception, another exception occurred:\n\n"
        f"{TRACE}\n  File y\nValueError: bad a\n",
        "ValueError: bad a",
    ),
    "shutdown sighs": (
        f"{TRACE}\n  File x\ntorch.OutOfMemoryError: CUDA out of memory.\n"
        f"Exception ignored in: <function F.__del__>\n{TRACE}\n  File y\nAttributeError: gone\n"
        f"{TRACE}\n  File \"/usr/lib/multiprocessing/resource_tracker.py\", line 2\nKeyError: '/psm_1'\n",
        "torch.OutOfMemoryError: CUDA out of memory.",
    ),
    "interleaved writers": (
        f"(A pid=1) {TRACE}\n(B pid=2) {TRACE}\n(A pid=1)   File a\n(B pid=2)   File b\n(A pid=1) ValueError: of a\n"
        "(B pid=2) RuntimeError: Worker failed with error 'x', please check the stack trace above for the root cause\n",
        "ValueError: of a",
    ),
    "pydantic says it one line later": (
        f"{TRACE}\n  File x\npydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig\n"
        "  Value error, User-specified max_model_len (9) is greater\n",
        "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig Value error, "
        "User-specified max_model_len (9) is greater",
    ),
    "argparse": ("usage: x\napi_server.py: error: unrecognized arguments: --kv", "unrecognized arguments: --kv"),
    "loader": (
        "mooncake_master: error while loading shared libraries: libibverbs.so.1: cannot open shared object file\n",
        "libibverbs.so.1",
    ),
    "glog": ("I20251129 16:35:01.1 1 m.cpp:1] up\nE20251129 16:35:01.2 1 m.cpp:3] Failed to bind\n", "Failed to bind"),
    "uvicorn": ("INFO:     Started\nERROR:    [Errno 98] error while attempting to bind\n", "[Errno 98]"),
    "colours": ("\x1b[31mERROR\x1b[0m: no\n", "ERROR: no"),
    "pointer only": (
        "RuntimeError: Engine core initialization failed. See root cause above.\n",
        "initialization failed",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_cause(name: str) -> None:
    text, expected = CASES[name]
    found = root_cause(text)
    assert found is not None
    assert expected in found
    if expected.partition(":")[0].endswith(("Error", "KeyError")):
        assert found == expected, "no prefix of the log may be left"


@pytest.mark.parametrize(
    "text", ["", "INFO 11-29 16:35:01 [a.py:1] 0 errors so far\nall good\n", "WARNING: error rates\n"]
)
def test_no_cause(text: str) -> None:
    assert root_cause(text) is None
