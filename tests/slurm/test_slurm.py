"""The study through a real Slurm, and what goes wrong on clusters: `make test-slurm`."""

import os
import re
import signal
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from qkpipe.config import load_study
from qkpipe.paths import StudyPaths
from slurm.accidents import ARMS, TINY, Submission, slurm, wait_for

# Seconds each on an idle machine, minutes on a busy one: most of it is interpreters starting.
pytestmark = [pytest.mark.slurm, pytest.mark.timeout(2400)]


def state(job):
    """What Slurm says of a job, by key."""
    return dict(re.findall(r"(\w+)=(\S*)", slurm("scontrol", "show", "job", str(job))))


def test_the_core_study_is_three_jobs(tmp_path):
    """Eight runs in two jobs, then everything that reads them, some forty steps, in a third."""
    study, paths = load_study(TINY), StudyPaths("tiny", tmp_path)
    core = Submission(tmp_path, "core", "--group-components", "tiny_runs=4", "--config", f"study={TINY}")
    try:
        assert core.end(2300) == 0, core.said
    finally:
        core.interrupt()
    assert len(core.jobs) == 3, core.said
    runs = pq.read_table(paths.analysis("runs")).to_pylist()
    assert {(run["arm"], run["seed"]) for run in runs} == {
        (key.arm, key.seed) for key in study.requested("core")
    }
    assert paths.report.exists() and paths.database.exists()
    logs = [Path(name) for name in re.findall(r"\(log: (\S+/slurm_logs/\S+\.log)\)", core.said)]
    assert len(logs) == 3 and all(log.exists() for log in logs)


def test_the_second_set_of_a_portability_trains_in_the_partition_it_is_given(tmp_path):
    """Three runs in one job of each partition, then what compares them."""
    second = load_study(TINY).portability.device
    both = Submission(
        tmp_path, "portability", "--config", f"study={TINY}",
        "--group-components", "tiny_runs=3", "tiny_second=3",
        "--set-resources", "train_second:slurm_partition=backfill",
    )  # fmt: skip
    try:
        assert both.end(2300) == 0, both.said
    finally:
        both.interrupt()
    partitions = [state(job)["Partition"] for job in both.jobs]
    assert sorted(partitions) == ["backfill", "main", "main"], both.said
    paths = StudyPaths("tiny", tmp_path)
    compared = pq.read_table(paths.analysis("portability")).to_pylist()
    assert len(compared) == 3 and all(pair["identical"] for pair in compared)
    assert (paths.results / "portability" / second / "runs" / "faulty" / "seed=0").is_dir()
    assert "portability" in paths.report.read_text()


def test_two_runs_share_a_job_and_the_table_over_them_waits_for_it(accident):
    study = accident(gpus=0)
    table = study.submit("--group-components", "tiny_runs=2", files=[study.paths.analysis("runs")])
    assert table.end() == 0, table.said
    runs, after = table.jobs
    assert state(runs)["TimeLimit"] == "00:10:00", "the minutes of both, as they go one after the other"
    assert state(runs)["NumCPUs"] == "1"
    assert state(after)["StartTime"] >= state(runs)["EndTime"]
    assert sorted(pq.read_table(study.paths.analysis("runs"))["arm"].to_pylist()) == sorted(ARMS)


def test_a_failing_job_is_named_and_in_a_job_of_its_own_takes_nobody_with_it(accident):
    """Two runs in one job; the broken one says what is wrong, where, and where its log is."""
    study = accident(gpus=0)
    study.scratch().folder.mkdir(parents=True)
    study.scratch().checkpoint.write_bytes(b"torn")
    records = [study.record(arm) for arm in ARMS]
    both = study.submit("--group-components", "tiny_runs=2", files=records)
    assert both.end() != 0
    assert len(both.jobs) == 1
    assert "logs/tiny/train/first/seed=0.log" in both.said
    assert (
        f"{study.scratch().checkpoint.relative_to(study.paths.root)}: not a readable checkpoint" in both.said
    )

    apart = study.submit("--group-components", "tiny_runs=1", files=records)
    assert apart.end() != 0
    assert study.record("second").exists() and not study.record().exists()


def test_a_cancelled_job_is_submitted_anew_and_goes_on(accident, unbroken):
    study = accident()
    run = study.submit(retries=1)
    environment = Path(f"/proc/{study.trained()}/environ").read_bytes().decode()
    assert re.search(r"\0CUDA_VISIBLE_DEVICES=\d\0", environment), (
        "the GPU that was asked for reaches the job"
    )
    slurm("scancel", str(run.job()))
    assert run.end() == 0, run.said
    assert f"SLURM-job '{run.job()}' failed, SLURM status is: 'CANCELLED'" in run.said
    assert len(run.jobs) == 2
    assert study.contents() == unbroken.contents()


def test_a_job_at_its_time_limit_says_so_and_keeps_its_checkpoint(accident, qkpipe):
    study = accident(runtime_min=1)
    run = study.submit()
    os.kill(study.trained(), signal.SIGSTOP)  # a run that hangs
    assert run.end() != 0
    assert "SLURM status is: 'TIMEOUT'" in run.said
    assert re.search(r"slurm_logs/\S+\.log", run.said.partition("'TIMEOUT'")[2]), run.said
    assert study.scratch().checkpoint.exists()
    _, out, _ = qkpipe("--config", study.config, "--root", study.paths.root, "status")
    assert "unfinished  first/seed=0" in out


def test_a_drained_node_is_waited_for(accident):
    study = accident()
    slurm("scontrol", "update", "nodename=localhost", "state=drain", "reason=test")
    try:
        run = study.submit()
        job = run.job()
        wait_for(lambda: state(job).get("Reason") not in (None, "None"), "a reason to wait")
        assert state(job)["JobState"] == "PENDING"
    finally:
        slurm("scontrol", "update", "nodename=localhost", "state=resume")
    assert run.end() == 0, run.said
    assert study.record().exists()


def test_a_preempted_job_is_requeued_resumes_and_ends_bit_for_bit_the_same(accident, unbroken):
    """A job of a more urgent partition takes its CPUs; Slurm starts it again under the same number."""
    study = accident(cpus=40)
    run = study.submit("--default-resources", "slurm_partition=backfill")
    study.trained()
    slurm(
        "sbatch",
        "--partition",
        "urgent",
        "--cpus-per-task",
        "40",
        "--output",
        os.devnull,
        "--wrap",
        "sleep 1",
    )
    assert run.end() == 0, run.said
    assert run.jobs == [run.job()]
    assert state(run.job())["Restarts"] == "1"
    resumed = re.search(
        r"resuming at step (\d+)", (study.paths.root / "logs/tiny/train/first/seed=0.log").read_text()
    )
    assert int(resumed[1]) > 0
    assert study.contents() == unbroken.contents()


def test_an_orphans_duplicate_is_refused_and_the_orphan_ends_well(accident, unbroken):
    """Snakemake is killed, its job lives on; the same command submits a second job for the run, which finds it locked."""
    study = accident()
    first = study.submit()
    orphan = study.trained()
    first.kill()
    os.kill(orphan, signal.SIGSTOP)
    duplicate = study.submit()
    assert duplicate.end() != 0
    assert "held by a live process training first/seed=0" in duplicate.said
    os.kill(orphan, signal.SIGCONT)
    wait_for(study.record().exists, "the orphan's end")
    assert study.contents() == unbroken.contents()
    after = study.submit()
    assert after.end() == 0, after.said
    assert study.contents() == unbroken.contents()
