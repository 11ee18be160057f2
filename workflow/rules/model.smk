rule model:
    input:
        of_experiment(MODEL),


rule make_model:
    input:
        script=ancient(program("make_model.py")),
        stamp=ancient(STAMP),
    output:
        MODEL,
    log:
        "logs/make_model/{experiment}.log",
    priority: 2 * len(PLAN) + 2
    message:
        "make the model folder"
    shell:
        "{PYTHON:q} {input.script:q} {output:q} {log:q}"
