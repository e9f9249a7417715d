import numpy as np
import pytest

from analysis.made import make_runs, make_signals
from qkpipe.analysis import entropy


def test_an_onset_lasts():
    steps = np.arange(0, 80, 10)
    outside = np.array([0, 1, 0, 1, 1, 1, 0, 0], bool)
    assert entropy.first_lasting(outside, steps) == 30
    assert entropy.first_lasting(np.array([0, 0, 0, 0, 0, 0, 0, 1], bool), steps) == 70
    assert entropy.first_lasting(np.zeros(8, bool), steps) is None


@pytest.fixture
def found():
    """r is out from the start, logits leave at 100, entropy at 150; sigma never does."""
    faulty = {"arm": "faulty", "source": "s", "collapsed": True, "collapse_step": 200}
    runs = make_runs(
        *({"arm": "clean", "seed": seed} for seed in (1, 2, 3)), *({**faulty, "seed": s} for s in (1, 2))
    )

    def fallen(run):
        return run.arm == "faulty"

    signals = make_signals(
        runs,
        last=300,
        residual_r=lambda run, step: 0.1 if fallen(run) else 1e-7,
        sigma_q=lambda run, step: 1.0,
        max_logit_raw=lambda run, step: 50.0 if fallen(run) and step >= 100 else 5.0 + run.seed,
        entropy_min=lambda run, step: 0.1 if fallen(run) and step >= 150 else 2.0,
    )
    return entropy.onsets(runs, signals)


def test_onsets_on_one_clock(found):
    first = found[found["seed"] == 1].set_index("signal")
    onset = {
        signal: step for signal, step in first["onset_step"].items() if step == step and step is not None
    }
    assert onset == {"residual_r": 0, "max_logit_raw": 100, "entropy_min": 150}
    assert first.loc["entropy_min", "lead_steps"] == 50 and set(found["n_healthy"]) == {3}


def test_order_of_events(found):
    rows = {(row["first"], row["second"]): row for row in entropy.order(found)}
    row = rows["max_logit_raw", "entropy_min"]
    assert (row["n"], row["n_first"], row["n_together"], row["median_lag"]) == (2, 2, 0, 50)
    assert rows["entropy_min", "max_logit_raw"]["n_first"] == 0
    assert rows["residual_r", "sigma_q"]["n"] == 0


def test_one_healthy_run_is_no_envelope():
    runs = make_runs({"arm": "clean"}, {"arm": "f", "source": "s", "collapsed": True, "collapse_step": 9})
    assert entropy.onsets(runs, make_signals(runs, sigma_q=lambda run, step: 1.0)).empty
