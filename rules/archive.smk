# Finished runs and the database on an object store, by Snakemake's storage plugins (docs/growth.md):
#   snakemake archive --config archive=s3://bucket/qkpipe


if ARCHIVE:

    rule archive_runs:
        input:
            lambda wildcards: archived(*tabled_records(wildcards), retrieve=False),

    rule archive:
        input:
            rules.archive_runs.input,
            archived(PATHS.database, retrieve=False),

    rule archive_run:
        input:
            rules.train.output,
        output:
            archived(*PATHS.run("{arm}", "{seed}").outputs),
        log:
            LOGS / "archive" / "{arm}" / "seed={seed}.log",
        message:
            "Copying {wildcards.arm}, seed {wildcards.seed} to {ARCHIVE}"
        localrule: True  # it needs the network
        shell:
            "cp {input:q} $(dirname {output[0]:q}) > {log} 2>&1"

    rule archive_database:
        input:
            PATHS.database,
        output:
            archived(PATHS.database),
        log:
            LOGS / "archive_database.log",
        message:
            "Copying the database to {ARCHIVE}"
        localrule: True
        shell:
            "cp {input:q} {output:q} > {log} 2>&1"
