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


rule tokenizer:
    output:
        PATHS.results / "data" / "{dataset}" / "tokenizer.json",
    log:
        LOGS / "tokenizer" / "{dataset}.log",
    params:
        names=lambda wildcards: names_of(wildcards.dataset),
        corpus=lambda wildcards: corpus_of(wildcards.dataset).model_dump(mode="json"),
        tokenizer=lambda wildcards: tokenizer_of(wildcards.dataset).model_dump(mode="json"),
    message:
        "Training the tokenizer of {wildcards.dataset} on the training split"
    localrule: True  # it needs the network, which cluster nodes often lack
    shell:
        "qkpipe tokenizer {params.names} > {log} 2>&1"


rule data:
    input:
        lambda wildcards: trained_tokenizer(wildcards.dataset),
    output:
        meta=PATHS.results / "data" / "{dataset}" / "meta.json",
    log:
        LOGS / "data" / "{dataset}.log",
    params:
        names=lambda wildcards: names_of(wildcards.dataset),
        corpus=lambda wildcards: corpus_of(wildcards.dataset).model_dump(mode="json"),
        tokenizer=lambda wildcards: tokenizer_of(wildcards.dataset).model_dump(mode="json"),
    message:
        "Fetching, verifying and sharding {wildcards.dataset}"
    localrule: True
    shell:
        "qkpipe data {params.names} > {log} 2>&1"
