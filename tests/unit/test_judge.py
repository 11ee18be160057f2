"""Verdicts: valid, invalid, failed; advisory, off; blocks; and what lies broken on the disk."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from trial_factory import FAMILIES, Load, Rows, drop, rehash, shift, write_experiment, write_trial

from kvladder.config import registry
from kvladder.config.experiment import GateConfig
from kvladder.config.records import Verdict
from kvladder.gates.base import COULD_NOT
from kvladder.judge import BlockVerdict, apply_block, judge_block, judge_trial

BY_SOURCE = "vllm:prompt_tokens_by_source_total"


def warm_cold_pass(rows: Rows) -> None:
    shift(rows, BY_SOURCE, 2944, since="repeat/cold/0:end", source="local_cache_hit")
    shift(rows, BY_SOURCE, -2944, since="repeat/cold/0:end", source="local_compute")


@pytest.mark.parametrize("setup", FAMILIES)
def test_good_trial_is_valid(tmp_path: Path, setup: str) -> None:
    folder = write_trial(tmp_path, setup=setup)
    begin = time.process_time()
    verdict = judge_trial(folder)
    assert time.process_time() - begin < 1
    assert (verdict.status, verdict.reason) == ("valid", None)
    assert (verdict.experiment, verdict.setup, verdict.suite, verdict.repeat) == ("demo", setup, "demo", 0)
    assert len(verdict.windows) == 8
    assert all(window.prompt_tokens for window in verdict.windows)
    assert Verdict.model_validate_json(verdict.model_dump_json(by_alias=True)) == verdict


def test_a_folder_without_anything_above_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rooflines would lie four levels up."""
    folder = write_trial(tmp_path, setup="native-host")
    monkeypatch.setattr(Path, "absolute", lambda _: Path("/trial"))
    assert judge_trial(folder).status == "valid"


def test_the_readme_says_what_every_gate_is_for() -> None:
    text = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    table = text.split("| gate | ")[1].split("\n\n")[0]
    named = {name for line in table.splitlines()[2:] for name in line.split(" | ")[0].removeprefix("| ").split(", ")}
    assert named == set(registry.kinds("gates"))


def test_reason_names_gate_workload_and_numbers(tmp_path: Path) -> None:
    verdict = judge_trial(write_trial(tmp_path, edit_counters=warm_cold_pass))
    assert verdict.status == "invalid"
    assert verdict.reason == "cold-is-cold (repeat): expected 0 tokens hit in any tier; seen: gpu 2944"
    assert len(verdict.windows) == 8


def test_reason_lists_the_other_gates(tmp_path: Path) -> None:
    verdict = judge_trial(
        write_trial(
            tmp_path,
            edit_counters=warm_cold_pass,
            edit_requests=lambda rows: rows[0].update(status="failed", error="HTTP 500"),
        )
    )
    assert verdict.reason is not None
    assert verdict.reason.startswith("all-completed (repeat): expected 4 requests complete")
    assert verdict.reason.endswith("seen: cold 0 request 0: HTTP 500. Also failed: cold-is-cold")


def test_advisory_gate_is_shown_but_does_not_decide(tmp_path: Path) -> None:
    verdict = judge_trial(write_trial(tmp_path, edit_counters=warm_cold_pass), GateConfig(advisory=["cold-is-cold"]))
    assert verdict.status == "valid"
    (result,) = [result for result in verdict.gates if result.decision == "fail"]
    assert (result.gate, result.required) == ("cold-is-cold", False)


def test_gate_that_is_off_is_not_run(tmp_path: Path) -> None:
    verdict = judge_trial(write_trial(tmp_path, edit_counters=warm_cold_pass), GateConfig(off=["cold-is-cold"]))
    assert verdict.status == "valid"
    (result,) = [result for result in verdict.gates if result.gate == "cold-is-cold"]
    assert (result.decision, result.required, result.seen) == ("not-checked", False, "switched off in gates.off")


def test_gate_that_is_off_is_in_the_final_verdict_once_even_if_it_is_a_blocks(tmp_path: Path) -> None:
    config = GateConfig(off=["one-host-block", "one-host-block"])
    folder = write_trial(tmp_path, setup="plain")
    verdict = judge_trial(folder, config)
    final = apply_block(verdict, judge_block([folder], [verdict], config))
    assert final.status == "valid"
    (result,) = [result for result in final.gates if result.gate == "one-host-block"]
    assert (result.decision, result.seen) == ("not-checked", "switched off in gates.off")
    # Nothing can be said about files that aren't what was written, so this one runs whatever is asked.
    assert [result.decision for result in final.gates if result.gate == "raw-files-intact"] == ["pass"]


def test_missing_evidence_that_must_exist_is_invalid(tmp_path: Path) -> None:
    verdict = judge_trial(write_trial(tmp_path, setup="plain", edit_counters=lambda rows: drop(rows, BY_SOURCE)))
    assert verdict.status == "invalid"
    assert verdict.reason is not None
    assert "cold-is-cold (repeat)" in verdict.reason
    assert "could not be checked" in verdict.reason


def test_missing_evidence_that_may_be_missing_is_not(tmp_path: Path) -> None:
    """Not checked, said so, and not counted as passed."""
    folder = write_trial(tmp_path, edit_counters=lambda rows: drop(rows, "vllm:num_preemptions_total"))
    verdict = judge_trial(folder)
    assert verdict.status == "valid"
    assert {r.decision for r in verdict.gates if r.gate == "no-preemption-surprise"} == {"not-checked"}


def test_short_prompts_are_valid_but_not_measurable(tmp_path: Path) -> None:
    verdict = judge_trial(write_trial(tmp_path, workloads={"tiny": Load(prompt_tokens=100)}))
    assert verdict.status == "valid"
    (result,) = [result for result in verdict.gates if result.gate == "tier-was-used"]
    assert result.seen == "not measurable: prompt shorter than one block (128 tokens)"


def test_failed_trial_keeps_its_reason(tmp_path: Path) -> None:
    verdict = judge_trial(write_trial(tmp_path, failed="engine: ValueError: counters can only be incremented"))
    assert verdict.status == "failed"
    assert verdict.reason == "engine: ValueError: counters can only be incremented"
    assert verdict.gates == []


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (None, "there is no trial.json"),
        ("", "can't be read"),
        ('{"schema": 1, "experiment": "demo"', "can't be read"),
        ('{"schema": 1, "experiment": "demo"}', "can't be read"),
        ("\x00\xff garbage", "can't be read"),
        ("[]", "can't be read"),
    ],
)
def test_trial_that_never_finished(tmp_path: Path, content: str | None, why: str) -> None:
    folder = write_trial(tmp_path, setup="plain", repeat=2, run="0a1b2c3d")
    (folder / "trial.json").unlink()
    if content is not None:
        (folder / "trial.json").write_text(content, encoding="utf-8")
    verdict = judge_trial(folder)
    assert verdict.status == "failed"
    assert verdict.reason is not None
    assert verdict.reason.startswith("never finished: ")
    assert why in verdict.reason
    identity = (verdict.experiment, verdict.setup, verdict.suite, verdict.repeat, verdict.run)
    assert identity == ("demo", "plain", "demo", 2, "0a1b2c3d")


def test_folder_that_is_not_there(tmp_path: Path) -> None:
    assert judge_trial(tmp_path / "nothing").status == "failed"


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def flip(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data.replace(b'"ok"', b'"no"', 1) if b'"ok"' in data else data.replace(b"0", b"1", 1))


@pytest.mark.parametrize("name", ["repeat.requests.jsonl", "counters.jsonl", "probes.jsonl", "logs/engine.log"])
@pytest.mark.parametrize(("damage", "word"), [(truncate, "bytes"), (flip, "sha256"), (Path.unlink, "can't be read")])
def test_damaged_raw_file_is_named(tmp_path: Path, name: str, damage: Any, word: str) -> None:
    folder = write_trial(tmp_path)
    if name == "logs/engine.log":
        (folder / name).write_text("0" * 1000, encoding="utf-8")
        rehash(folder)
    damage(folder / name)
    verdict = judge_trial(folder, GateConfig())
    assert verdict.status == "invalid"
    assert verdict.reason is not None
    assert name in verdict.reason
    assert word in verdict.reason


def test_raw_file_that_is_not_listed(tmp_path: Path) -> None:
    verdict = judge_trial(write_trial(tmp_path, edit_trial=lambda data: data["files"].pop("counters.jsonl")))
    assert verdict.status == "invalid"
    assert verdict.reason is not None
    assert "counters.jsonl is not listed" in verdict.reason


def test_garbage_with_a_right_hash(tmp_path: Path) -> None:
    folder = write_trial(tmp_path)
    with (folder / "repeat.requests.jsonl").open("a") as file:
        file.write("not json\n")
    rehash(folder)
    verdict = judge_trial(folder)
    assert verdict.status == "invalid"
    assert verdict.reason is not None
    assert "repeat.requests.jsonl, line 5" in verdict.reason


def test_odd_characters_and_empty_files_are_no_damage(tmp_path: Path) -> None:
    """A line separator inside a JSON string is no end of line, and a trial may be too short for a probe."""

    def edit(rows: Rows) -> None:
        for row in rows:
            row["pages"]["engine"] += 'odd_total{name="a\u2028b\x85c"} 1\n'

    folder = write_trial(tmp_path, edit_counters=edit, edit_probes=lambda rows: rows.clear())
    path = folder / "counters.jsonl"
    path.write_text(path.read_text(encoding="utf-8").replace("\\u2028", "\u2028"), encoding="utf-8")
    rehash(folder)
    assert judge_trial(folder).status == "valid"


@pytest.mark.parametrize(
    ("part", "value"),
    [
        (("config", "workloads"), []),
        (("config", "workloads", "repeat"), None),
        (("config", "engine"), None),
        (("expected", "kv_bytes_per_token"), "24576"),
        (("expected", "connector"), "OffloadingConnector"),
        (("expected", "native_patterns"), 5),
        (("effective", "block_size"), 0),
    ],
)
def test_record_that_was_edited_by_hand(tmp_path: Path, part: tuple[str, ...], value: Any) -> None:
    """Its maps are as free as what they hold is different: a wrong kind of value is said, and stops no other trial."""

    def edit(data: Any) -> None:
        *above, last = part
        for key in above:
            data = data[key]
        data[last] = value

    verdict = judge_trial(write_trial(tmp_path, setup="native-host", edit_trial=edit))
    assert verdict.status == "invalid"
    assert verdict.reason is not None
    assert verdict.reason.startswith(f"{COULD_NOT}: trial.json holds what this version can't use (")


@pytest.mark.parametrize("step", [0, -3])
def test_prefill_step_that_is_none_does_not_hang_the_oracle(tmp_path: Path, step: int) -> None:
    folder = write_trial(
        tmp_path,
        setup="native-host",
        edit_trial=lambda data: data["effective"]["details"].update(max_num_batched_tokens=step),
    )
    assert judge_trial(folder).status == "valid"


def test_setup_that_this_version_does_not_know(tmp_path: Path) -> None:
    verdict = judge_trial(write_trial(tmp_path, kind="abacus"))
    assert verdict.status == "invalid"
    assert verdict.reason is not None
    assert "abacus" in verdict.reason


# Blocks


def judged(folders: list[Path]) -> list[Verdict]:
    return [judge_trial(folder) for folder in folders]


def test_good_block_leaves_verdicts_valid(tmp_path: Path) -> None:
    folders = write_experiment(tmp_path, setups=("plain", "prefix-cache", "native-host"), repeats=1)
    verdicts = judged(folders)
    block = judge_block(folders, verdicts)
    assert BlockVerdict.model_validate_json(block.model_dump_json(by_alias=True)) == block
    final = [apply_block(verdict, block) for verdict in verdicts]
    assert {verdict.status for verdict in final} == {"valid"}
    assert {"equal-kv-pool", "equal-token-totals", "one-host-block"} <= {gate.gate for gate in final[0].gates}


def test_odd_pool_makes_its_trial_invalid(tmp_path: Path) -> None:
    folders = [write_trial(tmp_path, setup=name) for name in ("plain", "prefix-cache")]
    # Both what was asked and what was seen: by itself the trial is fine.
    odd = write_trial(
        tmp_path,
        setup="native-host",
        edit_trial=lambda data: [
            data["effective"].update(kv_pool_tokens=1280),
            data["config"]["engine"].update(kv_pool_blocks=10),
        ],
    )
    folders.append(odd)
    verdicts = judged(folders)
    assert {verdict.status for verdict in verdicts} == {"valid"}
    final = [apply_block(verdict, judge_block(folders, verdicts)) for verdict in verdicts]
    assert [verdict.status for verdict in final] == ["valid", "valid", "invalid"]
    assert final[2].reason == "equal-kv-pool: expected 40960 tokens, as most setups; seen: 1280 tokens"
    advisory = judge_block(folders, verdicts, GateConfig(advisory=["equal-kv-pool"]))
    assert apply_block(verdicts[2], advisory).status == "valid"
    off = judge_block(folders, verdicts, GateConfig(off=["equal-kv-pool"]))
    assert apply_block(verdicts[2], off).status == "valid"


def test_failed_and_invalid_trials_do_not_decide_what_is_equal(tmp_path: Path) -> None:
    folders = [
        write_trial(tmp_path, setup="plain"),
        write_trial(tmp_path, setup="prefix-cache", failed="engine: died", host_id="host-b"),
        write_trial(tmp_path, setup="native-host", edit_requests=lambda rows: rows.pop(), host_id="host-b"),
        write_trial(tmp_path, setup="lmcache-mp"),
    ]
    shutil.rmtree(folders[3])
    verdicts = judged(folders)
    block = judge_block(folders, verdicts)
    assert [trial.setup for trial in block.trials] == ["plain"]
    final = [apply_block(verdict, block) for verdict in verdicts]
    assert [verdict.status for verdict in final] == ["valid", "failed", "invalid", "failed"]
    assert final[1].reason == "engine: died"


def test_block_without_a_valid_trial(tmp_path: Path) -> None:
    folders = [write_trial(tmp_path, setup="plain", failed="engine: died")]
    assert judge_block(folders, judged(folders)).trials == []


def test_two_blocks_are_not_compared(tmp_path: Path) -> None:
    folders = [write_trial(tmp_path, setup="plain", repeat=repeat) for repeat in (0, 1)]
    with pytest.raises(ValueError, match="one block"):
        judge_block(folders, judged(folders))
