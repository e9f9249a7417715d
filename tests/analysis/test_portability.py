import shutil

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest

from qkpipe.analysis import portability
from qkpipe.config import load_study
from qkpipe.errors import BadInput
from qkpipe.paths import StudyPaths
from qkpipe.report import figures
from qkpipe.store.parquet import read_table
from store.synthetic import SHAPES, write_run, write_study

SECTION = "portability: { arms: [fp32, faulty, guard], role: tuning, n_seeds: 2 }\n"


@pytest.fixture
def twice(tmp_path):
    """(paths, study): six runs, and the same once more."""
    write_study(tmp_path / "config")
    with (tmp_path / "config" / "study.yaml").open("a") as text:
        text.write(SECTION)
    study, paths = load_study(tmp_path / "config"), StudyPaths("tiny", tmp_path)
    for key in study.compared():
        for folder in (paths, paths.second("second")):
            write_run(folder, study, key, SHAPES[key.arm])
    return paths, study


def table(paths, name="portability"):
    return read_table(paths.analysis(name)).to_pylist()


def edit(path, change):
    frame = pq.read_table(path)
    data = frame.to_pandas()
    change(data)
    pq.write_table(type(frame).from_pandas(data, schema=frame.schema, preserve_index=False), path)


def test_one_machine_twice_is_identical(twice):
    paths, study = twice
    portability.build(paths, study)
    rows = table(paths)
    assert [(row["arm"], row["seed"]) for row in rows] == [(k.arm, k.seed) for k in study.compared()]
    for row in rows:
        assert row["identical"] and row["same_environment"] and row["agree"] and row["fire_agree"]
        assert row["first_bit_step"] is row["parted_step"] is None
        assert row["sigma_gap"] == row["val_loss_difference"] == 0
    arm = next(row for row in table(paths, "portability_arms") if row["arm"] == "faulty")
    assert (arm["n"], arm["agree"], arm["identical"], arm["both_collapsed"]) == (2, 2, 2, 2)
    assert arm["agree_low"] == pytest.approx(0.025**0.5) and arm["agree_high"] == 1
    assert {row["side"] for row in table(paths, "portability_curves")} == {"first", "second"}
    assert portability.is_current(paths, study)
    assert all(path.exists() for path in figures.draw("portability", paths))


def test_a_perturbed_second_side_is_told_apart(twice):
    paths, study = twice
    second = paths.second("second")

    def loss(frame):
        frame.loc[30, "loss"] = np.nextafter(frame.loc[30, "loss"], 9)
        frame.loc[50, "loss"] += 0.002

    def sigma(frame):
        frame.loc[frame["step"] == 40, "sigma_q_1"] *= 1.5
        frame.loc[frame["step"] == 390, "sigma_q_1"] *= 9  # after the collapse: not looked at

    edit(second.run("faulty", 0).table("steps"), loss)
    edit(second.run("faulty", 0).table("layers"), sigma)
    write_run(second, study, next(k for k in study.compared() if k.arm == "fp32"), SHAPES["faulty"])
    portability.build(paths, study)
    rows = {(row["arm"], row["seed"]): row for row in table(paths)}
    row = rows["faulty", 0]
    assert not row["identical"] and row["agree"]
    assert (row["first_bit_step"], row["parted_step"]) == (30, 50)
    assert row["sigma_gap"] == pytest.approx(np.log(1.5))
    assert (rows["fp32", 0]["first_verdict"], rows["fp32", 0]["second_verdict"]) == ("held", "collapsed")
    arm = next(row for row in table(paths, "portability_arms") if row["arm"] == "fp32")
    assert (arm["agree"], arm["n"], arm["second_collapsed"]) == (1, 2, 1)


def test_a_shorter_or_broken_side_differs_where_it_ends():
    a = np.array([1.0, 2.0, np.nan])
    assert portability.first_true(a, a.copy(), portability._differs) is None
    assert portability.first_true(a, a[:2], portability._apart) == 2
    assert portability.first_true(a, np.array([1.0, np.nan, np.nan]), portability._apart) == 1
    assert portability.first_true(np.array([0.0]), np.array([-0.0]), portability._differs) == 0
    empty = pd.DataFrame({"step": [], "sigma_q": []})
    assert portability.sigma_gap(empty, empty, None) is None


def test_what_cannot_be_compared_is_refused(twice, synthetic):
    paths, study = twice
    with pytest.raises(BadInput, match="portability: missing"):
        portability.build(*synthetic)
    record = paths.second("second").run("guard", 1).record
    record.write_text(record.read_text().replace("d" * 64, "e" * 64))
    with pytest.raises(BadInput, match="data hash eeeeeeeeeeee"):
        portability.build(paths, study)
    shutil.rmtree(paths.second("second").runs)
    with pytest.raises(BadInput, match="no run that"):
        portability.build(paths, study)


def test_unknown_arm(tmp_path):
    write_study(tmp_path)
    with (tmp_path / "study.yaml").open("a") as text:
        text.write(SECTION.replace("fp32", "fp31"))
    with pytest.raises(BadInput, match=r"portability.arms: unknown name 'fp31'; did you mean 'fp32'"):
        load_study(tmp_path)
