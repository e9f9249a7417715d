import math

import numpy as np
import pandas as pd
import pytest

from analysis.made import make_runs, make_signals
from qkpipe.analysis import contest


def test_the_threshold_is_the_order_statistic_of_a_tenth():
    assert contest.threshold(pd.Series(range(19), dtype=float)) == 17.0  # the second largest of 19
    assert contest.threshold(pd.Series(range(9), dtype=float)) == 8.0
    assert math.isnan(contest.threshold(pd.Series(range(8), dtype=float)))


def test_auc_counts_ties_half():
    score, doomed = np.array([2.0, 1.0, 1.0, 0.0]), np.array([True, True, False, False])
    assert contest.auc(score, doomed) == pytest.approx((2 + 1.5) / 4)
    assert math.isnan(contest.auc(score[:2], doomed[:2]))


@pytest.fixture
def scored():
    """r tells the fault from the start, and from the hot run; logits rise late, and in the hot run too."""
    runs = make_runs(
        *({"arm": "clean", "seed": s, "seed_role": "calibration"} for s in range(100, 119)),
        *({"arm": "clean", "seed": s} for s in range(10, 15)),
        *(
            {"arm": "faulty", "seed": s, "source": "x", "collapsed": True, "collapse_step": 400}
            for s in range(10, 14)
        ),
        *({"arm": "hot", "seed": s, "source": "lr_x2", "fault": "learning_rate"} for s in (10, 11, 12)),
        {"arm": "guard", "seed": 10, "source": "x", "correction": "guard"},
    )

    def logit(run, step):
        return step / 5 if run.arm in ("faulty", "hot") else 10 + run.seed / 1000

    signals = make_signals(
        runs,
        residual_r=lambda run, step: 0.1 if run.arm == "faulty" else 1e-7 * (1 + run.seed / 1000),
        max_logit=logit,
        entropy_min=lambda run, step: -logit(run, step),
    )
    return contest.score(runs, signals)


def test_who_takes_part(scored):
    kinds = scored.drop_duplicates("run_id").groupby("kind").size().to_dict()
    assert kinds == {"threshold": 19, "healthy": 5, "doomed": 4, "stressed": 3}
    assert set(scored["monitor"]) == {"residual_r", "max_logit", "entropy_min"}


def test_the_earlier_monitor_wins_and_tells_a_fault_from_a_hot_run(scored):
    rows = contest.contest(scored)
    assert (rows[0]["monitor"], rows[0]["rank"]) == ("residual_r", 1)
    by = {row["monitor"]: row for row in rows}
    assert by["residual_r"]["lead_median"] == 400 - 50  # the end of the warm-up
    assert by["max_logit"]["lead_median"] == by["entropy_min"]["lead_median"] == 400 - 60
    assert by["entropy_min"]["threshold"] < 0 < by["max_logit"]["threshold"]
    assert (by["residual_r"]["stressed_k"], by["max_logit"]["stressed_k"]) == (0, 3)
    assert by["residual_r"]["auc_stressor_value"] == 1.0 > by["max_logit"]["auc_stressor_value"]
    assert (by["residual_r"]["false_alarms_k"], by["residual_r"]["false_alarms_n"]) == (0, 5)
    assert by["max_logit"]["auc_value"] == 1.0


def test_a_drifting_run_is_hot_and_does_not_collapse(scored):
    assert set(scored.loc[scored["drifting"], "arm"]) == {"hot"}
    by = {row["monitor"]: row for row in contest.contest(scored)}
    assert (by["residual_r"]["drifting_k"], by["residual_r"]["drifting_n"]) == (0, 3)
    assert (by["max_logit"]["drifting_k"], by["max_logit"]["drifting_high"]) == (3, 1.0)


def test_a_hot_run_that_collapses_does_not_drift(scored):
    runs = scored.drop_duplicates("run_id").assign(collapsed=True)
    looks = pd.DataFrame({"run_id": runs["run_id"], "max_logit": 100.0})
    looks.loc[runs["kind"].to_numpy() == "threshold", "max_logit"] = 10.0
    assert contest.drifters(runs, looks) == set()
    assert contest.drifters(runs.assign(collapsed=False), looks) == set(
        runs.loc[runs["kind"].isin(["healthy", "stressed"]), "run_id"]
    )


def test_the_roc_goes_from_corner_to_corner(scored):
    points = [row for row in contest.roc(scored) if row["monitor"] == "max_logit"]
    assert [(p["false_alarm_rate"], p["detection_rate"]) for p in (points[0], points[-1])] == [(0, 0), (1, 1)]
    assert any(p["false_alarm_rate"] == 0 and p["detection_rate"] == 1 for p in points)
