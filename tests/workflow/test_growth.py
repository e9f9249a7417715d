"""Thousands of runs: planning, looking and counting stay quick. Times are this machine's CPU seconds, others' load aside."""

import json
import os
import resource
import subprocess
import sys

import duckdb
import pytest

from project import ROOT, run_snakemake
from qkpipe.analysis import runs
from qkpipe.config import RunKey
from qkpipe.paths import StudyPaths
from qkpipe.store import database
from store.synthetic import SHAPES, write_run, write_study
from workflow.test_workflow import TINY, job_counts

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

RUNS = 2_000


def children_cpu():
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_a_dry_run_of_2000_runs_takes_under_20_s(tmp_path):
    seeds = f"seeds={list(range(RUNS // 4))}".replace(" ", "")
    before = children_cpu()
    assert (
        job_counts(run_snakemake(tmp_path, "-n", "core", "--config", f"study={TINY}", seeds))["train"] == RUNS
    )
    assert children_cpu() - before < 20


def test_status_of_2000_runs_takes_under_2_s(tmp_path):
    study, paths = write_study(tmp_path / "config"), StudyPaths("tiny", tmp_path)
    write_run(paths, study, RunKey("faulty", 0), SHAPES["faulty"])
    first = paths.run("faulty", 0)
    record = json.loads(first.record.read_text())
    for seed in range(1, RUNS):
        run = paths.run("faulty", seed)
        run.folder.mkdir()
        for name in os.listdir(first.folder):
            os.link(first.folder / name, run.folder / name)
        run.record.unlink()
        run.record.write_text(
            json.dumps(record | {"seed": seed, "run_id": study.run_id(RunKey("faulty", seed))})
        )
    command = [sys.executable, "-m", "qkpipe", "--config", tmp_path / "config", "--root", tmp_path, "status"]
    before = children_cpu()
    status = subprocess.run(
        [*command, "--seeds", ",".join(map(str, range(RUNS)))],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert children_cpu() - before < 2
    assert status.stdout == f"tiny: {RUNS} done, 0 running, 0 unfinished, {7 * RUNS} missing\n"


QUERIES = {
    "peak by arm": "select arm, max(max_logit) as peak from telemetry('{root}', 'heads') join runs using (run_id) "
    "group by arm",
    "curve of one run": "select step, max(max_logit) as logit from telemetry('{root}', 'heads') "
    "where run_id = '{run}' group by step order by step",
    # As the claims have it: the last step at which every head is finite.
    "last finite of every run": "select run_id, ln(arg_max(v, step)) as logit from (select run_id, step, "
    "max(max_logit) as v from telemetry('{root}', 'heads') group by run_id, step "
    "having bool_and(coalesce(isfinite(max_logit), false))) group by run_id",
}
ROWS = 100_000_000


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A hundred runs with a million rows of ``heads`` each: 6,945 steps of 12 layers with 12 heads."""
    root = tmp_path_factory.mktemp("large")
    study, paths = write_study(root / "config"), StudyPaths("tiny", root)
    keys = [RunKey(arm, seed) for arm in ("fp32", "faulty", "guard", "qk_norm") for seed in range(25)]
    for arm in dict.fromkeys(key.arm for key in keys):
        for key in (key for key in keys if key.arm == arm):
            write_run(paths, study, key, SHAPES[arm])
    runs.aggregate(paths, study, keys)
    rows = ROWS // len(keys)
    with duckdb.connect() as connection:
        connection.execute(
            f"create table heads as select (i // 144)::bigint as step, (i // 12 % 12)::bigint as layer, "
            f"(i % 12)::bigint as head, 30 * random() as max_logit, 30 * random() as max_logit_raw, "
            f"random() as entropy from range({rows}) t(i)"
        )
        for key in keys:
            target = paths.run(key.arm, key.seed).table("heads")
            connection.execute(
                f"copy (select '{study.run_id(key)}' as run_id, * from heads) to '{target}' (format parquet, codec zstd)"
            )
    database.build(paths, copy_limit=1_000_000)
    return study, paths


@pytest.mark.parametrize("question", QUERIES)
def test_a_hundred_million_rows_answer_in_seconds_and_bounded_memory(large, question):
    study, paths = large
    sql = QUERIES[question].format(root=paths.results, run=study.run_id(RunKey("guard", 3)))
    measured = (
        "import resource, sys; from qkpipe.cli import main; status = main(sys.argv[1:]); "
        "used = resource.getrusage(resource.RUSAGE_SELF); print(used.ru_utime + used.ru_stime, used.ru_maxrss, "
        "file=sys.stderr); sys.exit(status)"
    )
    command = [
        sys.executable,
        "-c",
        measured,
        "--config",
        paths.root / "config",
        "--root",
        paths.root,
        "query",
        sql,
    ]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr
    assert len(answer.stdout.splitlines()) == 1 + {"peak by arm": 4, "curve of one run": 6945}.get(
        question, 100
    )
    seconds, kilobytes = answer.stderr.split()
    assert float(seconds) < 30, "CPU seconds, over all cores"
    assert int(kilobytes) < 3e6
