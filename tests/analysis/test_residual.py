import numpy as np
import pytest

from analysis.made import make_runs, make_signals
from qkpipe.analysis.residual import doses


def test_the_dose_is_the_geometric_mean_over_the_window_and_before_the_collapse():
    runs = make_runs({"arm": "a"}, {"arm": "b", "collapsed": True, "collapse_step": 75}, {"arm": "c"})

    def r(run, step):
        if run.arm == "c":
            return np.nan
        return 0.01 if step < 50 else 0.1 if step < 75 else 0.4 if step <= 100 else 9.0

    found = doses(runs, make_signals(runs, residual_r_mean=r, residual_turns=lambda run, step: 0.5))
    found = found.set_index("run_id")["dose"]
    assert found["a/10"] == pytest.approx(np.sqrt(0.1 * 0.4))  # looks at 50, 60, 70 and at 80, 90, 100
    assert found["b/10"] == pytest.approx(0.1)
    assert np.isnan(found["c/10"])
