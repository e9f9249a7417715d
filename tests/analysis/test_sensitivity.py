import numpy as np
import pandas as pd

from analysis.made import make_runs
from qkpipe.analysis import sensitivity
from qkpipe.analysis.verdict import PAPER, PRIMARY


def test_the_grid_holds_both_rules_once():
    rules = sensitivity.rules()
    assert rules["primary"] == PRIMARY and rules["paper"] == PAPER
    assert len(set(rules.values())) == len(rules) > 15


def test_a_collapse_that_only_the_primary_rule_sees():
    """The loss falls from 5.5 to 2.5 and climbs back to 3.4: 0.9 nat, above a fifth of the fall, below the paper's 1.5."""
    step = np.arange(600)
    loss = np.where(step < 300, 2.5 + 3 * np.exp(-step / 40), 3.4)
    runs = make_runs({"arm": "a", "source": "s", "collapsed": True, "collapse_step": 310})
    rows = {
        r["rule"]: r
        for r in sensitivity.sensitivity(runs, {"a/10": pd.DataFrame({"step": step, "loss": loss})})
    }
    assert (rows["primary"]["collapsed"], rows["primary"]["agree"]) == (1, 1)
    assert (rows["paper"]["collapsed"], rows["paper"]["agree"]) == (0, 0)
    assert rows["open 0.4, close 0.1"]["collapsed"] == 0
    assert 300 < rows["primary"]["median_collapse_step"] < 330
