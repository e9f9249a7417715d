import json
import shutil

import pytest

from qkpipe.config import RunKey
from qkpipe.errors import BadInput
from qkpipe.paths import StudyPaths
from qkpipe.store.scan import scan, union
from store.synthetic import write_runs, write_study


@pytest.fixture
def small(tmp_path):
    study = write_study(tmp_path / "config")
    paths = StudyPaths("tiny", tmp_path)
    write_runs(paths, study, [RunKey("guard", 0), RunKey("fp32", 1), RunKey("fp32", 0)])
    return paths, study


def _edit(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_completed_runs_come_in_the_configs_order(small):
    found = scan(*small)
    assert [run.key for run in found.completed] == [RunKey("fp32", 0), RunKey("fp32", 1), RunKey("guard", 0)]
    assert found.completed[2].record["fire_step"] == 120
    assert found.excluded == ()


def test_empty_study_has_no_runs(tmp_path):
    found = scan(StudyPaths("tiny", tmp_path), write_study(tmp_path / "config"))
    assert found.completed == () and found.excluded == ()


def test_run_of_another_config_is_excluded_with_both_hashes(small):
    paths, study = small
    _edit(paths.run("fp32", 1).record, config_hash="f" * 64)
    found = scan(paths, study)
    assert [run.key for run in found.completed] == [RunKey("fp32", 0), RunKey("guard", 0)]
    (stale,) = found.excluded
    assert (stale.arm, stale.seed, stale.path) == ("fp32", 1, "runs/fp32/seed=1")
    assert stale.reason == f"config hash {'f' * 12}, now {study.resolve('fp32', 1).config_hash[:12]}"


def test_every_other_reason_is_named(small):
    paths, study = small
    paths.run("fp32", 0).table("heads").unlink()
    paths.run("fp32", 1).record.write_text("{torn")
    _edit(paths.run("guard", 0).record, schema_version=0)
    shutil.copytree(paths.run("guard", 0).folder, paths.run("gone", 3).folder)
    shutil.copytree(paths.run("guard", 0).folder, paths.runs / "guard" / "seed=x")
    shutil.copytree(paths.run("guard", 0).folder, paths.superseded("guard", 0, "abc"))
    found = scan(paths, study)
    assert found.completed == ()
    reasons = {run.path: run.reason for run in found.excluded}
    assert reasons == {
        "runs/fp32/seed=0": "heads.parquet missing",
        "runs/fp32/seed=1": "run.json is not readable (JSONDecodeError)",
        "runs/gone/seed=3": "its arm is not in arms.yaml any more",
        "runs/guard/seed=0": "schema version 0, now 1",
        "runs/guard/seed=x": "the folder's seed is not a number",
        "superseded/guard/seed=0-abc": "superseded by a changed config",
    }


def test_requested_runs_must_be_there(small):
    paths, study = small
    assert len(union(paths, study, [RunKey("fp32", 0)]).completed) == 3
    _edit(paths.run("fp32", 1).record, config_hash="f" * 64)
    with pytest.raises(
        BadInput, match=r"missing: fp32/seed=1 \(config hash ffffffffffff, now .*\), faulty/seed=0; run"
    ):
        union(paths, study, [RunKey("fp32", 0), RunKey("fp32", 1), RunKey("faulty", 0)])
