rule measure:
    input:
        of_trials(TRIAL, TRIALS),
        KNOWN_ROOFLINES,


# One job a trial: it starts and stops its own servers. What a trial depends on counts by content (`params`), and inputs
# are `ancient`: raw results that came from elsewhere, with whatever file times, are never measured again. For the same
# reason this is `shell`: with `script`, snakemake compares the script's time with the result's. A change of the command
# would measure everything again, so it stays as bare as it is.
rule measure_trial:
    input:
        script=ancient(program("measure_trial.py")),
        stamp=ancient(STAMP),
        model=ancient(MODEL),
        start=start_record,
        code=measuring_code,
    output:
        TRIAL,
    log:
        "logs/measure_trial/{experiment}/{setup}/{suite}/r{repeat}-{run}.log",
    priority: trial_priority
    threads: TRIAL_THREADS
    resources:
        host=1,
        gpu=GPUS,
    params:
        stack=STACK_DIGEST,
        code=code_digest,
    message:
        "measure {wildcards.setup}, {wildcards.suite}, repeat {wildcards.repeat} (run {wildcards.run})"
    shell:
        "{PYTHON:q} {input.script:q} {output:q} {log:q}"


# Parts of the experiment. A setup alone is judged by its own files; a suite across its setups as well.
for NAME in EXPERIMENT.setups:

    rule:
        name:
            f"setup_{NAME}"
        input:
            of_trials(TRIAL, [trial for trial in TRIALS if trial.setup == NAME]),
            of_trials(OWN_VERDICT, [trial for trial in TRIALS if trial.setup == NAME]),


for NAME in EXPERIMENT.suite_map():

    rule:
        name:
            f"suite_{NAME}"
        input:
            judged(trial for trial in TRIALS if trial.suite == NAME),


# Trials and bring-ups that failed are results and stay; this forgets them, so that the next run tries them again.
rule forget_failed:
    log:
        f"logs/forget_failed/{EXPERIMENT.experiment}.log",
    params:
        results=str(RESULTS),
    script:
        "../scripts/forget_failed.py"
