"""The residual law on runs that follow a planted one."""

import numpy as np
import pandas as pd
import pytest

from analysis.made import make_runs, make_signals
from qkpipe.analysis import law


def planted(role="confirmatory", gain_effect=0.0, seeds=(1, 2, 3, 4), noise=0.05):
    """T = exp(3 + 0.1 seed - 0.8 log r - 1.5 log(lr / 1e-3) + gain effect), censored at 600 steps."""
    draws = np.random.default_rng(0)
    rows, r_of = [], {}
    for seed in seeds:
        for bits, r in ((2, 0.2), (3, 0.06), (4, 0.02), (7, 0.002)):
            for lr in (1e-3, 2e-3):
                for gain in (1.0, 8.0):
                    log_t = 3 + 0.1 * seed - 0.8 * np.log(r) - 1.5 * np.log(lr / 1e-3)
                    log_t += gain_effect * (gain > 1) + noise * draws.standard_normal()
                    fell = np.exp(log_t) < 600
                    arm = f"m{bits}.lr{lr}.g{gain}"
                    r_of[f"{arm}/{seed}"] = r
                    rows.append(
                        {
                            **{"arm": arm, "seed": seed, "seed_role": role, "source": "s", "bits": bits},
                            **{"quantities": "all", "rounding": "even", "lr": lr, "attention_gain": gain},
                            **{"collapsed": fell, "collapse_step": int(np.exp(log_t)) if fell else None},
                        }
                    )
    runs = make_runs(*rows)
    runs["warmup"] = 0
    signals = make_signals(runs, last=10, residual_r_mean=lambda run, step: r_of[run.run_id])
    return law.law_runs(runs, signals)


def test_a_planted_law_is_found_under_censoring():
    chosen = planted()
    assert 0 < chosen["collapsed"].mean() < 1
    rows = {row["term"]: row for row in law.describe(law.fit_law(chosen), chosen)}
    for term, truth in (("log_r", -0.8), ("log_lr", -1.5)):
        assert rows[term]["estimate"] == pytest.approx(truth, abs=0.1)
        assert rows[term]["low"] < truth < rows[term]["high"] or abs(rows[term]["estimate"] - truth) < 0.06
        assert rows[term]["p_value"] < 1e-3
    assert rows["log_r"]["seeds"] == 4


def test_no_p_value_with_a_tuning_seed():
    chosen = planted(role="tuning")
    assert all(row.get("p_value") is None for row in law.describe(law.fit_law(chosen), chosen))
    assert all(row["p_value"] is None for row in law.collapse_onto_r(chosen))


def test_what_is_beside_r_is_told_from_what_is_not():
    onto_r = {row["beside_r"]: row for row in law.collapse_onto_r(planted())}
    beside = {row["beside_r"]: row for row in law.collapse_onto_r(planted(gain_effect=0.6))}
    assert onto_r["attention_gain"]["p_value"] > 0.01
    assert beside["attention_gain"]["p_value"] < 1e-6 and beside["attention_gain"]["aic_gain"] > 10
    assert "tile" not in onto_r and onto_r["attention_gain"]["levels"] == "1, 8"


def test_the_prediction_is_the_law_at_the_targets_dose_and_rate():
    chosen = planted()
    fit = law.fit_law(chosen)
    (row,) = law.predict(fit, chosen)
    truth = np.exp(3 + 0.1 * 2.5 - 0.8 * np.log(0.002))
    assert row["dose"] == pytest.approx(0.002) and row["lr"] == 1e-3
    assert row["low"] < truth < row["high"] and row["median"] == pytest.approx(truth, rel=0.35)
    assert row["collapse_probability"] > 0.99
    assert law.predict(None, chosen) == []
    assert law.predict(fit, chosen[chosen["bits"] != 7]) == []


def test_too_few_collapses_give_no_law():
    chosen = planted()
    few = chosen[~chosen["collapsed"] | (chosen["seed"] == 1) & (chosen["bits"] == 2)]
    assert law.fit_law(few) is None and law.describe(None, few) == [] and law.collapse_onto_r(few) == []


def test_the_settings_instead_of_r():
    """bits stand for log r here, which falls by about 1.14 a bit and more at the end: the worse of two models."""
    chosen = planted(gain_effect=0.6)
    fit = law.fit_settings(chosen)
    rows = {row["term"]: row for row in law.describe(fit, chosen)}
    assert list(rows) == ["bits", "log_gain", "log_lr", "intercept"]  # neither tile nor rounding mode varies
    assert rows["log_gain"]["low"] < 0.6 / np.log(8) < rows["log_gain"]["high"]
    assert rows["log_lr"]["estimate"] == pytest.approx(-1.5, abs=0.2) and rows["bits"]["low"] > 0
    exact = planted()
    assert law.fit_law(exact).aic < law.fit_settings(exact).aic
    one = chosen[(chosen["bits"] == 2) & (chosen["attention_gain"] == 1)]
    assert law.fit_settings(one) is None


def test_of_runs_that_differ_in_their_horizon_the_longest_counts():
    long = {"steps_planned": 6000, "steps_done": 6000, "tokens": 6000}
    runs = make_runs(
        *({"arm": "faulty", "seed": seed, "bits": 2, "tokens": 600} for seed in (1, 2)),
        {"arm": "long", "seed": 1, "bits": 2, **long},
        {"arm": "m3", "seed": 1, "bits": 3, "tokens": 600},
        {"arm": "batch", "seed": 1, "bits": 2, "tokens": 1200},
    )
    assert list(law.longest(runs)["run_id"]) == ["faulty/2", "long/1", "m3/1", "batch/1"]


def test_first_head_at_the_onset():
    heads = pd.DataFrame(
        {
            "step": [0, 0, 10, 10, 20, 20],
            "layer": [0, 1] * 3,
            "head": [0, 1] * 3,
            "max_logit_raw": [1.0, 2.0, 9.0, 3.0, 9.0, np.inf],
        }
    )
    assert law.first_head(heads, 5) == "0.0"
    assert law.first_head(heads, 0) == "1.1"
    assert law.first_head(heads, np.nan) == "0.0"
