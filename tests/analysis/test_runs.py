import math
import os

import pytest

from qkpipe.analysis import runs
from qkpipe.analysis.verdict import judge, smooth
from qkpipe.config import RunKey
from qkpipe.errors import BadInput
from qkpipe.paths import StudyPaths
from qkpipe.store.parquet import read_table
from qkpipe.telemetry.schema import RUNS
from store.synthetic import SHAPES, losses, write_runs, write_study


@pytest.fixture(scope="module")
def rows(synthetic):
    paths, _ = synthetic
    table = read_table(paths.analysis("runs"))
    assert table.schema.equals(RUNS, check_metadata=True)
    return {(row["arm"], row["seed"]): row for row in table.to_pylist()}


def test_one_row_a_run_in_the_configs_order(synthetic, rows):
    _, study = synthetic
    assert list(rows) == [(key.arm, key.seed) for key in study.requested("core")]


def test_healthy_run(synthetic, rows):
    row, shape = rows["fp32_stream", 0], SHAPES["fp32_stream"]
    ema = smooth(losses(shape, 0, 400))
    assert (row["collapsed"], row["collapse_step"], row["censored"], row["fire_step"]) == (
        False,
        None,
        False,
        None,
    )
    assert (row["final_loss"], row["min_loss"]) == (ema[-1], ema.min())
    assert (row["steps_planned"], row["steps_done"], row["seed_role"], row["twin"]) == (
        400,
        400,
        "tuning",
        "fp32",
    )
    assert (row["final_val_loss"], row["wall_s"], row["tokens"]) == (2.4, 12.5, 400 * 8 * 16)
    assert row["final_sigma_q"] == row["peak_sigma_q"] == pytest.approx(1 + 390 / 300 + 0.1)


def test_collapsed_run_has_the_step_of_the_verdict(rows):
    verdict = judge(losses(SHAPES["faulty"], 1, 400))
    row = rows["faulty", 1]
    assert verdict.collapsed and row["collapsed"] and row["collapse_step"] == verdict.index
    assert row["collapsed_paper"] and row["collapse_step_paper"] > row["collapse_step"]


def test_diverged_run_is_a_collapse_and_carries_its_last_finite_values(rows):
    row = rows["splice_mlp", 0]
    assert row["collapsed"] and row["steps_done"] == 301
    assert row["final_loss"] == smooth(losses(SHAPES["splice_mlp"], 0, 400)[:300])[-1]
    assert all(math.isfinite(row[name]) for name in ("final_sigma_q", "peak_sigma_q", "peak_logit"))


def test_guarded_run_keeps_its_firing_and_its_peak_before_it(rows):
    row = rows["guard", 1]
    assert row["fire_step"] == 125 and not row["collapsed"]
    assert row["peak_logit"] > 2.8


def test_curves_have_one_axis_a_run_and_null_loss_after_divergence(synthetic):
    paths, _ = synthetic
    curves = read_table(paths.analysis("curves")).to_pandas()
    healthy = curves[(curves["arm"] == "fp32") & (curves["seed"] == 0)]
    assert healthy["step"].tolist() == [*range(0, 400, 10), 399]
    assert healthy["sigma_q"].isna().tolist() == [False] * 40 + [True]
    diverged = curves[(curves["arm"] == "splice_mlp") & (curves["seed"] == 0)]
    assert diverged["step"].iloc[-1] == 300
    assert diverged["loss"].isna().tolist() == [False] * 30 + [True]


def test_new_seeds_join_the_old_ones_and_stale_runs_are_listed(tmp_path):
    study = write_study(tmp_path / "config")
    paths = StudyPaths("tiny", tmp_path)
    first, second, unused = RunKey("fp32", 0), RunKey("fp32", 77), RunKey("faulty", 0)
    write_runs(paths, study, [first, second])
    record = paths.run("fp32", 77).record
    runs.aggregate(paths, study, [second])
    seeds = read_table(paths.analysis("runs"), ["seed", "seed_role"]).to_pylist()
    assert seeds == [{"seed": 0, "seed_role": "tuning"}, {"seed": 77, "seed_role": "extra"}]

    record.write_text(record.read_text().replace(study.resolve("fp32", 77).config_hash, "0" * 64))
    runs.aggregate(paths, study, [first])
    assert read_table(paths.analysis("runs"), ["seed"])["seed"].to_pylist() == [0]
    assert read_table(paths.analysis("exclusions"))["seed"].to_pylist() == [77]
    with pytest.raises(BadInput, match=r"missing: faulty/seed=0; run"):
        runs.aggregate(paths, study, [first, unused])


def test_no_runs_at_all_give_empty_tables(tmp_path):
    study = write_study(tmp_path / "config")
    written = runs.aggregate(StudyPaths("tiny", tmp_path), study, [])
    assert [path.stem for path in written] == list(runs.OUTPUTS)
    assert [read_table(path).num_rows for path in written] == [0, 0, 0]


def test_equal_inputs_give_equal_bytes(synthetic):
    paths, study = synthetic
    before = [paths.analysis(name).read_bytes() for name in runs.OUTPUTS]
    runs.aggregate(paths, study, study.requested("core"))
    assert [paths.analysis(name).read_bytes() for name in runs.OUTPUTS] == before


def test_a_new_run_does_not_read_the_others_again(tmp_path):
    """The others' telemetry is torn after the first aggregation; a changed run is read again."""
    study, paths = write_study(tmp_path / "config"), StudyPaths("tiny", tmp_path)
    first, new = [RunKey("fp32", 0), RunKey("splice_mlp", 0)], RunKey("guard", 1)
    write_runs(paths, study, first)
    runs.aggregate(paths, study, first)
    whole = {key.arm: paths.run(key.arm, key.seed).table("heads").read_bytes() for key in first}
    for key in first:
        paths.run(key.arm, key.seed).table("heads").write_bytes(b"torn")
    write_runs(paths, study, [new])
    runs.aggregate(paths, study, [*first, new])
    kept = {name: read_table(paths.analysis(name)) for name in ("runs", "curves")}

    for key in first:
        paths.run(key.arm, key.seed).table("heads").write_bytes(whole[key.arm])
    paths.measured.unlink()
    runs.aggregate(paths, study, [*first, new])
    assert {name: read_table(paths.analysis(name)) for name in kept} == kept

    os.utime(paths.run("fp32", 0).record)
    paths.run("fp32", 0).table("heads").write_bytes(b"torn")
    with pytest.raises(BadInput, match="heads"):
        runs.aggregate(paths, study, [*first, new])
