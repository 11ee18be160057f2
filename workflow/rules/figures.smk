rule figures:
    input:
        JUDGED,
        of_experiment(FIGURE, figure=FIGURES),


rule draw_figure:
    input:
        tables=TABLE,
        code=code_of("figures", "tables"),
    output:
        svg=report(
            FIGURE[0],
            caption="../report/figure.rst",
            category=figure_category,
            labels=figure_labels,
        ),
        narrow=FIGURE[1],
        png=FIGURE[2],
    log:
        "logs/draw_figure/{experiment}/{figure}.log",
    wildcard_constraints:
        figure=one_of(FIGURES),
    params:
        caption=figure_caption,
    message:
        "draw {wildcards.figure}"
    script:
        "../scripts/draw_figure.py"
