import pytest

from qkpipe.analysis import guard, runs
from qkpipe.paths import StudyPaths
from qkpipe.store.parquet import read_table


@pytest.fixture(scope="module")
def tables(synthetic):
    paths, study = synthetic
    curves, firing = guard.build(paths, study)
    return read_table(curves), read_table(firing)


def test_panel_holds_the_guarded_arm_and_what_it_is_compared_with(tables):
    curves = tables[0].to_pandas()
    assert tables[0].schema.equals(guard.GUARD_CURVES)
    roles = curves.drop_duplicates("arm").set_index("arm")["role"].to_dict()
    assert roles == {
        "guard": "triggered",
        "faulty": "unguarded",
        "fp32_stream": "twin",
        "qk_norm": "always_on",
    }
    assert set(curves["panel"]) == {"guard"} and set(curves["threshold"]) == {30.0}


def test_firing_and_lead_over_the_unguarded_collapse_of_the_same_seed(synthetic, tables):
    paths, _ = synthetic
    faulty = {
        row["seed"]: row["collapse_step"]
        for row in read_table(paths.analysis("runs")).to_pylist()
        if row["arm"] == "faulty"
    }
    assert tables[1].schema.equals(guard.GUARD_FIRING)
    rows = tables[1].to_pylist()
    assert [(row["arm"], row["seed"], row["fire_step"]) for row in rows] == [
        ("guard", 0, 120),
        ("guard", 1, 125),
    ]
    for row in rows:
        assert row["lead_steps"] == faulty[row["seed"]] - row["fire_step"] > 0
        assert (row["unguarded_arm"], row["unguarded_collapsed"], row["collapsed"]) == ("faulty", True, False)
        assert "layer 1, head 0" in row["fire_detail"]


def test_threshold_is_read_from_the_config(synthetic):
    _, study = synthetic
    assert guard.trigger_threshold(study.resolve("guard", 0)) == 30.0
    assert guard.trigger_threshold(study.resolve("splice_mlp", 0)) is None


def test_study_without_runs_gives_empty_tables(synthetic, tmp_path):
    _, study = synthetic
    paths = StudyPaths("tiny", tmp_path)
    runs.aggregate(paths, study, [])
    assert [read_table(path).num_rows for path in guard.build(paths, study)] == [0, 0]
