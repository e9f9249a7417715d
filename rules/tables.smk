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


# A study folder without claims.yaml is an exploration: it declares nothing, and has none of these tables.
if DECLARED:

    rule claims:
        input:
            rules.runs.output,
            claims=CLAIMS,
            code=source("src", "qkpipe", "analysis", "claims.py"),
        output:
            PATHS.analysis("claims"),
            PATHS.analysis("claim_parts"),
            PATHS.analysis("claim_exclusions"),
        log:
            LOGS / "claims.log",
        message:
            "Testing the declared claims on confirmatory seeds"
        shell:
            "qkpipe analyse claims > {log} 2>&1"

    rule threshold:
        input:
            rules.runs.output,
            code=source("src", "qkpipe", "analysis", "threshold.py"),
        output:
            PATHS.table("threshold"),
        log:
            LOGS / "threshold.log",
        message:
            "Setting the guard's threshold from healthy runs"
        shell:
            "qkpipe analyse threshold > {log} 2>&1"

    rule regime:
        name: "regime_table"
        input:
            rules.runs.output,
            claims=CLAIMS,
            code=source("src", "qkpipe", "analysis", "regime.py"),
        output:
            PATHS.table("regime"),
        log:
            LOGS / "regime.log",
        message:
            "Judging candidate regimes on tuning seeds"
        shell:
            "qkpipe analyse regime > {log} 2>&1"


rule database:
    input:
        rules.runs.output,
        rules.dissociation.output,
        rules.probe.output,
        rules.guard.output,
        rules.contrasts.output,
        rules.signals.output,
        ANALYSED,
        DECLARED,
        DEVICE_TABLES,
        comparison,
        code=source("src", "qkpipe", "store", "database.py"),
    output:
        PATHS.database,
    log:
        LOGS / "database.log",
    message:
        "Building the database"
    shell:
        "qkpipe database > {log} 2>&1"
