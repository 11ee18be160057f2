"""The verdict on a trial: run every gate over its raw files, then over the block it belongs to.

Two steps, because most gates need one trial only and a few need all setups of a block (one suite, one repeat):

1. `judge_trial` reads one folder → ``own-verdict.json``: valid, invalid or failed.
2. `judge_block` compares the block's trials that are valid so far → ``blocks/<suite>/r<k>-<block>.json``, which holds
   extra gate results by trial. `apply_block` lays it over a trial's own verdict → ``verdict.json``, and may turn valid
   into invalid, never back.

Neither starts anything: stored raw data can be judged again at any time, on any machine.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field

from kvladder.config import registry
from kvladder.config.base import Record, Strict
from kvladder.config.experiment import GateConfig
from kvladder.config.records import GateResult, HitDeviation, TrialRecord, Verdict
from kvladder.gates import below_the_limit, hits_as_predicted, raw_files_intact, right_kv
from kvladder.gates.base import COULD_NOT, BlockGate, Evidence, Gate, TrialKey, Unreadable

_ALWAYS_ON = "raw-files-intact"

_FOLDER = re.compile(r"r(?P<repeat>\d+)-(?P<run>.+)")


class BlockTrial(Strict):
    """What the block's gates found on one of its trials."""

    setup: str
    run: str
    gates: list[GateResult]
    deviations: list[HitDeviation] = Field(default_factory=list, description="What right-kv measured.")


class BlockVerdict(Record):
    """``blocks/<suite>/r<k>-<block>.json``: findings that need all setups of a block."""

    experiment: str
    suite: str
    repeat: int
    trials: list[BlockTrial] = Field(description="One entry a trial that was valid by itself; others aren't compared.")


def judge_trial(folder: Path, config: GateConfig | None = None) -> Verdict:
    """Run all gates on one trial folder.

    Never raises for what lies in the folder: a trial that didn't finish, or can't be read, is ``failed`` with the
    reason; one whose raw files are damaged is ``invalid`` with the file's name.
    """
    config = config or GateConfig()
    try:
        evidence = Evidence.load(folder, config)
    except Unreadable as error:
        return _never_finished(folder, str(error))
    trial = evidence.trial
    if trial.status == "failed":
        return _verdict(trial, "failed", trial.reason or "failed without a reason", [])
    if evidence.broken:
        results = raw_files_intact.check(evidence)
        return _verdict(trial, "invalid", reason(results), results)
    try:
        results = [result for name, gate in _trial_gates() if _is_on(name, config) for result in gate.check(evidence)]
        measured = {
            "windows": evidence.windows,
            "rates": below_the_limit.claims(evidence),
            "predictions": hits_as_predicted.predictions(evidence),
        }
    except Unreadable as error:
        return _verdict(trial, "invalid", f"{COULD_NOT}: {error}", [])
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        # Values of other kinds than kvladder writes, in parts of trial.json that no model describes.
        what = f"trial.json holds what this version can't use ({type(error).__name__}: {error})"
        return _verdict(trial, "invalid", f"{COULD_NOT}: {what}", [])
    results = _decide_by(config, results) + _switched_off(config)
    why = reason(results)
    verdict = _verdict(trial, "valid" if why is None else "invalid", why, results)
    return verdict.model_copy(update=measured)


def judge_block(folders: Sequence[Path], verdicts: Sequence[Verdict], config: GateConfig | None = None) -> BlockVerdict:
    """Run the gates across a block: ``folders`` are its trials (one suite, one repeat), ``verdicts`` theirs, in order.

    Trials that aren't valid by themselves are left out: a failed setup mustn't decide what is equal. Raises ValueError
    for no verdict at all, or verdicts of more than one block, and `Unreadable` when a valid trial's folder has changed
    since.
    """
    config = config or GateConfig()
    blocks = {(verdict.experiment, verdict.suite, verdict.repeat) for verdict in verdicts}
    if len(blocks) != 1:
        raise ValueError(f"verdicts of one block are compared, not of {len(blocks)}: {sorted(blocks)}")
    experiment, suite, repeat = blocks.pop()
    evidences = [
        Evidence.load(folder, config)
        for folder, verdict in zip(folders, verdicts, strict=True)
        if verdict.status == "valid"
    ]
    found: dict[TrialKey, list[GateResult]] = {evidence.key: [] for evidence in evidences}
    for name, gate in _block_gates():
        if evidences and _is_on(name, config):
            for key, results in gate.check_block(evidences).items():
                found[key] += _decide_by(config, results)
    measured = right_kv.deviations(evidences) if _is_on("right-kv", config) else {}
    trials = [
        BlockTrial(setup=key[0], run=key[1], gates=results, deviations=measured.get(key, []))
        for key, results in found.items()
    ]
    return BlockVerdict(experiment=experiment, suite=suite, repeat=repeat, trials=trials)


def apply_block(verdict: Verdict, block: BlockVerdict) -> Verdict:
    """A trial's final verdict: its own, and what its block found; one that the block doesn't name stays as it is."""
    for trial in block.trials:
        if (trial.setup, trial.run) == (verdict.setup, verdict.run):
            why = verdict.reason or reason(trial.gates)
            status = "invalid" if verdict.status == "valid" and why is not None else verdict.status
            update = {"gates": [*verdict.gates, *trial.gates], "deviations": trial.deviations}
            return verdict.model_copy(update={**update, "status": status, "reason": why})
    return verdict


def reason(results: Iterable[GateResult]) -> str | None:
    """In plain words, why these results make a trial invalid; None when they don't."""
    against = [result for result in results if decides_against(result)]
    if not against:
        return None
    first = against[0]
    where = f" ({first.workload})" if first.workload is not None else ""
    text = f"{first.gate}{where}: expected {first.expected}; seen: {first.seen}"
    others = [name for name in dict.fromkeys(result.gate for result in against) if name != first.gate]
    return f"{text}. Also failed: {', '.join(others)}" if others else text


def decides_against(result: GateResult) -> bool:
    """Whether this result alone makes a trial invalid.

    A required gate that failed, or that lacks evidence which every finished trial has. Other unchecked gates don't
    decide, but are never counted as passed.
    """
    return result.required and (
        result.decision == "fail" or (result.decision == "not-checked" and result.seen.startswith(COULD_NOT))
    )


def _trial_gates() -> list[tuple[str, Gate]]:
    return _modules("check")


def _block_gates() -> list[tuple[str, BlockGate]]:
    return _modules("check_block")


def _modules(function: str) -> list[tuple[str, Any]]:
    """Gates by name that have this function, in the order of their names."""
    modules = [(name, registry.load("gates", name)) for name in registry.kinds("gates")]
    return [(name, module) for name, module in modules if hasattr(module, function)]


def _is_on(name: str, config: GateConfig) -> bool:
    return name not in config.off or name == _ALWAYS_ON


def _switched_off(config: GateConfig) -> list[GateResult]:
    """Gates that aren't run, of the block's too: whoever reads the verdict must see what nobody looked at."""
    return [
        GateResult(
            gate=name,
            decision="not-checked",
            required=False,
            expected="not looked at",
            seen="switched off in gates.off",
            source="configuration: gates.off",
            workload=None,
        )
        for name in dict.fromkeys(config.off)
        if not _is_on(name, config)
    ]


def _decide_by(config: GateConfig, results: list[GateResult]) -> list[GateResult]:
    return [
        result.model_copy(update={"required": False}) if result.gate in config.advisory else result
        for result in results
    ]


def _verdict(trial: TrialRecord, status: Any, why: str | None, results: list[GateResult]) -> Verdict:
    return Verdict(
        experiment=trial.experiment,
        setup=trial.setup,
        suite=trial.suite,
        repeat=trial.repeat,
        run=trial.run,
        status=status,
        reason=why,
        gates=results,
        windows=[],
    )


def _never_finished(folder: Path, why: str) -> Verdict:
    """The folder's place says which trial it would be: ``<experiment>/trials/<setup>/<suite>/r<k>-<run>``."""
    parts = ["unknown"] * 5 + list(folder.absolute().parts)
    match = _FOLDER.fullmatch(folder.name)
    return Verdict(
        experiment=parts[-5],
        setup=parts[-3],
        suite=parts[-2],
        repeat=int(match["repeat"]) if match else 0,
        run=match["run"] if match else "unknown",
        status="failed",
        reason=why,
        gates=[],
        windows=[],
    )
