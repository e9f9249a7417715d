from types import SimpleNamespace

import pytest

from analysis.made import make_runs
from qkpipe.analysis import remedies

ARMS = {
    "clean": SimpleNamespace(extends=None, twin="clean"),
    "faulty": SimpleNamespace(extends="clean", twin="clean"),
    "guard": SimpleNamespace(extends="faulty", twin="clean"),
    "clip": SimpleNamespace(extends="faulty", twin="clean"),
    "splice": SimpleNamespace(extends="faulty", twin="clean"),
    "clean-guard": SimpleNamespace(extends="clean", twin="clean"),
    "other-guard": SimpleNamespace(extends="clean", twin="clean"),
}
STUDY = SimpleNamespace(arms=ARMS, runnable=tuple(ARMS))


@pytest.fixture(scope="module")
def rows():
    """The guard rescues both seeds at stake, fires in one of four healthy runs, costs 5% of a step; the clip rescues one."""
    fault = {"source": "s", "wall_s": 12.0}
    guard = {"correction": "guard", "intervention": "guard(30)", "threshold": 30.0}
    clip = {**fault, "correction": "zclip", "intervention": "zclip"}
    fell = {"collapsed": True, "collapse_step": 300}
    seeds = (1, 2, 3, 4)
    runs = make_runs(
        *({"arm": "clean", "seed": s, "wall_s": 6.0} for s in seeds),
        *({"arm": "faulty", "seed": s, **fault, **(fell if s < 3 else {})} for s in seeds),
        *(
            {"arm": "guard", "seed": s, **fault, **guard, "fire_step": 90, "final_val_loss": 2.1}
            for s in seeds
        ),
        *({"arm": "clip", "seed": s, **clip, **(fell if s == 1 else {}), "wall_s": 18.0} for s in seeds),
        {"arm": "splice", "seed": 1, **fault, "correction": "splice", "intervention": "splice(qk)"},
        *(
            {"arm": "clean-guard", "seed": s, **guard, "wall_s": 6.3, "fire_step": 400 if s == 2 else None}
            for s in seeds
        ),
        {"arm": "other-guard", "seed": 1, **guard, "source": "rare"},
    )
    return {row["remedy"]: row for row in remedies.remedies(runs, STUDY)}


def test_a_remedy_against_the_fault(rows):
    assert list(rows) == ["guard(30)", "zclip"]
    row = rows["guard(30)"]
    assert (row["source"], row["arms"]) == ("s", "guard, clean-guard")
    assert (row["n"], row["collapsed"], row["at_stake"], row["rescued"]) == (4, 0, 2, 2)
    assert row["rescued_low"] == pytest.approx(0.025**0.5)
    assert (row["lead_median"], row["loss_over_twin_median"]) == (210, pytest.approx(0.1))
    assert (rows["zclip"]["at_stake"], rows["zclip"]["rescued"], rows["zclip"]["collapsed"]) == (2, 1, 1)


def test_a_remedy_where_nothing_is_wrong(rows):
    row = rows["guard(30)"]
    assert (row["healthy_n"], row["healthy_fired"], row["healthy_collapsed"]) == (4, 1, 0)
    assert row["healthy_fired_high"] == pytest.approx(0.8059, abs=1e-4)  # Clopper-Pearson for 1 of 4
    assert (row["cost_median"], row["healthy_loss_over_twin_median"]) == (pytest.approx(1.05), 0)


def test_without_healthy_runs_the_cost_is_that_on_the_fault(rows):
    row = rows["zclip"]
    assert row["cost_median"] == pytest.approx(1.5)
    assert row["healthy_n"] == 0 and "healthy_fired" not in row


def test_nothing_acts():
    assert remedies.remedies(make_runs({"arm": "clean", "seed": 1}), STUDY) == []
