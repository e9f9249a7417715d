# How fast it is here, and what a GPU showed.


# Not part of any study target: ask for it by `make bench`, on a machine at rest.
rule benchmark:
    input:
        device_check(),
    output:
        table=PATHS.benchmark,
        svg=PATHS.figure("benchmark"),
        png=PATHS.figure("benchmark", "png"),
    log:
        LOGS / "benchmark.log",
    params:
        device=f"--device-check {shlex.quote(str(DEVICE_CHECK))}" if DEVICE_CHECK.exists() else "",
    threads: workflow.cores
    message:
        "Timing the operators and a training step against their peers (every other job waits)"
    shell:
        "qkpipe bench {params.device} 2>&1 | tee {log}"


# Part of every report. Without a result file the tables are empty, and the report says that no GPU was measured.
rule device:
    input:
        device_check(),
        code=source("src", "qkpipe", "bench", "device.py"),
    output:
        DEVICE_TABLES,
    log:
        LOGS / "device.log",
    params:
        json=f"--json {shlex.quote(str(DEVICE_CHECK))}" if DEVICE_CHECK.exists() else "",
    message:
        "Reading what a GPU showed"
    shell:
        "qkpipe device {params.json} > {log} 2>&1"
