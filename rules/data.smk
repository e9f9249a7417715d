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
    input:
        trained_tokenizer(DATA.name),
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


# Data sets that an arm names instead of the scale's. They have a rule of their own so that the scale's stays as it was: were its
# command another, every run made so far would be trained again.
rule tokenizer:
    output:
        PATHS.results / "data" / "{dataset}" / "tokenizer.json",
    log:
        LOGS / "tokenizer" / "{dataset}.log",
    params:
        corpus=lambda wildcards: corpus_of(wildcards.dataset).model_dump(mode="json"),
        tokenizer=lambda wildcards: tokenizer_of(wildcards.dataset).model_dump(mode="json"),
    message:
        "Training the tokenizer of {wildcards.dataset} on the training split"
    localrule: True
    shell:
        "qkpipe tokenizer --dataset {wildcards.dataset} > {log} 2>&1"


rule named_data:
    input:
        lambda wildcards: trained_tokenizer(wildcards.dataset),
    output:
        meta=PATHS.results / "data" / "{dataset}" / "meta.json",
    log:
        LOGS / "data" / "{dataset}.log",
    params:
        corpus=lambda wildcards: corpus_of(wildcards.dataset).model_dump(mode="json"),
        tokenizer=lambda wildcards: tokenizer_of(wildcards.dataset).model_dump(mode="json"),
    message:
        "Fetching, verifying and sharding {wildcards.dataset}"
    localrule: True
    shell:
        "qkpipe data --dataset {wildcards.dataset} > {log} 2>&1"


ruleorder: data > named_data
