# By name it brings every setup up, also where (`start: folded`) no trial waits for that.
rule start:
    input:
        list(STARTS.values()),


rule start_setup:
    input:
        script=ancient(program("start_setup.py")),
        stamp=ancient(STAMP),
        model=ancient(MODEL),
        code=measuring_code,
    output:
        START,
    log:
        "logs/start_setup/{experiment}/{setup}-{start}.log",
    priority: 2 * len(PLAN) + 1
    threads: TRIAL_THREADS
    resources:
        host=1,
        gpu=GPUS,
    message:
        "start {wildcards.setup} once"
    shell:
        "{PYTHON:q} {input.script:q} {output:q} {log:q}"
