rule probe:
    input:
        of_experiment(ROOFLINES),


# The ceilings of this machine's links, measured while nothing else runs. By name only: `snakemake probe`.
rule measure_rooflines:
    input:
        script=ancient(program("measure_rooflines.py")),
        stamp=ancient(STAMP),
        code=ancient([shown(path) for path in digest.source_files("probes")]),
    output:
        ROOFLINES,
    log:
        "logs/measure_rooflines/{experiment}.log",
    threads: TRIAL_THREADS
    resources:
        host=1,
        gpu=GPUS,
    message:
        "measure the rooflines of this machine"
    shell:
        "{PYTHON:q} {input.script:q} {output:q} {log:q}"
