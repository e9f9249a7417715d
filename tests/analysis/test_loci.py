from types import SimpleNamespace

import pytest

from analysis.made import make_runs
from qkpipe.analysis import loci

ARMS = {
    "clean": SimpleNamespace(extends=None, twin=None),
    "faulty": SimpleNamespace(extends=None, twin="clean"),
    "guard": SimpleNamespace(extends="faulty", twin="clean"),
    "value_norm": SimpleNamespace(extends="guard", twin="clean"),
}
STUDY = SimpleNamespace(arms=ARMS, runnable=tuple(ARMS))


def test_rescued_of_those_at_stake_and_the_same_fire_step():
    fault = {"source": "s"}
    trigger = {**fault, "threshold": 30.0}
    runs = make_runs(
        *({"arm": "clean", "seed": seed, "final_val_loss": 2.0} for seed in (1, 2, 3)),
        {"arm": "faulty", "seed": 1, **fault, "collapsed": True, "collapse_step": 300},
        {"arm": "faulty", "seed": 2, **fault, "collapsed": True, "collapse_step": 400},
        {"arm": "faulty", "seed": 3, **fault},
        *(
            {
                "arm": "guard",
                "seed": s,
                **trigger,
                "correction": "guard",
                "fire_step": 100 + s,
                "final_val_loss": 2.1,
            }
            for s in (1, 2, 3)
        ),
        {
            "arm": "value_norm",
            "seed": 1,
            **trigger,
            "correction": "locus",
            "fire_step": 101,
            "collapsed": True,
        },
        {"arm": "value_norm", "seed": 2, **trigger, "correction": "locus", "fire_step": 99},
    )
    guard, other = loci.loci(runs, STUDY)
    assert (guard["unprotected"], guard["pairs"], guard["at_stake"], guard["rescued"]) == ("faulty", 3, 2, 2)
    assert guard["lead_median"] == pytest.approx((199 + 298) / 2)
    assert guard["loss_over_twin_median"] == pytest.approx(0.1)
    assert (other["unprotected"], other["at_stake"], other["rescued"]) == ("faulty", 2, 1)
    assert (other["fire_pairs"], other["same_fire_step"]) == (2, 1)
