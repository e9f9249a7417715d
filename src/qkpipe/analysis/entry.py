"""What decides entry into the channel: an error's size, its mean, its coherence in time, or the row-sum residual (Table 3)."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from scipy.stats import rankdata

from qkpipe.analysis.frames import (
    COUNTED,
    bootstrap,
    counted,
    faulty,
    paired_log_ratio,
    read_frame,
    spread,
    spread_columns,
    study_runs,
    uncorrected,
    write_frame,
)
from qkpipe.analysis.settings import NONE
from qkpipe.config import Study
from qkpipe.paths import StudyPaths

OUTPUTS = ("entry", "entry_runs", "entry_predictors")

PREDICTORS = ("error_ratio", "error_mean", "coherence", "residual_r_mean")
CHANNEL = {"log_sigma_ratio": "final_sigma_q", "log_logit_ratio": "peak_logit"}

IDENTITY = [
    *((name, pa.string()) for name in ("arm", "route", "fault", "structure", "placement", "model")),
    *((name, pa.float64()) for name in ("hold", "memory", "hold_in_memories", "fault_gain")),
]

ENTRY_RUNS = pa.schema(
    [
        ("run_id", pa.string()),
        *IDENTITY,
        ("seed", pa.int64()),
        ("seed_role", pa.string()),
        ("collapsed", pa.bool_()),
        ("collapse_step", pa.int64()),
        *((name, pa.float64()) for name in (*PREDICTORS, *CHANNEL)),
    ]
)
"""One row an uncorrected run whose fault lies in gradients or updates. ``memory``: Adam's 1/(1-beta1) steps,
``hold_in_memories`` the steps for which the error keeps its signs over it. Predictors are means over the looks before the
collapse: the error's norm over the gradient's, its mean, its sign-coherence, the row-sum residual. Outcomes: log ratio to
the twin of the same seed.
"""

ENTRY = pa.schema([*IDENTITY, *COUNTED, *spread_columns(*PREDICTORS, *CHANNEL)])
"""``entry_runs`` by arm."""

ENTRY_PREDICTORS = pa.schema(
    [
        *((name, pa.string()) for name in ("route", "predictor", "outcome", "seed_roles")),
        ("n", pa.int64()),
        ("arms", pa.int64()),
        *((name, pa.float64()) for name in ("rank_correlation", "low", "high")),
    ]
)
"""How well each predictor ranks the outcome, over runs of one route (``any``: all): Spearman's correlation with a bootstrap
interval over seeds. Rows of one route and outcome rest on the same runs, so they can be compared.
"""


def build(paths: StudyPaths, study: Study) -> list[Path]:
    """Write ``entry``, ``entry_runs`` and ``entry_predictors`` from ``runs`` and ``signals``; returns the files."""
    found = entry_runs(study_runs(paths), read_frame(paths, "signals"), study)
    return [
        write_frame(paths.analysis("entry"), by_arm(found), ENTRY),
        write_frame(paths.analysis("entry_runs"), found, ENTRY_RUNS),
        write_frame(paths.analysis("entry_predictors"), compare_predictors(found), ENTRY_PREDICTORS),
    ]


def entry_runs(runs: pd.DataFrame, signals: pd.DataFrame, study: Study) -> pd.DataFrame:
    """Rows of ``ENTRY_RUNS``."""
    found = runs[(runs["fault"] != NONE) & faulty(runs) & uncorrected(runs)].copy()
    found["memory"] = 1 / (1 - found["beta1"])
    found["hold_in_memories"] = found["hold"] / found["memory"]
    looks = signals.merge(found[["run_id", "collapse_step"]], on="run_id")
    before = looks[~(looks["step"] >= looks["collapse_step"].astype(float))]
    means = before.replace(np.inf, np.nan).groupby("run_id")[list(PREDICTORS)].mean()
    found = found.join(means, on="run_id")
    for outcome, column in CHANNEL.items():
        found[outcome] = paired_log_ratio(found, runs, column, lambda arm: study.arms[arm].twin)
    return found


def by_arm(found: pd.DataFrame) -> list[dict[str, Any]]:
    """Rows of ``ENTRY``, in the config's order."""
    rows = []
    for _, own in found.groupby("arm", sort=False):
        row = {name: own.iloc[0][name] for name, _ in IDENTITY} | counted(own)
        for name in (*PREDICTORS, *CHANNEL):
            row |= spread(own[name], name)
        rows.append(row)
    return rows


def compare_predictors(found: pd.DataFrame) -> list[dict[str, Any]]:
    """Rows of ``ENTRY_PREDICTORS``; a route needs three arms, and runs that know every predictor shown."""
    groups = [("any", found), *found.groupby("route", sort=False)]
    rows = []
    for route, own in groups:
        known = [name for name in PREDICTORS if own[name].notna().any()]
        for outcome in CHANNEL:
            complete = own.dropna(subset=[*known, outcome])
            if complete["arm"].nunique() < 3:
                continue
            y = complete[outcome].to_numpy(float)
            for predictor in known:
                x = complete[predictor].to_numpy(float)
                low, high = bootstrap(
                    complete["seed"], lambda rows, x=x, y=y: rank_correlation(x[rows], y[rows])
                )
                rows.append(
                    {
                        "route": route,
                        "predictor": predictor,
                        "outcome": outcome,
                        "seed_roles": ", ".join(sorted(set(complete["seed_role"]))),
                        "n": len(complete),
                        "arms": complete["arm"].nunique(),
                        "rank_correlation": rank_correlation(x, y),
                        "low": low,
                        "high": high,
                    }
                )
    return rows


def rank_correlation(x: np.ndarray, y: np.ndarray) -> float:
    """Spearman's; NaN where either does not vary."""
    x, y = (rankdata(values) - (len(values) + 1) / 2 for values in (x, y))
    size = math.sqrt((x @ x) * (y @ y))
    return float(x @ y / size) if size > 0 else math.nan
