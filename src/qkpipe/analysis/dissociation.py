"""Fault source x correction: how often an arm collapses, and where its spectral norm and logits end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa

from qkpipe.config import Study
from qkpipe.paths import StudyPaths
from qkpipe.store.parquet import read_table, write_table

OUTPUTS = ("dissociation",)

MEASURES = ("final_loss", "final_sigma_q", "peak_sigma_q", "peak_logit")

DISSOCIATION = pa.schema(
    [
        *((name, pa.string()) for name in ("arm", "group", "description", "source", "route")),
        *((name, pa.string()) for name in ("intervention", "probe", "model", "twin", "seeds", "seed_roles")),
        ("headline", pa.bool_()),
        *((name, pa.int64()) for name in ("n", "collapsed", "collapsed_paper", "censored", "fired")),
        ("median_collapse_step", pa.float64()),
        ("median_fire_step", pa.float64()),
        *((f"{measure}_{part}", pa.float64()) for measure in MEASURES for part in ("median", "min", "max")),
    ]
)
"""One row an arm, over all its seeds; ``headline``: one of those the study leads with (``Study.headline``)."""


def build(paths: StudyPaths, study: Study) -> list[Path]:
    """Write ``analysis/dissociation.parquet`` from ``runs``; returns the file."""
    runs = read_table(paths.analysis("runs")).to_pandas()
    path = paths.analysis("dissociation")
    write_table(path, summarise(runs, study), DISSOCIATION)
    return [path]


def summarise(runs: pd.DataFrame, study: Study) -> list[dict[str, Any]]:
    """Rows of the table, in the config's order of arms."""
    headline = study.headline
    return [
        _arm(runs[runs["arm"] == arm], study) | {"headline": arm in headline}
        for arm in study.runnable
        if (runs["arm"] == arm).any()
    ]


def _arm(runs: pd.DataFrame, study: Study) -> dict[str, Any]:
    runs = runs.sort_values("seed")
    first = runs.iloc[0]
    shared = ("arm", "group", "source", "route", "intervention", "probe", "model", "twin")
    row: dict[str, Any] = {name: first[name] for name in shared}
    row |= {
        "description": study.arms[first["arm"]].description,
        "seeds": ", ".join(str(seed) for seed in runs["seed"]),
        "seed_roles": ", ".join(sorted(set(runs["seed_role"]))),
        "n": len(runs),
        "collapsed": int(runs["collapsed"].sum()),
        "collapsed_paper": int(runs["collapsed_paper"].sum()),
        "censored": int(runs["censored"].sum()),
        "fired": int(runs["fire_step"].notna().sum()),
        "median_collapse_step": _over_seeds(runs["collapse_step"], "median"),
        "median_fire_step": _over_seeds(runs["fire_step"], "median"),
    }
    for measure in MEASURES:
        for part in ("median", "min", "max"):
            row[f"{measure}_{part}"] = _over_seeds(runs[measure], part)
    return row


def _over_seeds(values: pd.Series, statistic: str) -> float | None:
    known = values.dropna().astype(float)
    return float(getattr(known, statistic)()) if len(known) else None
