"""A tiny real study through Snakemake: killed, gone on with, looked at, asked again."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pyarrow.parquet as pq
import pytest

from project import ROOT, run_snakemake, snakemake_command
from qkpipe.config import load_study
from qkpipe.paths import RUN_TABLES, StudyPaths
from qkpipe.report.figures import FIGURES
from workflow.test_workflow import TINY, job_counts

STUDY = load_study(TINY)
CONFIG = ("--config", f"study={TINY}")


def kill_while_training(folder):
    """Start the study, and kill Snakemake and all its jobs as soon as a run is under way."""
    process = subprocess.Popen(
        snakemake_command(folder, "core", *CONFIG),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        while not list(folder.glob("scratch/*/parts/*")):
            assert process.poll() is None, "the study ended before it could be killed"
            time.sleep(0.02)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    """The finished study, after a kill -9 in the middle and the same command again."""
    folder = tmp_path_factory.mktemp("study")
    kill_while_training(folder)
    assert not StudyPaths("tiny", folder).report.exists()
    done = run_snakemake(folder, "core", *CONFIG)
    assert done.returncode == 0, done.stdout + done.stderr
    return StudyPaths("tiny", folder)


def test_a_killed_study_ends_as_an_unbroken_one(paths, tmp_path):
    """Every table but `timing`, bit for bit; so the runs that the kill hit went on exactly."""
    from qkpipe.train.run import train_run

    unbroken = StudyPaths("tiny", tmp_path)
    shutil.copytree(paths.results / "data", unbroken.results / "data")
    for key in STUDY.requested("core"):
        train_run(STUDY.resolve(key.arm, key.seed), unbroken)
        for table in set(RUN_TABLES) - {"timing"}:
            broken, whole = (p.run(key.arm, key.seed).table(table).read_bytes() for p in (paths, unbroken))
            assert broken == whole, f"{key.arm}/seed={key.seed}/{table}"
    assert not list(paths.root.glob("scratch/*"))


def test_everything_promised_is_there(paths):
    runs = pq.read_table(paths.analysis("runs")).to_pylist()
    assert {(run["arm"], run["seed"]) for run in runs} == {
        (key.arm, key.seed) for key in STUDY.requested("core")
    }
    assert {run["seed_role"] for run in runs} == {"tuning"}
    assert [run["arm"] for run in runs if run["fire_step"] is not None] == ["guard", "guard"]
    page = paths.report.read_text(encoding="utf-8")
    assert all(arm in page for arm in STUDY.runnable)
    assert "http" not in page.replace("http://www.w3.org", ""), "the report must stand alone"
    for name in ("dissociation", "probe", "guard"):
        assert paths.figure(name).stat().st_size > 1000
        assert paths.figure(name, "png").read_bytes().startswith(b"\x89PNG")
    assert json.loads(paths.effective_config.read_text())["scale"] == "tiny"


def test_the_database_answers(paths, qkpipe):
    status, out, err = qkpipe(
        "--config", TINY, "--root", paths.root, "query",
        "select arm, count(*) as steps from steps join runs using (run_id) group by arm order by arm",
    )  # fmt: skip
    assert (status, err) == (0, "")
    assert [line.split() for line in out.splitlines()] == [
        ["arm", "steps"], ["faulty", "40"], ["fp32", "40"], ["guard", "40"], ["probe_on", "40"],
    ]  # fmt: skip


def test_the_runs_are_in_mlflow(paths):
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{paths.root}/mlflow.db")
    experiment = client.get_experiment_by_name("qkpipe-tiny")
    names = {run.info.run_name for run in client.search_runs([experiment.experiment_id])}
    assert names == {f"{key.arm}/seed={key.seed}" for key in STUDY.requested("core")}


def test_a_second_call_has_nothing_to_do(paths):
    again = run_snakemake(paths.root, "core", *CONFIG)
    assert "Nothing to be done" in again.stdout + again.stderr


def test_an_edited_figure_is_drawn_again_and_nothing_trains(paths):
    counts = job_counts(run_snakemake(paths.root, "-n", "core", "--forcerun", "figure", *CONFIG))
    assert counts["figure"] == len(FIGURES)
    assert "train" not in counts and "runs" not in counts


def test_new_seeds_run_only_what_is_new(paths):
    counts = job_counts(run_snakemake(paths.root, "-n", "core", *CONFIG, "seeds=[0,5]"))
    assert counts["train"] == len(STUDY.runnable)


def test_a_changed_arm_trains_alone_and_the_old_runs_are_kept(paths, tmp_path):
    changed, results = tmp_path / "study", tmp_path / "results"
    shutil.copytree(TINY, changed)
    arms = changed / "arms.yaml"
    arms.write_text(arms.read_text().replace("threshold: 0.01", "threshold: 0.02"))
    shutil.copytree(paths.root, results, symlinks=True)
    mine = StudyPaths("tiny", results)
    old = mine.run("guard", 0).record.read_text()

    config = ("--config", f"study={changed}")
    assert job_counts(run_snakemake(results, "-n", "core", *config))["train"] == 2
    assert mine.run("guard", 0).record.read_text() == old, "a dry run moves nothing"
    done = run_snakemake(results, mine_relative(mine, "guard", 0), *config)
    assert done.returncode == 0, done.stdout + done.stderr
    kept = mine.superseded("guard", 0, json.loads(old)["config_hash"][:8])
    assert (kept / "run.json").read_text() == old
    assert sorted(path.name for path in kept.iterdir()) == sorted(
        p.name for p in mine.run("guard", 0).outputs
    )
    assert (
        json.loads(mine.run("guard", 0).record.read_text())["config_hash"] != json.loads(old)["config_hash"]
    )
    assert str(kept.relative_to(results)) in done.stdout + done.stderr


def mine_relative(paths, arm, seed):
    return paths.run(arm, seed).record.relative_to(paths.root)


def test_old_seeds_stay_in_the_tables(paths, tmp_path):
    """Asked for seed 0 alone, the table still has seed 1, which is finished and of the same config."""
    shutil.copytree(paths.root, tmp_path / "results", symlinks=True)
    mine = StudyPaths("tiny", tmp_path / "results")
    mine.analysis("runs").unlink()
    done = run_snakemake(mine.root, "results/tiny/analysis/runs.parquet", *CONFIG, "seeds=[0]")
    assert done.returncode == 0, done.stdout + done.stderr
    assert set(pq.read_table(mine.analysis("runs"))["seed"].to_pylist()) == {0, 1}


def test_a_live_run_is_left_alone(tmp_path):
    """The second process for a run says who holds it, and stops."""
    from filelock import FileLock

    run, mine = STUDY.resolve("faulty", 0), StudyPaths("tiny", tmp_path)
    lock = mine.scratch(run.run_id).lock
    lock.parent.mkdir(parents=True)
    folders = ["--config", str(TINY), "--root", str(tmp_path)]
    with FileLock(lock):
        second = subprocess.run(
            [sys.executable, "-m", "qkpipe", "train", "--arm", "faulty", "--seed", "0", *folders],
            cwd=ROOT, capture_output=True, text=True, timeout=120,
        )  # fmt: skip
    assert second.returncode == 2
    assert second.stderr.count("\n") == 1
    assert "faulty/seed=0" in second.stderr and str(lock) in second.stderr
