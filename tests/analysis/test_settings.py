"""Settings of runs as columns, on configs whose answers are known."""

import math

from qkpipe.analysis.settings import RECURRENCE, settings
from qkpipe.telemetry.schema import RUNS
from tiny_training import tiny_run

STREAM = {"kind": "streaming", "tile": 4}


def test_every_setting_is_a_column_of_runs():
    assert set(settings(tiny_run())) <= set(RUNS.names)


def test_attention_says_what_is_rounded_and_how():
    uniform = settings(tiny_run(attention={**STREAM, "precision": {"uniform": 2, "io": 7}}))
    assert (uniform["quantities"], uniform["bits"], uniform["rounding"], uniform["tiles"]) == (
        "all",
        2,
        "even",
        4,
    )
    only = {"acc": 3, "l": {"bits": 5, "mode": "stochastic"}}
    some = settings(tiny_run(attention={**STREAM, "precision": {"only": only}}))
    assert (some["quantities"], some["bits"], some["rounding"]) == ("acc+l", 3, "even+stochastic")
    exact = settings(tiny_run(attention=STREAM))
    assert (exact["quantities"], exact["bits"], exact["rounding"]) == ("none", None, None)
    sdpa = settings(tiny_run())
    assert (sdpa["attention"], sdpa["tile"], sdpa["tiles"]) == ("sdpa", None, None)
    assert "io" not in RECURRENCE


def test_repairs_are_corrections_and_gains_are_not():
    faulty = {**STREAM, "precision": {"uniform": 2}}
    repaired = settings(tiny_run(attention={**faulty, "repair": {"delta": "p"}}))
    assert (repaired["repair"], repaired["correction"]) == ("delta=p", "repair")
    gained = settings(tiny_run(attention={**faulty, "repair": {"delta_gain": 32.0}}))
    assert (gained["repair"], gained["correction"], gained["attention_gain"]) == ("none", "none", 32.0)


def test_faults_and_corrections_by_kind():
    held = [{"kind": "injected", "routes": ["mlp"], "structure": "held", "hold": 8, "gain": 3.0}]
    found = settings(tiny_run(faults=held, model={"qk_norm": "unit_rms"}))
    assert (found["fault"], found["structure"], found["hold"], found["fault_gain"]) == (
        "injected",
        "held",
        8.0,
        3.0,
    )
    assert found["correction"] == "qk_norm"
    assert settings(tiny_run(model={"weight_norm": "sigma_reparam"}))["correction"] == "sigma_reparam"
    coherent = [{"kind": "injected", "routes": ["mlp"], "structure": "coherent"}]
    assert settings(tiny_run(faults=coherent))["hold"] == math.inf
    guard = settings(tiny_run(interventions=[{"kind": "guard", "threshold": 12.0}]))
    assert (guard["correction"], guard["threshold"]) == ("guard", 12.0)
    assert settings(tiny_run(interventions=[{"kind": "guard", "mode": "log"}]))["correction"] == "none"


def test_probe():
    probe = {"kind": "causal", "action": "on_target", "k": 2, "side": "left", "start_step": 5}
    found = settings(tiny_run(probe=probe))
    assert {key: found[f"probe_{key}"] for key in ("action", "k", "side", "directions", "start_step")} == {
        "action": "on_target",
        "k": 2,
        "side": "left",
        "directions": "leading",
        "start_step": 5,
    }
    assert settings(tiny_run())["probe_action"] is None
