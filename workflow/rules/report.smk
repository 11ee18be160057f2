rule report:
    input:
        JUDGED,
        of_experiment(REPORT),


rule write_report:
    input:
        tables=TABLE,
        figures=of_experiment(FIGURE, figure=FIGURES),
        code=code_of("report", "figures", "tables", "stats", "config/references.py", "config/pitfalls.py"),
    output:
        html=REPORT[0],
        pdf=REPORT[1],
        summary=REPORT[2],
    log:
        "logs/write_report/{experiment}.log",
    params:
        config=config,
    message:
        "write the report"
    script:
        "../scripts/write_report.py"
