# What a person looks at.


rule figures:
    input:
        rules.runs.output,
        rules.dissociation.output,
        rules.probe.output,
        rules.guard.output,
    output:
        svg=[
            report(
                PATHS.figure(name),
                caption=f"../workflow/report/{name}.rst",
                category="Figures",
            )
            for name in FIGURES
        ],
        png=[PATHS.figure(name, "png") for name in FIGURES],
    log:
        f"{LOGS}/figures.log",
    message:
        "Drawing the figures"
    shell:
        "qkpipe figures > {log} 2>&1"


rule report:
    input:
        rules.figures.output,
        rules.runs.output,
        rules.contrasts.output,
    output:
        PATHS.report,
    log:
        f"{LOGS}/report.log",
    message:
        "Writing the report"
    shell:
        "qkpipe report > {log} 2>&1"


rule mirror:
    input:
        rules.runs.output.runs,
    output:
        touch(MIRRORED),
    log:
        f"{LOGS}/mirror.log",
    message:
        "Mirroring the runs into MLflow (mlflow.db)"
    localrule: True  # one writer, where the user runs `mlflow ui`
    shell:
        "qkpipe mirror > {log} 2>&1"
