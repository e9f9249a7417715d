# The study as resolved, and the text it trains on.


rule effective_config:
    output:
        PATHS.effective_config,
    log:
        LOGS / "effective_config.log",
    params:
        digest=digest(STUDY),
    message:
        "Writing the resolved config of every arm"
    localrule: True
    shell:
        "qkpipe effective-config > {log} 2>&1"


rule data:
    output:
        meta=DATA / "meta.json",
    log:
        LOGS / "data.log",
    params:
        corpus=STUDY.config.corpora[STUDY.scale_config.corpus].model_dump(mode="json"),
        tokenizer=STUDY.config.tokenizers[STUDY.scale_config.tokenizer].model_dump(mode="json"),
    message:
        "Fetching, verifying and sharding the corpus"
    localrule: True  # it needs the network, which cluster nodes often lack
    shell:
        "qkpipe data > {log} 2>&1"
