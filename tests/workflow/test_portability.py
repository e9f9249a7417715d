"""The tiny study on this machine twice: the comparison must say that nothing differs."""

import pytest

from project import ROOT, run_snakemake
from qkpipe.config import load_study
from qkpipe.paths import StudyPaths
from qkpipe.store.parquet import read_table
from workflow.test_workflow import TINY, job_counts

CONFIG = ("--config", f"study={TINY}")
STUDY = load_study(TINY)
SLURM = ("--profile", ROOT / "profiles" / "slurm")


@pytest.mark.timeout(900)
def test_one_machine_twice_is_identical_and_nothing_is_overwritten(tmp_path):
    done = run_snakemake(tmp_path, "portability", *CONFIG, timeout=800)
    assert done.returncode == 0, done.stdout + done.stderr
    paths = StudyPaths("tiny", tmp_path)
    rows = read_table(paths.analysis("portability")).to_pylist()
    assert [(row["arm"], row["seed"]) for row in rows] == [(k.arm, k.seed) for k in STUDY.compared()]
    assert all(row["identical"] and row["same_environment"] and row["agree"] for row in rows)
    assert all(row["sigma_gap"] == 0 and row["first_bit_step"] is None for row in rows)
    for key in STUDY.compared():
        first, second = (folder.run(key.arm, key.seed).record for folder in (paths, paths.second("second")))
        assert first != second and first.read_bytes() == second.read_bytes()
    assert 'id="portability"' in paths.report.read_text()
    again = run_snakemake(tmp_path, "portability", *CONFIG)
    assert "Nothing to be done" in again.stdout + again.stderr


def test_no_study_target_makes_a_second_set(tmp_path):
    assert "train_second" not in job_counts(run_snakemake(tmp_path, "-n", "all", *CONFIG))


def test_a_cluster_needs_a_second_partition(tmp_path):
    refused = run_snakemake(tmp_path, "-n", "portability", *SLURM, *CONFIG)
    said = [line for line in refused.stderr.splitlines() if line.startswith("qkpipe: error:")]
    assert refused.returncode != 0
    assert len(said) == 1 and "set-resources.train_second" in said[0]
    given = ("--set-resources", "train_second:slurm_partition=other")
    counts = job_counts(run_snakemake(tmp_path, "-n", "portability", *SLURM, *given, *CONFIG))
    assert counts["train"] == counts["train_second"] == 3
