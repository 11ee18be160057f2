"""``snakemake --lint``, less two pieces of advice that don't fit here.

A conda environment for each rule: engines have environments of their own, made by the workflow (``envs/``). No
variables from outside in shell commands: jobs run with the interpreter that runs snakemake, and as a parameter its path
would measure everything again wherever the folder is moved.
"""

import re
import subprocess
import sys

UNWANTED = ("Specify a conda environment or container", "directly uses variable PYTHON from outside")

text = ""
looked = True
for snakefile in ("workflow/Snakefile", "workflow/bench.smk"):
    command = [sys.executable, "-m", "snakemake", "--snakefile", snakefile, "--lint"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    said = done.stdout + done.stderr
    looked &= "Lints for " in said or "Congratulations" in said
    text += said
rule = ""
found = []
for line in text.splitlines():
    if line.startswith("Lints for "):
        rule = line.removeprefix("Lints for ").rstrip(":")
    elif re.match(r"    \* ", line) and not any(advice in line for advice in UNWANTED):
        found.append(f"{rule}: {line.strip(' *:')}")
if found or not looked:
    print("\n".join(found) if looked else text)
sys.exit(bool(found) or not looked)
