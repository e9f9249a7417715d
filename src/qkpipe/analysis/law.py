"""The residual law: does the time to collapse depend on the fault through the row-sum residual alone?

The law is log T = a_seed - b log r - c log lr + s Z, Z standard normal: a censored log-normal accelerated-failure-time
model (lifelines) in which every seed has an intercept of its own (strata: runs of one seed share their initialisation and
their batches), T is the step of the collapse, censored where none came, and r the dose (:mod:`qkpipe.analysis.residual`). A
term whose covariate does not vary is left out. A small ridge (``PENALTY``) keeps the intercept of a seed without a collapse
finite.

*Does everything collapse onto r?* If it does, then at given r and lr neither the mantissa bits, the gain, the tile nor the
rounding mode adds anything: each is added to the law in turn, and twice the gain in log-likelihood is held against
chi-square. One rejection refutes the simple version.

*Without r*: the same model on the settings themselves (mantissa bits, log gain, log tile, rounding mode) shows what each is
worth where r is not asked, and whether r, one number, does better than all of them.

*Same mode?* A law that joins doses is only meaningful if they fail alike: by dose, the order of events, the head whose
logits grew first, and which corrections rescue.

The fit is exploratory: no p-value is given where a tuning seed is among the runs.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from lifelines import LogNormalAFTFitter
from lifelines.exceptions import ConvergenceError
from scipy.stats import chi2

from qkpipe.analysis.entropy import onsets
from qkpipe.analysis.frames import LEVEL, read_frame, write_frame
from qkpipe.analysis.references import parent
from qkpipe.analysis.residual import doses
from qkpipe.analysis.settings import NONE
from qkpipe.analysis.survival import durations
from qkpipe.config import Study
from qkpipe.paths import StudyPaths
from qkpipe.store.parquet import read_runs

OUTPUTS = ("law_runs", "law", "law_collapse", "law_settings", "same_mode", "prediction")

PENALTY = 1e-4
FEWEST = 5
"""Collapses that a fit needs, in addition to one a coefficient."""

FAMILIES = ("bits", "attention_gain", "tile", "rounding")
"""What might matter beside r."""

LAW_RUNS = pa.schema(
    [
        *(
            (name, pa.string())
            for name in ("run_id", "arm", "source", "repair", "rounding", "model", "optimizer")
        ),
        *((name, pa.int64()) for name in ("seed", "bits", "tile", "duration")),
        ("seed_role", pa.string()),
        *((name, pa.float64()) for name in ("dose", "lr", "attention_gain", "predicted_median")),
        ("collapsed", pa.bool_()),
    ]
)
"""The runs of the law: a fault of the recurrence alone, nothing acting but a source-local repair. ``duration``: T, or the
steps trained where ``collapsed`` is false; ``predicted_median``: by the law, with the seed's own intercept.
"""

LAW = pa.schema(
    [
        ("term", pa.string()),
        *(
            (name, pa.float64())
            for name in ("estimate", "low", "high", "p_value", "sigma", "log_likelihood", "aic")
        ),
        *((name, pa.int64()) for name in ("n", "collapsed", "seeds")),
        ("seed_roles", pa.string()),
    ]
)
"""One row a term: ``log_r`` and ``log_lr`` (whose estimates are -b and -c), ``intercept`` (mean over seeds). Wald intervals
at 95%; ``sigma``: spread of log T about the law.
"""

LAW_COLLAPSE = pa.schema(
    [
        ("beside_r", pa.string()),
        ("levels", pa.string()),
        *((name, pa.int64()) for name in ("n", "collapsed", "degrees")),
        *((name, pa.float64()) for name in ("statistic", "p_value", "aic_gain")),
        ("seed_roles", pa.string()),
    ]
)
"""What a family of settings adds to the law: likelihood-ratio statistic, its degrees of freedom, p, and the fall of AIC
(above 0: the family tells something that r does not).
"""

LAW_SETTINGS = LAW
"""The same columns for the model on settings instead of r: ``bits``, ``log_gain``, ``log_tile``, ``rounding_<mode>`` (against
the first mode by name) and ``log_lr``; those that vary. Of the two models, the one with the lower ``aic`` tells more.
"""

SAME_MODE = pa.schema(
    [
        *(
            (name, pa.string())
            for name in ("arm", "source", "order_of_events", "first_heads", "rescued_by", "not_by")
        ),
        *((name, pa.float64()) for name in ("dose", "first_head_share")),
        *((name, pa.int64()) for name in ("n", "collapsed")),
    ]
)
"""One row an uncorrected arm of the law that collapses. ``order_of_events``: signals by median onset; ``first_heads``:
layer.head whose raw logit was largest when the logits left health (or at the collapse), by seed, ``first_head_share`` that
of the most frequent; ``rescued_by``, ``not_by``: corrections of this arm under which no, or some, at-stake seed collapses.
"""

PREDICTION = pa.schema(
    [
        *((name, pa.string()) for name in ("target", "measurement", "falsified_if")),
        *((name, pa.float64()) for name in ("dose", "lr", "median", "low", "high")),
        ("horizon", pa.int64()),
        ("collapse_probability", pa.float64()),
    ]
)
"""What the law says about a run outside it: the median of T with the interval that holds 95% of runs (a new seed's
intercept, the coefficients' error and the spread about the law), and the chance of a collapse within ``horizon``.
"""

GPT2_SMALL = {"lr": 1e-3, "horizon": 60_000}
PREDICTED_BITS = 7


@dataclass(frozen=True)
class Fit:
    """A fitted law: coefficients (log scale), their covariance, the spread about it, and what it rests on."""

    terms: tuple[str, ...]
    seeds: tuple[str, ...]
    coefficients: pd.Series
    covariance: pd.DataFrame
    sigma: float
    log_likelihood: float
    n: int
    collapsed: int

    @property
    def aic(self) -> float:
        return 2 * (len(self.coefficients) + 1 - self.log_likelihood)

    @property
    def intercept(self) -> float:
        return float(self.coefficients[list(self.seeds)].mean())

    def log_median(self, frame: pd.DataFrame) -> pd.Series:
        """log of the median T of each run, with its own seed's intercept."""
        return pd.Series(
            _design(frame, self.terms, self.seeds).to_numpy() @ self.coefficients.to_numpy(), frame.index
        )


def build(paths: StudyPaths, study: Study) -> list[Path]:
    """Write the tables of ``OUTPUTS`` from ``runs``, ``signals`` and the heads of collapsed runs; returns the files."""
    every, signals = read_frame(paths, "runs"), read_frame(paths, "signals")
    chosen = law_runs(every, signals)
    fit = fit_law(chosen)
    if fit is not None:
        chosen["predicted_median"] = np.exp(fit.log_median(chosen))
    return [
        write_frame(paths.analysis("law_runs"), chosen, LAW_RUNS),
        write_frame(paths.analysis("law"), describe(fit, chosen), LAW),
        write_frame(paths.analysis("law_collapse"), collapse_onto_r(chosen), LAW_COLLAPSE),
        write_frame(paths.analysis("law_settings"), describe(fit_settings(chosen), chosen), LAW_SETTINGS),
        write_frame(paths.analysis("same_mode"), same_mode(paths, study, signals, chosen), SAME_MODE),
        write_frame(paths.analysis("prediction"), predict(fit, chosen), PREDICTION),
    ]


def law_runs(runs: pd.DataFrame, signals: pd.DataFrame) -> pd.DataFrame:
    """Rows of ``LAW_RUNS`` with ``log_r`` and ``log_lr``; candidate regimes are doses like any other.

    Of the models, the one with most of these runs: the law holds a fixed architecture.
    """
    shown = runs[
        (runs["attention"] == "streaming")
        & (runs["quantities"] != NONE)
        & (runs["fault"] == NONE)
        & runs["correction"].isin([NONE, "repair"])
        & runs["probe_action"].isna()
    ].copy()
    shown = longest(shown).merge(doses(shown, signals)[["run_id", "dose"]], on="run_id")
    shown["duration"] = durations(shown)
    shown = shown[shown["dose"] > 0]
    if len(shown):
        shown = shown[shown["model"] == shown["model"].mode().iloc[0]].reset_index(drop=True)
    shown["log_r"], shown["log_lr"] = np.log(shown["dose"]), np.log(shown["lr"])
    return shown


def longest(runs: pd.DataFrame) -> pd.DataFrame:
    """Of runs that differ in their horizon alone, the longest: the others are its beginning, and would count twice."""
    alike = [
        "seed",
        "source",
        "quantities",
        "bits",
        "rounding",
        "attention_gain",
        "tile",
        "intervention",
        "repair",
    ]
    alike += ["model", "optimizer", "tokenizer", "lr", "warmup"]
    tokens_a_step = runs["tokens"].astype(float) / runs["steps_done"]
    ordered = runs.assign(tokens_a_step=tokens_a_step).sort_values("steps_planned", kind="stable")
    return runs.loc[ordered.drop_duplicates([*alike, "tokens_a_step"], keep="last").index].sort_index()


def fit_law(runs: pd.DataFrame, extra: pd.DataFrame | None = None) -> Fit | None:
    """The law, with ``extra`` covariates beside r (columns, by row of ``runs``); None where r does not vary."""
    terms = tuple(name for name in ("log_r", "log_lr") if runs[name].nunique() > 1)
    frame = runs if extra is None else pd.concat([runs, extra], axis=1)
    terms += tuple(extra.columns) if extra is not None else ()
    return fit_terms(frame, terms) if "log_r" in terms else None


def fit_settings(runs: pd.DataFrame) -> Fit | None:
    """The same model on the settings that vary, instead of r; None where none does."""
    modes = pd.get_dummies(runs["rounding"].map(_level), prefix="rounding", drop_first=True, dtype=float)
    frame = runs.assign(log_gain=np.log(runs["attention_gain"]), log_tile=np.log(runs["tile"].astype(float)))
    frame = pd.concat([frame, modes], axis=1)
    names = ("bits", "log_gain", "log_tile", *modes.columns, "log_lr")
    terms = tuple(name for name in names if frame[name].nunique() > 1)
    return fit_terms(frame, terms) if set(terms) - {"log_lr"} else None


def fit_terms(frame: pd.DataFrame, terms: tuple[str, ...]) -> Fit | None:
    """The model on these columns; None where there are too few collapses, or where the likelihood has no maximum."""
    seeds = tuple(f"seed {seed}" for seed in sorted(set(frame["seed"])))
    collapsed = int(frame["collapsed"].sum())
    if collapsed < max(FEWEST, len(terms) + 2):
        return None
    design = _design(frame, terms, seeds)
    data = design.assign(duration=frame["duration"], collapsed=frame["collapsed"].astype(int))
    fitter = LogNormalAFTFitter(alpha=1 - LEVEL, penalizer=PENALTY, fit_intercept=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of small samples; what it finds is shown with its interval
        try:
            fitter.fit(data, "duration", "collapsed")
        except ConvergenceError:  # the covariates tell collapse from survival without exception
            return None
    names = list(design.columns)
    coefficients = fitter.params_.xs("mu_")[names]
    covariance = fitter.variance_matrix_.xs("mu_", level=0).xs("mu_", level=0, axis=1).loc[names, names]
    sigma = float(np.exp(fitter.params_.xs("sigma_").iloc[0]))
    return Fit(
        terms, seeds, coefficients, covariance, sigma, float(fitter.log_likelihood_), len(frame), collapsed
    )


def _design(frame: pd.DataFrame, terms: tuple[str, ...], seeds: tuple[str, ...]) -> pd.DataFrame:
    columns = {name: frame[name].astype(float) for name in terms}
    columns |= {seed: (frame["seed"].map("seed {}".format) == seed).astype(float) for seed in seeds}
    return pd.DataFrame(columns, index=frame.index)


def _roles(runs: pd.DataFrame) -> str:
    return ", ".join(sorted(set(runs["seed_role"])))


def _p_value(statistic: float, degrees: int, runs: pd.DataFrame) -> float | None:
    """No p-value is computed on tuning seeds."""
    return None if (runs["seed_role"] == "tuning").any() else float(chi2.sf(max(statistic, 0.0), degrees))


def describe(fit: Fit | None, runs: pd.DataFrame) -> list[dict[str, Any]]:
    """Rows of ``LAW``."""
    if fit is None:
        return []
    shared = {"n": fit.n, "collapsed": fit.collapsed, "seeds": len(fit.seeds), "seed_roles": _roles(runs)}
    shared |= {"sigma": fit.sigma, "log_likelihood": fit.log_likelihood, "aic": fit.aic}
    rows = []
    weights = {term: pd.Series({term: 1.0}) for term in fit.terms}
    weights["intercept"] = pd.Series(1 / len(fit.seeds), list(fit.seeds))
    for term, weight in weights.items():
        estimate = float(fit.coefficients[weight.index] @ weight)
        error = math.sqrt(float(weight @ fit.covariance.loc[weight.index, weight.index] @ weight))
        row = {
            "term": term,
            "estimate": estimate,
            "low": estimate - 1.96 * error,
            "high": estimate + 1.96 * error,
        }
        if term != "intercept":
            row["p_value"] = _p_value((estimate / error) ** 2, 1, runs)
        rows.append(row | shared)
    return rows


def collapse_onto_r(runs: pd.DataFrame) -> list[dict[str, Any]]:
    """Rows of ``LAW_COLLAPSE``, one a family that varies."""
    base = fit_law(runs)
    rows = []
    for family in FAMILIES:
        levels = runs[family].map(_level)
        if base is None or levels.nunique() < 2:
            continue
        extra = pd.get_dummies(levels, prefix=family, drop_first=True, dtype=float)
        row = {
            "beside_r": family,
            "levels": ", ".join(sorted(set(levels))),
            "n": base.n,
            "collapsed": base.collapsed,
        }
        wider = fit_law(runs, extra)
        if wider is not None:
            statistic = 2 * (wider.log_likelihood - base.log_likelihood)
            row |= {
                "statistic": statistic,
                "degrees": extra.shape[1],
                "p_value": _p_value(statistic, extra.shape[1], runs),
                "aic_gain": base.aic - wider.aic,
                "seed_roles": _roles(runs),
            }
        rows.append(row)
    return rows


def _level(value: Any) -> str:
    return "none" if pd.isna(value) else value if isinstance(value, str) else f"{value:g}"


def same_mode(
    paths: StudyPaths, study: Study, signals: pd.DataFrame, chosen: pd.DataFrame
) -> list[dict[str, Any]]:
    """Rows of ``SAME_MODE``, by increasing dose."""
    runs = read_frame(paths, "runs")
    onset = onsets(runs, signals)
    corrections = runs.drop_duplicates("arm").set_index("arm")["correction"]
    rows = []
    for arm, own in chosen[chosen["repair"] == NONE].groupby("arm", sort=False):
        fallen = own[own["collapsed"].astype(bool)]
        if fallen.empty:
            continue
        events = onset[onset["arm"] == arm].groupby("signal")["onset_step"].median().dropna().sort_values()
        at = onset[(onset["arm"] == arm) & (onset["signal"] == "max_logit_raw")].set_index("run_id")[
            "onset_step"
        ]
        heads = [
            first_head(read_runs([paths.run(arm, run.seed)], "heads").to_pandas(), at.get(run.run_id, np.nan))
            for run in fallen.itertuples()
        ]
        common = max(set(heads), key=heads.count)
        outcome = _rescue(runs, study, arm, set(fallen["seed"]), corrections)
        rows.append(
            {
                "arm": arm,
                "source": own["source"].iloc[0],
                "dose": float(np.exp(own["log_r"].mean())),
                "n": len(own),
                "collapsed": len(fallen),
                "order_of_events": " < ".join(f"{name} {step:.0f}" for name, step in events.items()),
                "first_heads": ", ".join(heads),
                "first_head_share": heads.count(common) / len(heads),
                "rescued_by": ", ".join(name for name, held in outcome.items() if held),
                "not_by": ", ".join(name for name, held in outcome.items() if not held),
            }
        )
    return sorted(rows, key=lambda row: row["dose"])


def first_head(heads: pd.DataFrame, step: float) -> str:
    """``layer.head`` of the largest raw logit at the first look from ``step`` on (the last look where ``step`` is not
    known).
    """
    finite = heads[np.isfinite(heads["max_logit_raw"].astype(float))]
    later = finite[finite["step"] >= step]
    look = later["step"].min() if len(later) else finite["step"].max()
    top = finite[finite["step"] == look].sort_values("max_logit_raw").iloc[-1]
    return f"{int(top['layer'])}.{int(top['head'])}"


def _rescue(
    runs: pd.DataFrame, study: Study, arm: str, fallen: set[int], corrections: pd.Series
) -> dict[str, bool]:
    """By correction of an arm that extends ``arm``: whether no seed that collapses without it collapses with it."""
    held: dict[str, bool] = {}
    for child in runs["arm"].unique():
        if parent(study, child) != arm or corrections[child] == NONE:
            continue
        own = runs[(runs["arm"] == child) & runs["seed"].isin(fallen)]
        if len(own):
            held[own["intervention"].iloc[0]] = not own["collapsed"].any()
    return held


def predict(fit: Fit | None, runs: pd.DataFrame) -> list[dict[str, Any]]:
    """Row of ``PREDICTION`` for GPT-2-small in bf16: its dose is taken to be this scale's at seven bits, until it is
    measured.

    A law without a learning-rate term (only one was run) cannot be carried to another; then there is no prediction. Nor is
    there one where no dose at seven bits was run.
    """
    measured = runs.loc[(runs["bits"] == PREDICTED_BITS) & (runs["attention_gain"] == 1), "log_r"]
    if fit is None or "log_lr" not in fit.terms or measured.empty:
        return []
    log_r, log_lr = float(measured.mean()), math.log(GPT2_SMALL["lr"])
    weight = pd.Series({"log_r": log_r, "log_lr": log_lr} | dict.fromkeys(fit.seeds, 1 / len(fit.seeds)))
    names = list(weight.index)
    log_median = float(fit.coefficients[names] @ weight)
    between = float(fit.coefficients[list(fit.seeds)].var(ddof=1)) if len(fit.seeds) > 1 else 0.0
    spread = math.sqrt(float(weight @ fit.covariance.loc[names, names] @ weight) + between + fit.sigma**2)
    low, high = math.exp(log_median - 1.96 * spread), math.exp(log_median + 1.96 * spread)
    chance = 0.5 * math.erfc(-(math.log(GPT2_SMALL["horizon"]) - log_median) / (spread * math.sqrt(2)))
    return [
        {
            "target": "GPT-2-small, bf16 carries and recurrence, true gain",
            "dose": math.exp(log_r),
            "median": math.exp(log_median),
            "low": low,
            "high": high,
            "collapse_probability": chance,
            **GPT2_SMALL,
            "measurement": "residual_r in the first 100 steps after warm-up, then the step of the collapse",
            "falsified_if": f"at the measured r, T is outside the law's 95% interval (here {low:.0f} to {high:.0f})",
        }
    ]
