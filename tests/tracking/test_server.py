"""Many runs at once into an MLflow server on PostgreSQL that is stopped in their middle: `make test-tracking`."""

import json
import os
import shutil
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest

from project import ROOT
from qkpipe.config import RunKey
from qkpipe.paths import StudyPaths
from qkpipe.store import mlflow_mirror
from qkpipe.store.mlflow_mirror import LOGGED, metrics, mirror
from qkpipe.store.parquet import read_table
from qkpipe.telemetry.schema import TABLES
from qkpipe.telemetry.writer import PartWriter
from store.synthetic import SHAPES, write_run, write_study

pytestmark = pytest.mark.tracking

URI = "http://127.0.0.1:5057"
PID = Path("/tmp/qkpipe-tracking/mlflow.pid")
RUNS = 16


def server(action):
    done = subprocess.run(
        [ROOT / "tests" / "tracking" / "local_server", action], capture_output=True, text=True
    )
    if done.returncode == 75:
        pytest.skip(done.stderr)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def tracking():
    server("start")
    yield URI
    server("stop")


def stop_mlflow():
    os.killpg(int(PID.read_text()), signal.SIGKILL)
    time.sleep(0.5)


class Slowly:
    """Writes a finished run's telemetry again, as training would: part by part, then the run's own files."""

    def __init__(self, paths, study, key, finished):
        self._run, self._finished = paths.run(key.arm, key.seed), finished.run(key.arm, key.seed)
        self._scratch = paths.scratch(study.run_id(key))
        self._scratch.folder.mkdir(parents=True)
        self._scratch.identity.write_text(
            json.dumps({"scale": study.scale, "arm": key.arm, "seed": key.seed})
        )
        self._writer = PartWriter(self._scratch, study.run_id(key))
        self._rows = {
            name: read_table(self._finished.table(name)).drop_columns("run_id").to_pylist() for name in TABLES
        }

    def write(self, first, end):
        for name, rows in self._rows.items():
            for row in rows:
                if first <= row["step"] < end:
                    self._writer.add(name, **row)
        self._writer.flush()

    def finish(self):
        self._writer.finish(self._run)
        shutil.copy(self._finished.record, self._run.record)
        shutil.rmtree(self._scratch.folder)


def missing(client, experiment, paths, study, keys):
    """Points of Parquet that the server does not have, or has with another value, by run."""
    runs = {run.data.tags["qkpipe.run_id"]: run for run in client.search_runs([experiment.experiment_id])}
    assert len(runs) == len(keys)
    lost = {}
    for key in keys:
        run = runs[study.run_id(key)]
        assert run.info.status == "FINISHED"
        points = metrics({name: read_table(paths.run(key.arm, key.seed).table(name)) for name in LOGGED})
        stored = {
            (name, point.step, str(point.value))
            for name in points["key"].unique()
            for point in client.get_metric_history(run.info.run_id, name)
        }
        if gone := {(row.key, row.step, str(row.value)) for row in points.itertuples()} - stored:
            lost[key] = gone
    return lost


def test_sixteen_runs_at_once_lose_no_metric_though_the_server_stops(tracking, tmp_path, monkeypatch, caplog):
    from mlflow import MlflowClient

    monkeypatch.setattr(mlflow_mirror, "WATCH_SECONDS", 0.2)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    study = write_study(tmp_path / "config")
    source, paths = StudyPaths("tiny", tmp_path / "source"), StudyPaths("tiny", tmp_path / "live")
    paths.results.mkdir(parents=True)
    keys = [
        RunKey(arm, seed) for arm in list(SHAPES)[: RUNS // 4] for seed in (3, 4, 5, 6)
    ]  # seeds of no target
    for key in keys:
        write_run(source, study, key, SHAPES[key.arm])
    runs = [Slowly(paths, study, key, source) for key in keys]

    def in_parallel(work):
        threads = [threading.Thread(target=work, args=(run,)) for run in runs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    stopped, one_pass = threading.Event(), mlflow_mirror._mirror_once

    def until_stopped(*args, **options):
        if stopped.is_set():
            raise KeyboardInterrupt
        return one_pass(*args, **options)

    monkeypatch.setattr(mlflow_mirror, "_mirror_once", until_stopped)
    watcher = threading.Thread(target=mirror, args=(paths, study, tracking), kwargs={"watch": True})
    watcher.start()
    client = MlflowClient(tracking)

    def shown():
        experiment = client.get_experiment_by_name("qkpipe-tiny")
        return len(client.search_runs([experiment.experiment_id])) if experiment else 0

    in_parallel(lambda run: run.write(0, 150))
    end = time.monotonic() + 120
    while shown() < RUNS:
        assert time.monotonic() < end, "the runs were not followed"
        time.sleep(0.2)
    stop_mlflow()
    in_parallel(lambda run: run.write(150, 300))  # the runs do not notice
    while "trying again" not in caplog.text:
        assert time.monotonic() < end + 60, "the mirror did not say that the server is away"
        time.sleep(0.1)
    server("start")
    in_parallel(lambda run: run.write(300, 400))
    in_parallel(Slowly.finish)
    stopped.set()
    watcher.join(120)
    monkeypatch.setattr(mlflow_mirror, "_mirror_once", one_pass)

    mirror(paths, study, tracking, verify=True)
    experiment = client.get_experiment_by_name("qkpipe-tiny")
    assert missing(client, experiment, paths, study, keys) == {}
    assert mirror(paths, study, tracking, verify=True) == 0, "a second sync has nothing to do"

    client.rename_experiment(experiment.experiment_id, "gone")
    assert mirror(paths, study, tracking) == RUNS, "from Parquet alone"
    assert missing(client, client.get_experiment_by_name("qkpipe-tiny"), paths, study, keys) == {}
