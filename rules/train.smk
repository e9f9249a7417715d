# One job a run. A run is retrained when its arm's config hash (which covers the training code's version) or the data change,
# never because a script or a report was edited. A collapse is a result: the job succeeds.


rule train:
    input:
        meta=lambda wildcards: DATA_OF[wildcards.arm] / "meta.json",
    output:
        record=PATHS.run("{arm}", "{seed}").record,
        steps=PATHS.run("{arm}", "{seed}").table("steps"),
        layers=PATHS.run("{arm}", "{seed}").table("layers"),
        heads=PATHS.run("{arm}", "{seed}").table("heads"),
        routes=PATHS.run("{arm}", "{seed}").table("routes"),
        probe=PATHS.run("{arm}", "{seed}").table("probe"),
        events=PATHS.run("{arm}", "{seed}").table("events"),
        timing=PATHS.run("{arm}", "{seed}").table("timing"),
    log:
        LOGS / "train" / "{arm}" / "seed={seed}.log",
    benchmark:
        LOGS / "benchmark" / "train" / "{arm}" / "seed={seed}.tsv"
    params:
        config_hash=lambda wildcards: CONFIG_HASHES[wildcards.arm],
        schema=SCHEMA_VERSION,
    threads: RESOURCES.cpus * RANKS
    resources:
        **RUN_RESOURCES,
    group:
        shared_job("runs")
    message:
        "Training {wildcards.arm}, seed {wildcards.seed} (log: {log})"
    shell:
        "qkpipe train --arm {wildcards.arm} --seed {wildcards.seed} > {log} 2>&1"
