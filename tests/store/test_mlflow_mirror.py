"""The mirror against a real MLflow store in a temporary folder; one store for the module, creating it takes seconds."""

import json
import shutil
import sqlite3

import pytest

from qkpipe.analysis import runs
from qkpipe.config import RunKey
from qkpipe.errors import BadInput
from qkpipe.paths import RUN_TABLES, StudyPaths
from qkpipe.store.mlflow_mirror import _mirror_once, flatten, mirror
from qkpipe.telemetry.schema import TABLES
from qkpipe.telemetry.writer import PartWriter
from store.synthetic import SHAPES, write_run, write_runs, write_study

mlflow = pytest.importorskip("mlflow")

KEYS = [RunKey("fp32", 0), RunKey("splice_mlp", 0), RunKey("guard", 1)]


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """(paths, study, tracking uri, client) after one mirror of three runs."""
    root = tmp_path_factory.mktemp("mirror")
    study = write_study(root / "config")
    paths = StudyPaths("tiny", root)
    write_runs(paths, study, KEYS)
    shutil.rmtree(root / "scratch")
    runs.aggregate(paths, study, KEYS)
    uri = f"sqlite:///{root / 'mlflow.db'}"
    assert mirror(paths, study, uri) == len(KEYS)
    return paths, study, uri, mlflow.MlflowClient(uri)


def _runs(client):
    experiment = client.get_experiment_by_name("qkpipe-tiny")
    return {run.info.run_name: run for run in client.search_runs([experiment.experiment_id])}


def _curve(client, name, key):
    history = client.get_metric_history(_runs(client)[name].info.run_id, key)
    return [(point.step, point.value) for point in sorted(history, key=lambda point: point.step)]


def test_runs_are_named_tagged_and_closed(store):
    _, study, _, client = store
    found = _runs(client)
    assert set(found) == {f"{key.arm}/seed={key.seed}" for key in KEYS}
    guard, config = found["guard/seed=1"], study.resolve("guard", 1)
    assert guard.info.status == "FINISHED"
    tags = guard.data.tags
    assert (tags["qkpipe.run_id"], tags["qkpipe.config_hash"]) == (config.run_id, config.config_hash)
    assert (tags["qkpipe.fire_step"], tags["qkpipe.collapsed"], tags["qkpipe.seed_role"]) == (
        "125",
        "False",
        "tuning",
    )
    assert found["splice_mlp/seed=0"].data.tags["qkpipe.collapsed"] == "True"
    assert guard.data.params["model.d_model"] == "16"
    assert guard.data.params["interventions.0.threshold"] == "30.0"


def test_curves_are_those_of_the_parquet_files(store):
    _, _, _, client = store
    steps = [step for step, _ in _curve(client, "fp32/seed=0", "sigma_q_1")]
    assert steps == list(range(0, 400, 10))
    assert dict(_curve(client, "fp32/seed=0", "val_loss")) == dict.fromkeys((0, 100, 200, 300), 2.4)
    loss = _curve(client, "splice_mlp/seed=0", "loss")
    assert loss[-1][0] == 300 and loss[-1][1] != loss[-1][1]  # the NaN that ended it


def test_a_second_mirror_adds_nothing(store):
    paths, study, uri, client = store
    before = {name: (run.info.end_time, run.data.metrics.keys()) for name, run in _runs(client).items()}
    points = len(_curve(client, "guard/seed=1", "loss"))
    assert mirror(paths, study, uri) == 0
    assert {
        name: (run.info.end_time, run.data.metrics.keys()) for name, run in _runs(client).items()
    } == before
    assert len(_curve(client, "guard/seed=1", "loss")) == points


def test_an_interrupted_mirror_is_completed_without_double_points(store):
    paths, study, uri, client = store
    run = _runs(client)["guard/seed=1"].info.run_id
    points = _curve(client, "guard/seed=1", "loss")
    client.set_tag(run, "qkpipe.mirrored_step", "200")
    client.update_run(run, status="RUNNING")
    assert mirror(paths, study, uri) == 1
    assert _curve(client, "guard/seed=1", "loss") == points
    assert _runs(client)["guard/seed=1"].info.status == "FINISHED"


def test_live_run_is_followed_and_then_closed(store):
    """One that no target asks for."""
    paths, study, _, client = store
    config = study.resolve("qk_norm", 7)
    scratch = paths.scratch(config.run_id)
    scratch.folder.mkdir(parents=True)
    scratch.identity.write_text(json.dumps({"scale": "tiny", "arm": "qk_norm", "seed": 7}))
    writer = PartWriter(scratch, config.run_id)
    for end in (20, 40):
        for step in range(end - 20, end):
            writer.add("steps", step=step, loss=3.0)
            if step % 10 == 0:
                writer.add("layers", step=step, layer=0, sigma_q_1=1.0)
        writer.flush()
        assert _mirror_once(client, paths, study, live=True) == 1
        assert _runs(client)["qk_norm/seed=7"].info.status == "RUNNING"
    assert [step for step, _ in _curve(client, "qk_norm/seed=7", "sigma_q_1")] == [0, 10, 20, 30]
    assert _mirror_once(client, paths, study, live=True) == 0
    write_run(paths, study, RunKey("qk_norm", 7), SHAPES["qk_norm"])
    assert _mirror_once(client, paths, study, live=True) == 1
    assert _runs(client)["qk_norm/seed=7"].info.status == "FINISHED"
    assert len(_curve(client, "qk_norm/seed=7", "sigma_q_1")) == 40


def test_sync_finds_points_that_the_tags_say_are_there(tmp_path):
    """Points deleted from the store behind the mirror's back; a second sync has nothing to do."""
    study, paths = write_study(tmp_path / "config"), StudyPaths("tiny", tmp_path)
    write_runs(paths, study, [RunKey("fp32", 0)])
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    client = mlflow.MlflowClient(uri)
    assert mirror(paths, study, uri) == 1
    whole = _curve(client, "fp32/seed=0", "loss")
    with sqlite3.connect(tmp_path / "mlflow.db") as database:
        assert database.execute("DELETE FROM metrics WHERE step > 100").rowcount > 100
    assert mirror(paths, study, uri) == 0
    assert mirror(paths, study, uri, verify=True) == 1
    assert _curve(client, "fp32/seed=0", "loss") == whole
    assert mirror(paths, study, uri, verify=True) == 0


def test_a_server_that_is_away_is_one_line(store, monkeypatch):
    paths, study, _, _ = store
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    with pytest.raises(BadInput, match=r"http://127.0.0.1:9.*qkpipe sync") as error:
        mirror(paths, study)
    assert "\n" not in str(error.value)


def test_flatten():
    nested = {"a": 1, "b": {"c": [{"d": None}, 2]}, "e": [], "f": {}}
    assert flatten(nested) == {"a": 1, "b.c.0.d": None, "b.c.1": 2, "e": [], "f": {}}


def test_the_tables_the_mirror_reads_exist():
    assert {"steps", "layers", "heads"} <= set(RUN_TABLES) == set(TABLES)
