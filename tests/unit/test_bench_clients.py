"""What each load client is given, and how what it writes is read: real output, recorded and cut to three requests."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from bench_factory import cell

from kvladder.bench.clients.base import Job, draw, number_of, words, write_tokenizer
from kvladder.bench.clients.registry import CLIENTS
from kvladder.config.bench import Client

DATA = Path(__file__).parents[1] / "data" / "bench"


def job(client: Client, folder: Path) -> Job:
    size = {"prompt_tokens": 5, "concurrency": 2, "requests": 7, "output_tokens": 3}
    return Job(cell(client=client, **size), 8123, folder, draw(1, 3, 5))


@pytest.mark.parametrize("client", CLIENTS)
def test_command_lines_name_the_server_and_what_is_asked(client: Client, tmp_path: Path) -> None:
    command = CLIENTS[client].prepare(job(client, tmp_path))
    assert Path(command[0]).parent == CLIENTS[client].python.parent
    text = " ".join(command) + "".join(path.read_text(encoding="utf-8") for path in tmp_path.glob("*.json*"))
    assert "8123" in text
    # Each is asked for 7 requests, 2 in flight, of 3 tokens.
    expected = {
        "kvladder": ['"requests": 7', '"concurrency": 2', '"output_tokens": 3'],
        "vllm": ["--num-prompts 7", "--max-concurrency 2", '"max_tokens": 3'],
        "aiperf": ["--request-count 7", "--concurrency 2", '"output_length": 3'],
        "guidellm": ["count=7", "streams=2", '"output_tokens_count": 3'],
    }[client]
    assert [part for part in expected if part not in text] == []


def test_vllm_gets_ids_and_the_others_words_of_the_same_size(tmp_path: Path) -> None:
    prompts = draw(1, 3, 5)
    lines = {}
    for client in ("vllm", "aiperf", "guidellm"):
        (tmp_path / client).mkdir()
        CLIENTS[client].prepare(job(client, tmp_path / client))
        text = (tmp_path / client / "prompts.jsonl").read_text(encoding="utf-8")
        lines[client] = [json.loads(line) for line in text.splitlines()]
    assert [line["prompt"] for line in lines["vllm"]] == [list(prompt) for prompt in prompts]
    assert [line["text"] for line in lines["aiperf"]] == [words(prompt) for prompt in prompts]
    # GuideLLM stops at the end of its data, so that it gets a line a request.
    assert [line["prompt"] for line in lines["guidellm"]] == [words(prompts[i % 3]) for i in range(7)]
    assert len(words(prompts[0])) == len(str(list(prompts[0])).replace(" ", "")) - 2


def test_prompts_come_from_the_seed() -> None:
    assert draw(1, 2, 4) == draw(1, 2, 4) != draw(2, 2, 4)
    assert all(10_000 <= token < 100_000 for prompt in draw(1, 2, 4) for token in prompt)


def test_vllm_output() -> None:
    first, *rest = CLIENTS["vllm"].read(DATA / "vllm")
    assert [item.number for item in (first, *rest)] == [0, 1, 4]
    assert (first.ok, first.ttft_ns, first.request_id) == (True, 939_821_629, None)
    assert [len(item.gaps_ns or ()) for item in (first, *rest)] == [15, 15, 15]
    result = json.loads((DATA / "vllm" / "result.json").read_text(encoding="utf-8"))
    assert first.gaps_ns == [round(gap * 1e9) for gap in result["itls"][0]]


def test_vllm_output_of_a_failed_request(tmp_path: Path) -> None:
    """It has no first token: 0.0 seconds in the file, and unknown here."""
    text = {"generated_texts": [""], "errors": ["Never received a valid chunk"], "ttfts": [0.0], "itls": [[]]}
    (tmp_path / "result.json").write_text(json.dumps(text), encoding="utf-8")
    (item,) = CLIENTS["vllm"].read(tmp_path)
    assert (item.ok, item.ttft_ns, item.number) == (False, None, None)


def test_aiperf_output() -> None:
    items = CLIENTS["aiperf"].read(DATA / "aiperf")
    assert [item.ttft_ns for item in items] == [231_518_015, 207_475_227, 206_720_259]
    assert items[0].request_id == "43462044-d38d-4f69-9e89-ad48f0cb541a"
    assert items[0].gaps_ns is not None
    assert (len(items[0].gaps_ns), items[0].gaps_ns[:2]) == (15, [0, 6_638_560])
    assert all(item.ok and item.number is None for item in items)


def test_aiperf_output_in_another_unit_is_refused(tmp_path: Path) -> None:
    text = (DATA / "aiperf" / "profile_export.jsonl").read_text(encoding="utf-8")
    (tmp_path / "profile_export.jsonl").write_text(text.replace('"unit":"ms"', '"unit":"s"'), encoding="utf-8")
    with pytest.raises(ValueError, match="'s' instead of milliseconds"):
        CLIENTS["aiperf"].read(tmp_path)


def test_guidellm_output() -> None:
    items = CLIENTS["guidellm"].read(DATA / "guidellm")
    assert [(item.number, item.ttft_ns) for item in items] == [(6, 88_079_929), (3, 69_024_801), (12, 119_077_921)]
    assert all(item.ok and item.gaps_ns is None for item in items)


@pytest.mark.parametrize("client", CLIENTS)
def test_output_that_is_not_there(client: Client, tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        CLIENTS[client].read(tmp_path)


def test_numbers_in_texts() -> None:
    assert [number_of(text) for text in ("#12 w w", "#0", "w #3", "")] == [12, 0, None, None]


def test_peers_are_kept_from_proxies_and_telemetry(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    for client in CLIENTS.values():
        assert not [name for name in client.environment if "proxy" in name.lower()]
        assert client.environment["DO_NOT_TRACK"] == "1"


def test_tokenizer_knows_every_word(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "t")
    vocabulary = json.loads((tmp_path / "t" / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]
    assert all(word in vocabulary for prompt in draw(1, 2, 50) for word in words(prompt).split())
