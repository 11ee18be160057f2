"""Print what the doctor finds; a finding that keeps the experiment from running is an error."""

import sys
from pathlib import Path

from kvladder.plan import stored
from kvladder.plan.progress import Progress
from kvladder.stack.doctor import examine

with Progress(Path(snakemake.log[0])) as say:
    results = Path(snakemake.params.results)
    findings = examine(stored.read(results), results)
    for finding in findings:
        say(str(finding))
    sys.exit(any(finding.state == "fail" for finding in findings))
