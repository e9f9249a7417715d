from types import SimpleNamespace

import pytest

from analysis.made import make_runs
from qkpipe.analysis import repairs
from qkpipe.analysis.settings import RECURRENCE

ARMS = {
    "clean": SimpleNamespace(extends=None, twin="clean"),
    "faulty": SimpleNamespace(extends="clean", twin="clean"),
    "m3": SimpleNamespace(extends="faulty", twin="clean"),
    "repair": SimpleNamespace(extends="faulty", twin="clean"),
    "m3_repair": SimpleNamespace(extends="m3", twin="clean"),
    "carries": SimpleNamespace(extends="faulty", twin="clean"),
    "acc": SimpleNamespace(extends="faulty", twin="clean"),
}
STUDY = SimpleNamespace(arms=ARMS, runnable=tuple(ARMS))
FAULT = {"source": "s", "quantities": "all", "bits": 2, "rounding": "even"}
CARRIES = "+".join(name for name in RECURRENCE if name not in ("acc", "l", "m"))


@pytest.fixture(scope="module")
def rows():
    """Two bits collapse in seeds 1 to 3; delta from P rescues 1 and 2 and harms 4, and takes r to a tenth."""
    fell = {"collapsed": True, "collapse_step": 300}
    done = {**FAULT, "correction": "repair", "repair": "delta=p"}
    runs = make_runs(
        *({"arm": "clean", "seed": s, "final_val_loss": 2.0} for s in (1, 2, 3, 4)),
        *({"arm": "faulty", "seed": s, **FAULT, **(fell if s < 4 else {})} for s in (1, 2, 3, 4)),
        *({"arm": "repair", "seed": s, **done, "final_val_loss": 2.25} for s in (1, 2)),
        *({"arm": "repair", "seed": s, **done, **fell, "final_val_loss": 2.25} for s in (3, 4)),
        {"arm": "m3", "seed": 1, **FAULT, "bits": 3},
        {"arm": "m3_repair", "seed": 1, **done, "bits": 3},
        {"arm": "carries", "seed": 1, **FAULT, "quantities": CARRIES},
        {"arm": "acc", "seed": 1, **FAULT, "quantities": "acc"},
    )
    runs["dose"] = runs["arm"].map({"faulty": 0.1, "repair": 0.01})
    return {row["arm"]: row for row in repairs.repairs(runs, STUDY)}


def test_only_repairs_are_rows_named_by_what_they_repair(rows):
    named = {arm: (row["repair"], row["precision"]) for arm, row in rows.items()}
    assert named == {
        "repair": ("delta=p", "m = 2"),
        "carries": ("fp32 acc+l+m", "m = 2"),
        "m3_repair": ("delta=p", "m = 3"),
    }


def test_rescued_and_harmed_with_the_exact_interval(rows):
    row = rows["repair"]
    counts = {name: row[name] for name in ("pairs", "at_stake", "rescued", "harmed", "n", "collapsed")}
    assert counts == {"pairs": 4, "at_stake": 3, "rescued": 2, "harmed": 1, "n": 4, "collapsed": 2}
    # Clopper-Pearson for 2 of 3
    assert (row["rescued_low"], row["rescued_high"]) == pytest.approx((0.0943, 0.9916), abs=1e-4)
    assert row["log_residual_ratio_median"] == pytest.approx(-2.302585, abs=1e-6)
    assert row["loss_over_twin_median"] == pytest.approx(0.25)
    assert rows["m3_repair"]["at_stake"] == 0


def test_a_precision_is_named_with_all_that_its_fault_has():
    (run,) = make_runs(
        {**FAULT, "bits": 7, "attention_gain": 32.0, "rounding": "toward_zero", "quantities": "acc+l"}
    ).iloc
    assert repairs.precision(run) == "m = 7, gain 32, toward zero, acc+l alone"
