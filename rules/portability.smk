# The same runs on a second device: another partition, another GPU. No part of any study target:
#   snakemake portability
#   snakemake --profile slurm portability      the second set goes where set-resources of train_second says


if PORTABILITY:

    rule portability:
        input:
            compared(PATHS),
            second_records,
            config=PATHS.effective_config,
            tables=PORTABILITY_TABLES,
            figure=PATHS.figure("portability"),
            database=PATHS.database,
            report=PATHS.report,
        message:
            f"portability: report {PATHS.report}, table {PATHS.analysis('portability')}"

    # Its own rule and not `train` with another folder: the command is a part of what a run is retrained for, and the profile
    # gives it other resources.
    rule train_second:
        input:
            meta=lambda wildcards: DATA_OF[wildcards.arm] / "meta.json",
        output:
            SECOND.run("{arm}", "{seed}").outputs,
        log:
            LOGS / "train_second" / "{arm}" / "seed={seed}.log",
        benchmark:
            LOGS / "benchmark" / "train_second" / "{arm}" / "seed={seed}.tsv"
        params:
            config_hash=lambda wildcards: CONFIG_HASHES[wildcards.arm],
            schema=SCHEMA_VERSION,
        threads: RESOURCES.cpus * RANKS
        resources:
            **RUN_RESOURCES,
        group:
            shared_job("second")
        message:
            "Training {wildcards.arm}, seed {wildcards.seed} on the second device (log: {log})"
        shell:
            "qkpipe train --second --arm {wildcards.arm} --seed {wildcards.seed} > {log} 2>&1"

    rule portability_tables:
        input:
            compared(PATHS),
            second_records,
            code=source("src", "qkpipe", "analysis", "portability.py"),
        output:
            PORTABILITY_TABLES,
        log:
            LOGS / "portability.log",
        params:
            config=digest(STUDY),
        message:
            "Comparing the runs of two devices"
        shell:
            "qkpipe analyse portability > {log} 2>&1"
