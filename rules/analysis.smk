# From run files to one table a question. `runs` is over requested and finished runs; the others read what it wrote.


rule runs:
    input:
        tabled_records,
        code=source("src", "qkpipe", "analysis", "runs.py"),
        measured=source("src", "qkpipe", "analysis", "measured.py"),
    output:
        runs=PATHS.analysis("runs"),
        curves=PATHS.analysis("curves"),
        exclusions=PATHS.analysis("exclusions"),
    log:
        LOGS / "runs.log",
    params:
        targets=lambda wildcards: " ".join(f"--target {name}" for name in asked_targets()),
        seeds="" if SEEDS is None else f"--seeds {','.join(map(str, SEEDS))}",
        config=digest(STUDY),
    message:
        "Judging every run: one row a run"
    shell:
        "qkpipe runs {params.targets} {params.seeds} > {log} 2>&1"


rule dissociation:
    input:
        rules.runs.output,
        code=source("src", "qkpipe", "analysis", "dissociation.py"),
    output:
        PATHS.analysis("dissociation"),
    log:
        LOGS / "dissociation.log",
    message:
        "Summarising every arm over its seeds"
    shell:
        "qkpipe analyse dissociation > {log} 2>&1"


rule probe:
    input:
        rules.runs.output,
        code=source("src", "qkpipe", "analysis", "probe.py"),
    output:
        curves=PATHS.analysis("probe_curves"),
        controls=PATHS.analysis("probe_controls"),
    log:
        LOGS / "probe.log",
    message:
        "Collecting the causal probe's curves and energies"
    shell:
        "qkpipe analyse probe > {log} 2>&1"


rule guard:
    input:
        rules.runs.output,
        code=source("src", "qkpipe", "analysis", "guard.py"),
    output:
        curves=PATHS.analysis("guard_curves"),
        firing=PATHS.analysis("guard_firing"),
    log:
        LOGS / "guard.log",
    message:
        "Collecting the anatomy of every live trigger"
    shell:
        "qkpipe analyse guard > {log} 2>&1"


rule signals:
    input:
        rules.runs.output,
        code=source("src", "qkpipe", "analysis", "signals.py"),
    output:
        PATHS.analysis("signals"),
    log:
        LOGS / "signals.log",
    message:
        "Putting every run's signals on one clock"
    shell:
        "qkpipe analyse signals > {log} 2>&1"


# One rule an analysis: isolation, entry, law, ...
for _analysis, _tables in ANALYSES.items():

    rule:
        name: f"analyse_{_analysis}"
        input:
            rules.runs.output,
            rules.signals.output,
            code=source("src", "qkpipe", "analysis", f"{_analysis}.py"),
        output:
            [PATHS.analysis(table) for table in _tables],
        log:
            LOGS / "analysis" / f"{_analysis}.log",
        params:
            name=_analysis,
        message:
            "Analysing: {params.name}"
        shell:
            "qkpipe analyse {params.name} > {log} 2>&1"
