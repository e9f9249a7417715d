from types import SimpleNamespace

import pytest

from analysis.made import make_runs
from qkpipe.analysis import generality


@pytest.mark.parametrize(
    ("route", "correction", "answer"),
    [
        ("mlp", "splice(qk)", False),
        ("mlp", "splice(mlp)", True),
        ("value", "splice(vo)", True),
        ("all", "splice(qk)", True),
        ("mlp+value", "splice(proj+value)", True),
        ("attention", "splice(qk)", True),
        ("mlp", "guard(30)", True),
        ("mlp", "fault_only(qk)", True),
    ],
)
def test_a_splice_away_from_the_faults_route_does_not_apply(route, correction, answer):
    assert generality.applicable(route, correction) is answer


def test_cells_that_were_run_that_do_not_apply_and_that_are_missing():
    spliced = {"correction": "splice", "intervention": "splice(qk)"}
    runs = make_runs(
        {"arm": "a", "source": "bf16", "route": "attention", "collapsed": True},
        {"arm": "a", "seed": 11, "source": "bf16", "route": "attention", "collapsed": False},
        {"arm": "as", "source": "bf16", "route": "attention", **spliced},
        {"arm": "q", "source": "mxfp4", "route": "mlp"},
        {"arm": "g", "source": "mxfp4", "route": "mlp", "correction": "guard", "intervention": "guard(30)"},
        {"arm": "a2", "source": "bf16", "route": "attention", "model": "rope"},
    )
    study = SimpleNamespace(arms={arm: SimpleNamespace(twin=None) for arm in runs["arm"]})
    table = generality.cells(runs, study)
    status = {(r["source"], r["correction"], r["model"]): r["status"] for r in table}
    assert status["mxfp4", "splice(qk)", "m"] == "not applicable"
    assert status["bf16", "guard(30)", "m"] == "missing"
    assert [key for key, value in status.items() if value == "run"] == [
        *(("bf16", c, "m") for c in ("none", "splice(qk)")),
        *(("mxfp4", c, "m") for c in ("none", "guard(30)")),
        ("bf16", "none", "rope"),
    ]
    first = table[0]
    assert (first["n"], first["collapsed"], first["arms"]) == (2, 1, "a")
    assert {row["model"] for row in generality.across_settings(table)} == {"m", "rope"}
    assert {row["source"] for row in generality.across_settings(table)} == {"bf16"}
