rule env:
    input:
        STAMP,


# Everything that trials wait for is named by its content: it is there, or it is missing, and never "changed". Snakemake
# would otherwise take a job of which an `ancient` input is made again for not worth a look of its own.
rule install_stack:
    input:
        script=ancient(program("install_stack.py")),
        definition=ancient([shown(path) for path in STACK_FILES]),
    output:
        STAMP,
    log:
        f"logs/install_stack/{EXPERIMENT.stack}.log",
    priority: 2 * len(PLAN) + 3
    message:
        f"install the stack {EXPERIMENT.stack}"
    shell:
        "{PYTHON:q} {input.script:q} {output:q} {log:q}"


# Without the stack as its input: on a machine that nothing is installed on, it is the doctor who says so.
rule doctor:
    log:
        f"logs/doctor/{EXPERIMENT.experiment}.log",
    params:
        results=str(RESULTS),
    script:
        "../scripts/doctor.py"
