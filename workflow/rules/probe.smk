rule probe:
    input:
        of_experiment(ROOFLINES, host=HOST),


# The ceilings of this machine's links, measured while nothing else runs, once a host and boot: with the first trials, or
# by name (`snakemake probe`).
rule measure_rooflines:
    input:
        script=ancient(program("measure_rooflines.py")),
        stamp=ancient(STAMP),
        code=ancient(code_of("probes/ceilings.py", "probes/rooflines.py", "probes/transfer_engine.py")),
    output:
        ROOFLINES,
    log:
        "logs/measure_rooflines/{experiment}-{host}.log",
    priority: 2 * len(PLAN) + 2
    threads: TRIAL_THREADS
    resources:
        host=1,
        gpu=GPUS,
    message:
        "rooflines: what this machine's links can do"
    shell:
        "{PYTHON:q} {input.script:q} {output:q} {log:q}"
