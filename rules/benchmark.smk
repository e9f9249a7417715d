# How fast it is here. Not part of any study target: ask for it by `make bench`, on a machine at rest.


rule benchmark:
    output:
        table=PATHS.benchmark,
        svg=PATHS.figure("benchmark"),
        png=PATHS.figure("benchmark", "png"),
    log:
        LOGS / "benchmark.log",
    threads: workflow.cores
    message:
        "Timing the operators and a training step against their peers (every other job waits)"
    shell:
        "qkpipe bench 2>&1 | tee {log}"
