# What a person looks at.


rule figure:
    input:
        lambda wildcards: [PATHS.analysis(name) for name in (FIGURES | ASKED_FIGURES)[wildcards.figure]],
        code=source("src", "qkpipe", "report", "{figure}.py"),
    output:
        svg=report(
            PATHS.figure("{figure}"),
            caption="../workflow/report/{figure}.rst",
            category="Figures",
        ),
        png=PATHS.figure("{figure}", "png"),
    wildcard_constraints:
        figure="|".join(FIGURES | ASKED_FIGURES),
    log:
        LOGS / "figure" / "{figure}.log",
    message:
        "Drawing figure {wildcards.figure}"
    shell:
        "qkpipe figure {wildcards.figure} > {log} 2>&1"


rule report:
    input:
        expand(rules.figure.output, figure=FIGURES),
        rules.runs.output,
        rules.contrasts.output,
        rules.probe.output,
        ANALYSED,
        DECLARED,
        DEVICE_TABLES,
        comparison,
        code=source("src", "qkpipe", "report", "html.py"),
        template=source("workflow", "report", "report.html.j2"),
        device=source("workflow", "report", "device.html.j2"),
    output:
        PATHS.report,
    log:
        LOGS / "report.log",
    message:
        "Writing the report"
    shell:
        "qkpipe report --template {input.template:q} > {log} 2>&1"


rule mirror:
    input:
        rules.runs.output.runs,
    output:
        touch(MIRRORED),
    log:
        LOGS / "mirror.log",
    message:
        "Mirroring the runs into MLflow (mlflow.db)"
    localrule: True  # one writer, where the user runs `mlflow ui`
    shell:
        "qkpipe mirror > {log} 2>&1"
