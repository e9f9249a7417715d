from types import SimpleNamespace

import numpy as np
import pytest

from analysis.made import make_runs, make_signals
from qkpipe.analysis import entry


def study_of(twins):
    return SimpleNamespace(arms={arm: SimpleNamespace(twin=twin) for arm, twin in twins.items()})


@pytest.fixture
def found():
    """Coherence c drives sigma as exp(c); the error's size is the same everywhere, its mean is noise."""
    arms = {"held1": (1.0, 0.0), "held8": (8.0, 0.6), "coherent": (np.inf, 1.0)}
    rows = [
        {
            **{"arm": arm, "seed": seed, "route": "mlp", "fault": "injected", "source": "s", "hold": hold},
            "final_sigma_q": 2 * np.exp(coherence + 0.01 * seed),
        }
        for arm, (hold, coherence) in arms.items()
        for seed in (1, 2, 3, 4)
    ]
    runs = make_runs(*rows, *({"arm": "twin", "seed": seed} for seed in (1, 2, 3, 4)))
    noise = dict(zip(runs["run_id"], np.random.default_rng(1).permutation(len(runs))))
    signals = make_signals(
        runs,
        last=50,
        coherence=lambda run, step: arms.get(run.arm, (0, np.nan))[1],
        error_ratio=lambda run, step: 0.5,
        error_mean=lambda run, step: float(noise[run.run_id]),
    )
    return entry.entry_runs(runs, signals, study_of(dict.fromkeys(arms, "twin")))


def test_hold_is_measured_in_adams_memory_and_outcomes_against_the_twin(found):
    by_arm = {row["arm"]: row for row in entry.by_arm(found)}
    assert by_arm["held8"]["memory"] == pytest.approx(10)
    assert by_arm["held8"]["hold_in_memories"] == pytest.approx(0.8)
    assert np.isinf(by_arm["coherent"]["hold_in_memories"])
    assert by_arm["coherent"]["log_sigma_ratio_min"] == pytest.approx(1.01)
    assert "twin" not in by_arm


def test_the_planted_predictor_wins_and_a_constant_one_has_no_rank(found):
    sigma = {
        row["predictor"]: row
        for row in entry.compare_predictors(found)
        if (row["route"], row["outcome"]) == ("any", "log_sigma_ratio")
    }
    assert sigma["coherence"]["rank_correlation"] > 0.9 and sigma["coherence"]["low"] > 0.8
    assert np.isnan(sigma["error_ratio"]["rank_correlation"])
    assert abs(sigma["error_mean"]["rank_correlation"]) < 0.7
    assert "residual_r_mean" not in sigma and sigma["coherence"]["n"] == 12


def test_two_arms_are_too_few_to_compare_predictors(found):
    assert entry.compare_predictors(found[found["arm"] != "held8"]) == []
