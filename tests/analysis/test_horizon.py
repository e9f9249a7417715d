from types import SimpleNamespace

import pytest

from analysis.made import make_runs
from qkpipe.analysis import horizon

ARMS = {
    name: SimpleNamespace(extends=None, twin="long-clean")
    for name in ("clean", "faulty", "guard", "long-clean", "long-faulty", "long-guard", "long-qk_norm")
}
STUDY = SimpleNamespace(arms=ARMS, runnable=tuple(ARMS))


@pytest.fixture(scope="module")
def rows():
    """The long guard ends 0.05 above always-on in every seed; of the long faulty runs one collapses only late."""
    fault, long = {"source": "s"}, {"steps_planned": 6000, "steps_done": 6000}
    guard = {**fault, "correction": "guard", "intervention": "guard(30)"}
    norm = {**fault, **long, "correction": "qk_norm", "intervention": "qk_norm(unit_rms)"}
    seeds = (1, 2, 3)
    runs = make_runs(
        *({"arm": "clean", "seed": s} for s in seeds),
        *({"arm": "faulty", "seed": s, **fault, "collapsed": s < 3} for s in seeds),
        *({"arm": "guard", "seed": s, **guard} for s in seeds),
        *({"arm": "other", "seed": s} for s in seeds),
        *({"arm": "long-clean", "seed": s, **long, "final_val_loss": 1.8} for s in seeds),
        *(
            {
                "arm": "long-faulty",
                "seed": s,
                **fault,
                **long,
                "collapsed": True,
                "collapse_step": 2000 * s - 1700,
            }
            for s in seeds[:2]
        ),
        *(
            {
                "arm": "long-guard",
                "seed": s,
                **guard,
                **long,
                "fire_step": 90,
                "final_val_loss": 1.95 + s / 10,
            }
            for s in seeds
        ),
        *({"arm": "long-qk_norm", "seed": s, **norm, "final_val_loss": 1.9 + s / 10} for s in seeds),
    )
    return {row["arm"]: row for row in horizon.horizon(runs, STUDY)}


def test_only_longer_arms_are_rows(rows):
    assert list(rows) == ["long-clean", "long-faulty", "long-guard", "long-qk_norm"]
    assert {row["short_steps"] for row in rows.values()} == {600}


def test_late_collapses_are_those_that_the_short_horizon_misses(rows):
    row = rows["long-faulty"]
    assert (row["collapsed"], row["n"], row["late"]) == (2, 2, 1)
    assert (row["short_collapsed"], row["short_n"], row["median_collapse_step"]) == (2, 2, 1300)


def test_the_guard_against_always_on_by_seed(rows):
    row = rows["long-guard"]
    assert (row["always_on"], row["fired"], row["short_n"]) == ("long-qk_norm", 3, 3)
    for part in ("median", "min", "max", "low", "high"):
        assert row[f"loss_over_always_on_{part}"] == pytest.approx(0.05)
    assert row["loss_over_twin_median"] == pytest.approx(0.35)
    assert rows["long-clean"]["always_on"] is None


def test_no_longer_run_no_row():
    assert horizon.horizon(make_runs({"arm": "clean", "seed": 1}), STUDY) == []
    assert horizon.horizon(make_runs().iloc[:0], STUDY) == []
