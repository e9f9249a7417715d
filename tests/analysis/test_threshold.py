import math

import numpy as np
import pyarrow as pa
import pytest
import scipy.stats

from qkpipe.analysis import runs
from qkpipe.analysis.threshold import THRESHOLDS, build, thresholds
from qkpipe.config import RunKey, load_study
from qkpipe.errors import BadInput
from qkpipe.paths import StudyPaths
from qkpipe.store.parquet import read_table
from qkpipe.telemetry.schema import RUNS, TABLES
from store.synthetic import STUDY, write_runs, write_study


class Data:
    """Healthy runs with a given curve of the largest logit; steps 0, 10, ..., 100."""

    def __init__(self):
        self.runs, self.heads = [], []

    def run(self, role, seed, logits, arm="fp32", **more):
        run_id = f"{arm}-{seed}-{more.get('optimizer', '')}"
        row = {
            "run_id": run_id,
            "scale": "micro",
            "arm": arm,
            "seed": seed,
            "seed_role": role,
            "source": "none",
        }
        row |= {"model": "gpt2", "optimizer": "adamw-lr0.003", "steps_planned": 100, "intervention": "none"}
        self.runs.append(row | {"collapsed": False, "collapsed_paper": False} | more)
        for step, logit in zip(range(0, 101, 10), logits):
            for head, value in enumerate((logit, min(logit, 0.5))):
                self.heads.append(
                    {"run_id": run_id, "step": step, "layer": 0, "head": head, "max_logit": value}
                )
        return self

    def rows(self, **options):
        heads = pa.Table.from_pylist(self.heads, TABLES["heads"])
        table = thresholds(pa.Table.from_pylist(self.runs, RUNS), heads, **options)
        assert table.schema.equals(THRESHOLDS)
        return table.to_pylist()


def settled(peak):
    """A curve that peaks in the middle."""
    return [1.0, 2.0, 3.0, 4.0, peak, 4.0, 3.0, 3.0, 3.0, 3.0, 3.0]


def study(n_calibration=19, n_held_out=59, held_out_peak=8.0):
    data = Data()
    for i in range(n_calibration):
        data.run("calibration", 100 + i, settled(10.0 + i))
    for i in range(n_held_out):
        data.run("held_out", 300 + i, settled(held_out_peak))
    return data


def test_nineteen_runs_give_their_maximum_and_59_silent_ones_five_percent():
    calibrated, paper = study().rows()
    assert (calibrated["rule"], calibrated["tau"], calibrated["identifiable"]) == ("calibrated", 28.0, True)
    assert (calibrated["n_fired"], calibrated["rate"]) == (0, 0)
    assert calibrated["rate_upper"] == pytest.approx(1 - 0.05 ** (1 / 59)) and calibrated["rate_upper"] < 0.05
    assert (paper["rule"], paper["tau"], paper["rate_upper"]) == ("paper", 30.0, calibrated["rate_upper"])
    assert (calibrated["n_drifted"], calibrated["sensed_every"], calibrated["reason"]) == (0, 10, None)


def test_the_rule_is_an_order_statistic():
    assert study(n_calibration=39).rows()[0]["tau"] == 47.0  # the second largest of 39
    assert study(n_calibration=39).rows(level=0.025)[0]["tau"] == 48.0
    assert study(n_calibration=9).rows(level=0.1)[0]["tau"] == 18.0


def test_too_few_calibration_runs():
    calibrated, paper = study(n_calibration=18).rows()
    assert calibrated["tau"] is None and not calibrated["identifiable"]
    assert calibrated["reason"] == "18 calibration seeds; a level of 0.05 needs 19"
    assert paper["identifiable"]


def test_the_papers_tau_needs_no_calibration():
    calibrated, paper = study(n_calibration=0).rows()
    assert (calibrated["tau"], calibrated["n_fired"]) == (None, None)
    assert (paper["n_fired"], paper["n_held_out"], paper["identifiable"]) == (0, 59, True)


def test_false_activations_are_counted_with_an_exact_bound():
    data = study(n_held_out=58).run("held_out", 400, settled(29.0))
    calibrated, paper = data.rows()
    assert (calibrated["n_fired"], calibrated["rate"], paper["n_fired"]) == (1, 1 / 59, 0)
    assert calibrated["rate_upper"] == pytest.approx(scipy.stats.beta.ppf(0.95, 2, 58))


def test_a_logit_at_tau_does_not_fire():
    assert study(held_out_peak=28.0).rows()[0]["n_fired"] == 0


def test_healthy_logits_that_still_climb_have_no_threshold():
    data = Data()
    for i in range(19):
        data.run("calibration", 100 + i, np.linspace(1, 20 + 0.1 * i, 11))
    calibrated = data.rows()[0]
    assert not calibrated["identifiable"] and calibrated["n_drifted"] == 19
    assert calibrated["reason"].startswith("healthy logits still climb: 19 of 19")
    assert calibrated["tau"] == pytest.approx(21.8)


def test_healthy_drift_that_crosses_tau():
    calibrated, paper = study(held_out_peak=150.0).rows()
    for row in (calibrated, paper):
        assert not row["identifiable"]
        assert (row["reason"], row["rate"]) == ("healthy drift crosses it: 59 of 59 held-out seeds", 1.0)


@pytest.mark.parametrize("ending", [{"collapsed": True}, {"collapsed_paper": True}])
def test_a_healthy_run_that_collapsed_leaves_no_threshold(ending):
    data = study(n_calibration=18).run("calibration", 200, settled(5.0), **ending)
    calibrated = data.rows()[0]
    assert (calibrated["tau"], calibrated["identifiable"]) == (None, False)
    assert calibrated["reason"] == "a healthy run collapsed"


def test_one_collapse_among_many_healthy_runs_is_one_too_many():
    data = study(n_calibration=38).run("calibration", 200, settled(5.0), collapsed=True)
    assert data.rows()[0]["reason"] == "a healthy run collapsed"


def test_non_finite_logits_are_the_largest():
    data = study(n_calibration=18).run("calibration", 200, settled(math.nan))
    assert data.rows()[0]["reason"] == "a healthy run collapsed"
    assert study(n_held_out=58).run("held_out", 400, settled(math.inf)).rows()[1]["n_fired"] == 1


@pytest.mark.parametrize("column", ["source", "intervention"])
def test_doomed_or_treated_runs_are_refused(column):
    with pytest.raises(BadInput, match=f"arm='x', seed=1 .calibration. has {column}='something'"):
        study().run("calibration", 1, settled(1.0), arm="x", **{column: "something"}).rows()


def test_doomed_runs_of_other_roles_are_not_looked_at():
    data = study().run("tuning", 1, settled(500.0), source="fault").run("confirmatory", 2, settled(500.0))
    assert data.rows() == study().rows()


def test_two_arms_of_one_seed_are_one_run_at_their_maximum():
    data = study()
    for i in range(19):
        data.run("calibration", 100 + i, settled(50.0 if i == 3 else 1.0), arm="fp32_stream")
    calibrated = data.rows()[0]
    assert (calibrated["n_calibration"], calibrated["tau"], calibrated["arms"]) == (
        19,
        50.0,
        "fp32,fp32_stream",
    )
    # Held-out seeds without the second arm are not exchangeable with these.
    assert calibrated["n_held_out"] == 0


def test_every_setting_has_its_own_threshold():
    data = study()
    for i in range(19):
        data.run("calibration", 100 + i, settled(100.0), optimizer="adamw-lr0.01")
    rows = data.rows()
    assert [(row["optimizer"], row["rule"]) for row in rows] == [
        ("adamw-lr0.003", "calibrated"),
        ("adamw-lr0.003", "paper"),
        ("adamw-lr0.01", "calibrated"),
        ("adamw-lr0.01", "paper"),
    ]
    assert rows[2]["tau"] == 100.0


def test_no_runs_no_rows():
    assert Data().rows() == []


def test_tau_keeps_its_promise_on_new_runs():
    """Averaged over studies, a new healthy run passes tau in at most ``level`` of cases, and nearly that often."""
    rng, studies, fired = np.random.default_rng(0), 60, 0
    for _ in range(studies):
        data = Data()
        for i in range(19):
            data.run("calibration", i, settled(4 + rng.lognormal()))
        for i in range(20):
            data.run("held_out", 100 + i, settled(4 + rng.lognormal()))
        fired += data.rows()[0]["n_fired"]
    assert 0.02 < fired / (studies * 20) < 0.08


def test_build_reads_the_healthy_runs_on_disk(tmp_path):
    folder = write_study(tmp_path / "config").folder
    roles = "calibration: { seeds: [10, 11], arms: [fp32] }"
    (folder / "study.yaml").write_text(
        STUDY.replace("confirmatory: { seeds: [10, 11], arms: [fp32, faulty] }", roles)
    )
    study, paths = load_study(folder), StudyPaths("tiny", tmp_path)
    keys = [RunKey(arm, seed) for arm in ("fp32", "faulty") for seed in (0, 10, 11)]
    write_runs(paths, study, keys)
    runs.aggregate(paths, study, keys)
    (written,) = build(paths, study)
    calibrated, paper = read_table(written).to_pylist()
    assert (calibrated["n_calibration"], calibrated["calibration_seeds"]) == (2, "10,11")
    assert (calibrated["arms"], calibrated["sensed_every"], paper["tau"]) == ("fp32", 10, 30.0)
