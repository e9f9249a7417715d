# What all rules share: the validated study, its paths, and which runs are asked for. Parsed again in every cluster job, so
# it imports no torch.

import os
import re
import shlex
import sys
from pathlib import Path

from qkpipe.config import load_study
from qkpipe.config.effective import digest
from qkpipe.errors import BadInput
from qkpipe.paths import StudyPaths
from qkpipe.store.scan import scan
from qkpipe.telemetry.schema import SCHEMA_VERSION
from qkpipe.train.supersede import supersede_all

# The targets as typed, for the jobs of a cluster: see on_command_line().
os.environ.setdefault("QKPIPE_TARGETS", "")


envvars:
    "QKPIPE_TARGETS",


OPTIONS = {"scale", "seeds", "study", "device_check", "archive"}


def validated():
    """The study that --config asks for, and the seeds that replace the declared ones (None: as declared)."""
    for key in config:
        if key not in OPTIONS:
            raise BadInput(f"--config {key}: unknown key; allowed: {', '.join(sorted(OPTIONS))}")
    seeds = config.get("seeds")
    if seeds is not None:  # snakemake hands the members of a list over as text
        if not isinstance(seeds, list) or not seeds or not all(str(seed).isdecimal() for seed in seeds):
            raise BadInput(f"--config seeds={seeds}: must be a list of seeds, such as 'seeds=[0,1,2]'")
        seeds = [int(seed) for seed in seeds]
    asked = config.get("device_check")
    if asked is not None and not Path(asked).is_file():
        raise BadInput(f"--config device_check={asked}: no such file; `make device-check` writes it on a machine with a GPU")
    if "://" not in config.get("archive", "://"):
        raise BadInput(f"--config archive={config['archive']}: must be an address, such as s3://bucket/folder")
    folder = Path(config.get("study", Path(workflow.basedir) / "workflow" / "config"))
    study = load_study(folder, config.get("scale"))
    for target in study.config.targets:
        for run in study.requested(target, seeds):
            study.resolve(run.arm, run.seed)
    return study, seeds


def source(*parts):
    """A file of this repository as an input: a step whose code changes is done again, and nothing before it."""
    return Path(workflow.basedir).joinpath(*parts)


def kernels_are_cold():
    """Whether numerics changed since this study's kernels were compiled.

    Not a job of the workflow: its output would be an input of every run, and compiling anew would train anew.
    """
    sources = source("src", "qkpipe", "numerics").glob("*.py")
    return not COMPILED.exists() or any(s.stat().st_mtime > COMPILED.stat().st_mtime for s in sources)


def on_command_line():
    """Targets as typed; known only once the workflow is parsed. A cluster job, whose own command line names a file, has them
    from the Snakemake that submitted it, through the environment.
    """
    if workflow.is_main_process:
        os.environ["QKPIPE_TARGETS"] = " ".join(workflow.dag_settings.targets)
    return os.environ["QKPIPE_TARGETS"].split()


def asked_targets():
    """Targets of the study on the command line, else the default one, unless only `portability` is asked for."""
    asked = [name for name in STUDY.config.targets if name in on_command_line()]
    return asked or ([] if portability_is_asked() else ["core"])


def portability_is_asked():
    return bool(PORTABILITY) and "portability" in on_command_line()


def records(targets):
    """run.json of every run of the targets, in order and once."""
    runs = dict.fromkeys(run for target in targets for run in STUDY.requested(target, SEEDS))
    return [PATHS.run(run.arm, run.seed).record for run in runs]


def tabled_records(wildcards):
    """run.json of the requested runs and of every finished run of the current config: nothing drops out of the tables."""
    finished = [run.paths.record for run in scan(PATHS, STUDY).completed]
    twice = compared(PATHS) if portability_is_asked() else []
    return list(dict.fromkeys([*records(asked_targets()), *twice, *finished]))


def compared(paths):
    """run.json of the runs that are made on two devices, in the folders of the first (`PATHS`) or of the second set."""
    return [paths.run(run.arm, run.seed).record for run in STUDY.compared(SEEDS)]


def second_records(wildcards):
    """run.json of the second set, once it is clear that a cluster would train it elsewhere."""
    settings = workflow.resource_settings
    default, given = settings._parsed_default_resources, settings._parsed_overwrite_resources
    if workflow.is_main_process and "slurm_partition" in default:

        def place(rule):  # resources as they were written
            asked = {**default, **given.get(rule, {})}
            return {key: asked[key].raw for key in WHERE if key in asked}

        if place("train") == place("train_second"):
            sys.exit(
                "qkpipe: error: profiles/slurm/config.yaml: set-resources.train_second: must send the second set elsewhere than "
                f"train; give it another {' or '.join(WHERE)}"
            )
    return compared(SECOND)


def comparison(wildcards):
    """The tables and the figure of two devices, where they are asked for; else a report shows them as they are."""
    return [*PORTABILITY_TABLES, PATHS.figure("portability")] if portability_is_asked() else []


def archived(*files, **options):
    """Those files below the archive's address, under the names they have here."""
    return [storage(f"{ARCHIVE}/{file.as_posix()}", **options) for file in files]


# Where the result file of `make device-check` is: results/device_check.json, or --config device_check=FILE.
def device_check():
    return [DEVICE_CHECK] if DEVICE_CHECK.exists() else []


def corpus_of(dataset):
    return STUDY.config.corpora[DATASETS[dataset][0]]


def tokenizer_of(dataset):
    return STUDY.config.tokenizers[DATASETS[dataset][1]]


def trained_tokenizer(dataset):
    """The file of a tokenizer that has to be trained first, if it has."""
    return [PATHS.results / "data" / dataset / "tokenizer.json"] if tokenizer_of(dataset).kind == "bpe" else []


try:
    STUDY, SEEDS = validated()
except BadInput as error:
    sys.exit(f"qkpipe: error: {error}")

PATHS = StudyPaths(STUDY.scale)
RESOURCES = STUDY.scale_config.resources
RANKS = STUDY.scale_config.parallel.ranks
RESOLVED = {arm: STUDY.resolve(arm, 0) for arm in STUDY.runnable}
DATA = PATHS.data(STUDY.scale_config.corpus, STUDY.scale_config.tokenizer)
# Folder of an arm's data, and the names of its corpus and tokenizer by that folder's name.
DATA_OF = {arm: PATHS.data(run.corpus_name, run.tokenizer_name) for arm, run in RESOLVED.items()}
DATASETS = {DATA.name: (STUDY.scale_config.corpus, STUDY.scale_config.tokenizer)}
DATASETS |= {DATA_OF[arm].name: (run.corpus_name, run.tokenizer_name) for arm, run in RESOLVED.items()}
LOGS = Path("logs") / STUDY.scale
CONFIG_HASHES = {arm: run.config_hash for arm, run in RESOLVED.items()}
COMPILED = PATHS.results / "kernels.compiled"
# Figures, and the analyses each reads.
FIGURES = {
    "dissociation": ("dissociation", "curves", "runs"),
    "probe": ("probe_curves",),
    "guard": ("guard_curves", "guard_firing", "dissociation"),
    "isolation": ("isolation",),
    "generality": ("factorial",),
    "entry": ("entry", "entry_runs", "entry_predictors"),
    "probe_controls": ("probe_controls",),
    "loci": ("loci",),
    "sweep": ("threshold_sweep",),
    "capping": ("capping", "capping_curves"),
    "entropy": ("onsets", "entropy_heads"),
    "residual": ("residual", "law_runs", "law", "law_collapse", "law_settings"),
    "contest": ("contest", "contest_roc"),
    "survival": ("survival",),
    "sensitivity": ("sensitivity",),
    "repairs": ("repairs",),
    "horizon": ("horizon", "horizon_curves"),
    "remedies": ("remedies",),
}
# Analyses of `runs` and of the signals on the telemetry's clock, and the tables each writes.
ANALYSES = {
    "residual": ("residual",),
    "isolation": ("isolation",),
    "generality": ("factorial", "generality"),
    "entry": ("entry", "entry_runs", "entry_predictors"),
    "loci": ("loci",),
    "sweep": ("threshold_sweep", "threshold_transfer"),
    "capping": ("capping", "capping_curves"),
    "entropy": ("onsets", "onset_order", "entropy_heads"),
    "law": ("law_runs", "law", "law_collapse", "law_settings", "same_mode", "prediction"),
    "contest": ("contest", "contest_runs", "contest_roc"),
    "survival": ("survival",),
    "sensitivity": ("sensitivity",),
    "repairs": ("repairs",),
    "horizon": ("horizon", "horizon_curves"),
    "remedies": ("remedies",),
}
# The second device, if the study names one: its folders, the tables about it, and what on a cluster makes it another one.
PORTABILITY = STUDY.config.portability
SECOND = PATHS.second(PORTABILITY.device) if PORTABILITY else None
PORTABILITY_TABLES = [PATHS.analysis(name) for name in ("portability", "portability_arms", "portability_curves")]
WHERE = ("slurm_partition", "gpu_model", "constraint")
ASKED_FIGURES = {"portability": ("portability", "portability_curves")} if PORTABILITY else {}
ANALYSED = [PATHS.analysis(table) for tables in ANALYSES.values() for table in tables]
ARCHIVE = config.get("archive", "").rstrip("/")
MIRRORED = PATHS.results / "mlflow.mirrored"
CLAIMS = STUDY.folder / "claims.yaml"
# What judges the declared claims, the guard's threshold and the regime.
DECLARED = [PATHS.analysis("claims"), PATHS.table("threshold"), PATHS.table("regime")] if CLAIMS.exists() else []
DEVICE_CHECK = Path(config.get("device_check", "results/device_check.json"))
DEVICE_TABLES = [
    PATHS.table(name)
    for name in ("device", "device_checks", "device_benchmark", "device_residual", "device_training")
]

# What a run asks for, all ranks together: `qkpipe train` starts them on one node.
RUN_RESOURCES = {
    "mem_mb": RESOURCES.mem_mb * RANKS,
    "runtime": RESOURCES.runtime_min,
    "cpus_per_task": RESOURCES.cpus * RANKS,
    **({"gpu": RESOURCES.gpus * RANKS} if RESOURCES.gpus else {}),
}


def shared_job(name):
    """The group of runs that need no GPU and can share a job of a cluster; how many, says group-components of the profile."""
    return None if RESOURCES.gpus else f"{STUDY.scale}_{name}"


# Rules say `qkpipe COMMAND`; which interpreter, study and scale that means is said here, where it triggers no rerun.
shell.prefix(
    f"set -euo pipefail; qkpipe() ( exec {shlex.quote(sys.executable)} -m qkpipe "
    f"--config {shlex.quote(str(STUDY.folder))} --scale {STUDY.scale} \"$@\" ); "
)
