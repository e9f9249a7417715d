import pytest

from analysis.made import make_runs
from qkpipe.analysis import survival


def test_kaplan_meier_of_four_runs_by_hand():
    """Collapses at 100 and 300, one run censored at 200, one at the end: 3/4, then 3/4 * 1/2."""
    fell = {"arm": "a", "source": "s", "collapsed": True}
    runs = make_runs(
        {**fell, "seed": 1, "collapse_step": 100},
        {"arm": "a", "seed": 2, "steps_done": 200},
        {**fell, "seed": 3, "collapse_step": 300},
        {"arm": "a", "seed": 4},
        {"arm": "held", "seed": 1},
    )
    table = survival.survival(runs)
    assert set(table["arm"]) == {"a"}
    at = table.set_index("step")
    assert at.loc[[100, 200, 300, 600], "survival"].tolist() == pytest.approx([0.75, 0.75, 0.375, 0.375])
    assert at.loc[300, "at_risk"] == 2 and at.loc[300, "low"] < 0.375 < at.loc[300, "high"]
