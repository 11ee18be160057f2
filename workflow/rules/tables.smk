rule tables:
    input:
        JUDGED,
        of_experiment(TABLE),


rule build_tables:
    input:
        trials=of_trials(TRIAL, TRIALS),
        verdicts=of_trials(VERDICT, TRIALS),
        rooflines=KNOWN_ROOFLINES,
        code=code_of("tables", "stats"),
    output:
        [pattern.format(experiment="{experiment}") for pattern in TABLE],
    log:
        "logs/build_tables/{experiment}.log",
    params:
        baseline=lookup(within=config, dpath="baseline"),
    message:
        "build the tables"
    script:
        "../scripts/build_tables.py"
