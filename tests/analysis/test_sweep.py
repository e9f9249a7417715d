import pytest

from analysis.made import make_runs, make_signals
from qkpipe.analysis import sweep


@pytest.fixture
def data():
    """Healthy logits end at 20 + seed; the doomed ones pass t at step 5 t."""
    fault = {"arm": "faulty", "source": "s", "collapsed": True, "collapse_step": 300}
    guarded = {"arm": "guard", "source": "s", "correction": "guard", "threshold": 30.0}
    runs = make_runs(
        *({"arm": "clean", "seed": seed} for seed in (1, 2, 3)),
        *({**fault, "seed": seed} for seed in (1, 2)),
        {**guarded, "seed": 1},
        {**guarded, "seed": 2, "collapsed": True},
    )
    signals = make_signals(
        runs, max_logit=lambda run, step: step / 5 if run.arm != "clean" else min(step, 20 + run.seed)
    )
    return runs, signals


def test_rates_of_a_threshold(data):
    rows = {row["threshold"]: row for row in sweep.sweep(*data, tau=22.0)}
    at = rows[22.0]
    assert (at["healthy_fired"], at["healthy_n"], at["doomed_fired"], at["doomed_n"]) == (1, 3, 2, 2)
    assert at["lead_median"] == 300 - 120 and at["guarded_n"] == 0
    assert (rows[30.0]["guarded_n"], rows[30.0]["guarded_contained"]) == (2, 1)
    late = rows[min(t for t in rows if t > 60)]
    assert late["doomed_fired"] == 0 and late["lead_median"] is None


def test_transfer_is_the_largest_healthy_logit_of_the_others(data):
    runs, signals = data
    assert sweep.transfer(runs, signals) == []
    other = make_runs({"arm": "rope", "model": "rope", "seed": 9})
    more = make_signals(other, max_logit=lambda run, step: 40.0)
    import pandas as pd

    rows = {r["model"]: r for r in sweep.transfer(pd.concat([runs, other]), pd.concat([signals, more]))}
    assert (rows["rope"]["threshold"], rows["rope"]["healthy_fired"]) == (23.0, 1)
    assert (rows["m"]["threshold"], rows["m"]["healthy_fired"], rows["m"]["doomed_fired"]) == (40.0, 0, 2)
