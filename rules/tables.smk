# Tables to read and to query.


rule contrasts:
    input:
        rules.runs.output,
        code=source("src", "qkpipe", "analysis", "contrasts.py"),
    output:
        parquet=PATHS.table("contrasts"),
        csv=report(
            PATHS.table("contrasts", "csv"),
            caption="../workflow/report/contrasts.rst",
            category="Tables",
        ),
    log:
        LOGS / "contrasts.log",
    message:
        "Comparing every arm with its twin and its parent, seed by seed"
    shell:
        "qkpipe analyse contrasts > {log} 2>&1"


rule database:
    input:
        rules.runs.output,
        rules.dissociation.output,
        rules.probe.output,
        rules.guard.output,
        rules.contrasts.output,
        code=source("src", "qkpipe", "store", "database.py"),
    output:
        PATHS.database,
    log:
        LOGS / "database.log",
    message:
        "Building the database"
    shell:
        "qkpipe database > {log} 2>&1"
