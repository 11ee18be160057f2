"""One file a check: is a trial's measurement what it claims to be?

A gate on one trial exports ``check(evidence) -> list[GateResult]``, a gate across the trials of a block exports
``check_block(evidences) -> dict[TrialKey, list[GateResult]]``; a module may have both. ``REQUIRED`` is whether it
decides. Adding a gate is adding a file; its name, with dashes, is the gate's name.
"""
