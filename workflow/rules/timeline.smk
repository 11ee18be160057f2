# Captures for timelines: jobs of their own, with servers of their own. No trial and no table of results depends on them.
TIMELINES = "results/{experiment}/timelines"
TIMELINE_SETUPS = EXPERIMENT.timeline_setups()
TIMELINE_TABLES = ["captures", "events", "decomposition", "counted", "cost"]
COUNTED = "results/{experiment}/tables/ttft_parts.{ending}"
TIMELINE_FIGURES = ["request", "copy_rate", "decomposition"]
REDUCED = [f"{TIMELINES}/captures/{{setup}}/tables/{name}.parquet" for name in TIMELINE_TABLES]
COLLECTED = [f"{TIMELINES}/tables/{name}.parquet" for name in TIMELINE_TABLES]
PERFETTO = "reports/perfetto/{experiment}-{setup}.json.gz"
TIMELINE_FIGURE = [f"{TIMELINES}/figures/{{figure}}.{ending}" for ending in ("svg", "narrow.svg", "png")]
TIMELINE_REPORT = ["reports/{experiment}-timelines.html", "reports/{experiment}-timelines.pdf"]
TIMELINE_REPORT.append(f"{TIMELINES}/summary.md")


rule timelines:
    input:
        of_experiment(TIMELINE_REPORT) if TIMELINE_SETUPS else [],


rule capture_timeline:
    input:
        script=ancient(program("capture_timeline.py")),
        stamp=ancient(STAMP),
        model=ancient(MODEL),
    output:
        CAPTURE,
    log:
        "logs/capture_timeline/{experiment}/{setup}.log",
    threads: TRIAL_THREADS
    resources:
        host=1,
        gpu=GPUS,
    params:
        stack=STACK_DIGEST,
        setup=lookup(within=config, dpath="setups/{setup}"),
        timelines=lookup(within=config, dpath="timelines"),
    message:
        "capture {wildcards.setup} for timelines"
    shell:
        "{PYTHON:q} {input.script:q} {output:q} {log:q}"


rule reduce_timeline:
    input:
        capture=CAPTURE,
        rooflines=[str(path) for path in rooflines.files(RESULTS)],
        code=code_of("timeline", "counters", "setups"),
    output:
        REDUCED,
    log:
        "logs/reduce_timeline/{experiment}/{setup}.log",
    message:
        "reduce the capture of {wildcards.setup}"
    script:
        "../scripts/reduce_timeline.py"


rule write_perfetto:
    input:
        tables=REDUCED,
        code=code_of("timeline"),
    output:
        PERFETTO,
    log:
        "logs/write_perfetto/{experiment}/{setup}.log",
    message:
        "write the events of {wildcards.setup} for Perfetto"
    script:
        "../scripts/write_perfetto.py"


rule collect_timelines:
    input:
        tables=[path for name in TIMELINE_SETUPS for path in of_experiment(REDUCED, setup=name)],
        code=code_of("timeline"),
    output:
        COLLECTED,
    log:
        "logs/collect_timelines/{experiment}.log",
    message:
        "collect the timelines' tables"
    script:
        "../scripts/collect_timelines.py"


rule draw_timeline_figure:
    input:
        tables=COLLECTED,
        code=code_of("timeline", "figures/parts"),
    output:
        svg=TIMELINE_FIGURE[0],
        narrow=TIMELINE_FIGURE[1],
        png=TIMELINE_FIGURE[2],
    log:
        "logs/draw_timeline_figure/{experiment}/{figure}.log",
    wildcard_constraints:
        figure=one_of(TIMELINE_FIGURES),
    message:
        "draw {wildcards.figure} of the timelines"
    script:
        "../scripts/draw_timeline_figure.py"


rule write_timeline_report:
    input:
        tables=COLLECTED,
        figures=of_experiment(TIMELINE_FIGURE, figure=TIMELINE_FIGURES),
        perfetto=of_experiment(PERFETTO, setup=TIMELINE_SETUPS),
        code=code_of("timeline", "report", "figures/parts", "config/references.py"),
    output:
        TIMELINE_REPORT,
    log:
        "logs/write_timeline_report/{experiment}.log",
    params:
        title=config["title"] or EXPERIMENT.experiment,
        setups=TIMELINE_SETUPS,
        missing=[name for name in config["setups"] if name not in TIMELINE_SETUPS],
        compare_with=config["compare_with"],
    message:
        "write what the timelines show"
    script:
        "../scripts/write_timeline_report.py"


# What the engine's counters alone make of the trials' own TTFT: no profiler was near them.
rule counted_timelines:
    input:
        of_experiment(COUNTED, ending=["parquet", "csv"]),


rule count_timelines:
    input:
        trials=of_trials(TRIAL, TRIALS),
        verdicts=of_trials(VERDICT, TRIALS),
        code=code_of("timeline", "counters", "setups"),
    output:
        parquet=expand(COUNTED, ending="parquet", allow_missing=True),
        csv=expand(COUNTED, ending="csv", allow_missing=True),
    log:
        "logs/count_timelines/{experiment}.log",
    message:
        "take the trials' TTFT apart by counters"
    script:
        "../scripts/count_timelines.py"
