from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from analysis.made import make_runs
from qkpipe.analysis import capping

ARMS = {
    "faulty": SimpleNamespace(extends=None, twin="clean"),
    "guard": SimpleNamespace(extends="faulty", twin="clean"),
    "clean": SimpleNamespace(extends=None, twin=None),
}
STUDY = SimpleNamespace(arms=ARMS, runnable=tuple(ARMS))


def test_what_was_applied_counts_from_the_firing_on():
    runs = make_runs(
        {"arm": "faulty", "source": "s", "final_sigma_q": 8.0},
        {"arm": "clean", "final_sigma_q": 1.0},
        {"arm": "guard", "source": "s", "correction": "guard", "fire_step": 20, "final_sigma_q": 4.0},
        {"arm": "guard", "seed": 11, "source": "s", "correction": "guard"},
    )
    steps = [0, 10, 20, 30, 40]
    curve = {"step": steps, "max_logit": [1, 20, 60, 3.9, 3.5], "max_logit_raw": [1, 20, 60, 90, 200.0]}
    curves = pd.DataFrame({"run_id": "guard/10", **curve})
    found = capping.capped_runs(runs, curves, STUDY)
    (row,) = capping.by_arm(found)
    assert (row["n"], row["bound"], row["within_bound"]) == (1, 4.0, 1)
    assert (row["applied_max"], row["raw_median"]) == (3.9, 200.0)
    assert row["log_sigma_ratio_median"] == pytest.approx(np.log(0.5))
    assert row["log_sigma_twin_median"] == pytest.approx(np.log(4))
    curves.loc[3, "max_logit"] = 4.1
    assert capping.by_arm(capping.capped_runs(runs, curves, STUDY))[0]["within_bound"] == 0
