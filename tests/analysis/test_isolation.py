import numpy as np
import pytest

from analysis.made import make_runs
from qkpipe.analysis import isolation
from qkpipe.analysis.settings import RECURRENCE


def test_what_a_setting_asks():
    assert isolation.question("none", "none") == ("clean", "fp32")
    assert isolation.question("acc+l", "none") == ("makes", "acc+l")
    most = "+".join(q for q in RECURRENCE if q != "acc")
    assert isolation.question(most, "none") == ("repairs", "acc")
    assert isolation.question("all", "none") == ("dose", "all")
    assert isolation.question("all", "delta=p") == ("repair", "delta=p")


def test_arms_of_one_setting_are_one_row_and_other_sources_are_none():
    faulty = {"source": "s", "quantities": "all", "bits": 2, "rounding": "even"}
    runs = make_runs(
        {"arm": "a", "seed": 1, "collapsed": True, "collapse_step": 100, **faulty},
        {"arm": "b", "seed": 2, "final_sigma_q": np.e**2, **faulty},
        {"arm": "repaired", "seed": 1, **faulty, "repair": "delta=p", "correction": "repair"},
        {"arm": "gradient", "seed": 1, **faulty, "fault": "quantizer"},
        {"arm": "spliced", "seed": 1, **faulty, "correction": "splice"},
        {"arm": "logged", "seed": 1, **faulty, "intervention": "guard-log(30)"},
        {"arm": "other tokenizer", "seed": 1, **faulty, "tokenizer": "bpe"},
        {"arm": "micro-batched", "seed": 1, **faulty, "accumulation": 5},
        {"arm": "clean", "seed": 1},
        {"arm": "clean too", "seed": 2},
    ).assign(dose=[0.1, 0.2, 0.0, 0.1, 0.1, 0.1, 0.1, 0.1, 0.0, 0.0])
    rows = isolation.isolate(runs)
    assert [(row["question"], row["arms"], row["n"], row["collapsed"]) for row in rows] == [
        ("clean", "clean, clean too", 2, 0),
        ("dose", "a, b", 2, 1),
        ("repair", "repaired", 1, 0),
    ]
    dose = rows[1]
    assert dose["median_collapse_step"] == 100 and dose["residual_median"] == pytest.approx(0.15)
    assert dose["log_sigma_max"] == pytest.approx(2) and dose["collapsed_high"] == pytest.approx(
        0.987, abs=1e-3
    )
