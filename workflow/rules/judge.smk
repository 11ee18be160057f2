# What gates lean on: counters as setups read them, and the hit oracle's replay of what workloads sent.
JUDGING = (
    "counters",
    "setups",
    "workloads",
    "replay.py",
    "stats/oracle.py",
    "stats/logprobs.py",
    "config/rooflines.py",
    "stack/variants.py",
)
JUDGING_CODE = code_of("judge.py", "gates", *JUDGING)


rule judge:
    input:
        JUDGED,


# What a trial's own files say.
rule judge_trial:
    input:
        trial=TRIAL,
        rooflines=KNOWN_ROOFLINES,
        code=newest(JUDGING_CODE),
    output:
        OWN_VERDICT,
    log:
        "logs/judge_trial/{experiment}/{setup}/{suite}/r{repeat}-{run}.log",
    params:
        gates=lookup(within=config, dpath="gates"),
        modules=digest.of_names(JUDGING_CODE),
    message:
        "judge {wildcards.setup}, {wildcards.suite}, repeat {wildcards.repeat}"
    script:
        "../scripts/judge_trial.py"


# What only shows across the trials of one repeat.
rule judge_block:
    input:
        trials=of_block(TRIAL),
        verdicts=of_block(OWN_VERDICT),
        code=newest(JUDGING_CODE),
    output:
        BLOCK,
    log:
        "logs/judge_block/{experiment}/{suite}/r{repeat}-{block}.log",
    params:
        gates=lookup(within=config, dpath="gates"),
        modules=digest.of_names(JUDGING_CODE),
    message:
        "judge {wildcards.suite}, repeat {wildcards.repeat}, across setups"
    script:
        "../scripts/judge_block.py"


rule settle_verdict:
    input:
        own=OWN_VERDICT,
        block=block_path,
        code=code_of("judge.py"),
    output:
        VERDICT,
    log:
        "logs/settle_verdict/{experiment}/{setup}/{suite}/r{repeat}-{run}.log",
    message:
        "settle the verdict on {wildcards.setup}, {wildcards.suite}, repeat {wildcards.repeat}"
    script:
        "../scripts/settle_verdict.py"
