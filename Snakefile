# qkpipe: from a pinned corpus to trained runs, tables, figures, a report and a database.
#
#   snakemake core                                    the default study at the default scale
#   snakemake all --config scale=micro 'seeds=[0,1]'  another target, scale or list of seeds
#   snakemake -n core                                 what would run
#   snakemake --profile slurm all                     on a cluster (after `make profiles`)
#
# Every arm, seed and size is data in workflow/config; `study=DIR` names another such folder.

from snakemake.utils import min_version

min_version("9.27")

report: "workflow/report/workflow.rst"

include: "rules/common.smk"


wildcard_constraints:
    arm="|".join(map(re.escape, STUDY.runnable)),
    seed=r"0|[1-9]\d*",
    dataset="|".join(map(re.escape, DATASETS)),


# One target rule for each target of study.yaml, such as `core` and `all`.
for _target in STUDY.config.targets:

    rule:
        name: _target
        default_target: _target == "core"
        message: f"{_target}: report {PATHS.report}, database {PATHS.database}"
        input:
            records([_target]),
            config=PATHS.effective_config,
            contrasts=PATHS.table("contrasts"),
            database=PATHS.database,
            report=PATHS.report,
            mirrored=MIRRORED,


include: "rules/data.smk"
include: "rules/train.smk"
include: "rules/analysis.smk"
include: "rules/tables.smk"
include: "rules/report.smk"
include: "rules/portability.smk"
include: "rules/benchmark.smk"
include: "rules/archive.smk"


# A job's outputs are deleted before it starts, so finished runs of another config go aside first. Dry runs and the nested
# calls of cluster jobs never come here.
onstart:
    for moved in [*supersede_all(PATHS, STUDY), *(supersede_all(SECOND, STUDY) if SECOND else [])]:
        logger.info(f"The config of a finished run has changed; it is kept as {moved}")
    if kernels_are_cold():
        logger.info("Compiling the CPU kernels once, before runs start in parallel")
        shell("qkpipe warm-up")
        COMPILED.parent.mkdir(parents=True, exist_ok=True)
        COMPILED.touch()
