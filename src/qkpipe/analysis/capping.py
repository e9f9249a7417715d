"""QK normalisation caps the logits, not sigma(W_Q): what is applied, what the weights would give, and the spectrum (Figure
S1).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from qkpipe.analysis.frames import (
    COUNTED,
    counted,
    paired_log_ratio,
    read_frame,
    spread,
    spread_columns,
    study_runs,
    write_frame,
)
from qkpipe.analysis.references import parent
from qkpipe.config import Study
from qkpipe.paths import StudyPaths

OUTPUTS = ("capping", "capping_curves")

MEASURES = ("applied", "raw", "sigma", "log_sigma_ratio", "log_sigma_twin")

CAPPING = pa.schema(
    [
        ("arm", pa.string()),
        ("correction", pa.string()),
        ("source", pa.string()),
        ("bound", pa.float64()),
        ("within_bound", pa.int64()),
        *COUNTED,
        *spread_columns(*MEASURES),
    ]
)
"""One row an arm under QK normalisation, always on or latched by a guard. ``applied``: the largest logit while it was on,
whose bound is sqrt(d_head) (``within_bound``: runs below it, 1e-5 and the rounding of q and k to bf16 allowed for);
``raw``: the largest logit at the end without it; ``sigma`` of W_Q at the end, and its log ratio to the arm without the
correction and to the twin.
"""

CAPPING_CURVES = pa.schema(
    [
        *((name, pa.string()) for name in ("run_id", "arm", "role")),
        *((name, pa.int64()) for name in ("seed", "step")),
        *((name, pa.float64()) for name in ("max_logit", "max_logit_raw", "sigma_q")),
    ]
)
"""Curves of these arms (``role`` capped) and of what they extend (``uncapped``)."""

ROUNDED = 1 + 2.0**-8


def build(paths: StudyPaths, study: Study) -> list[Path]:
    """Write ``capping`` and ``capping_curves`` from ``runs`` and ``curves``; returns the files."""
    runs, curves = study_runs(paths), read_frame(paths, "curves")
    found = capped_runs(runs, curves, study)
    uncapped = {parent(study, arm) for arm in found["arm"]} - set(found["arm"])
    roles = dict.fromkeys(uncapped, "uncapped") | dict.fromkeys(found["arm"], "capped")
    shown = curves[curves["arm"].isin(roles)]
    shown = shown.assign(role=shown["arm"].map(roles))
    return [
        write_frame(paths.analysis("capping"), by_arm(found), CAPPING),
        write_frame(paths.analysis("capping_curves"), shown, CAPPING_CURVES),
    ]


def capped_runs(runs: pd.DataFrame, curves: pd.DataFrame, study: Study) -> pd.DataFrame:
    """Runs that QK normalisation was on in, with ``MEASURES`` and ``bound``."""
    kinds = runs["correction"].str.split("+")
    always = kinds.map(lambda names: "qk_norm" in names).astype(bool)
    latched = kinds.map(lambda names: "guard" in names).astype(bool) & runs["fire_step"].notna()
    found = runs[always | latched].copy()
    since = found["fire_step"].astype(float).fillna(-1).to_numpy()
    found["bound"] = np.sqrt(found["d_head"].astype(float))
    by_run = dict(iter(curves.groupby("run_id")))
    on = [by_run[run][by_run[run]["step"] > start] for run, start in zip(found["run_id"], since)]
    found["applied"] = [curve["max_logit"].max() for curve in on]
    ends = [curve["max_logit_raw"].dropna() for curve in on]
    found["raw"] = [end.iloc[-1] if len(end) else np.nan for end in ends]
    found["sigma"] = found["final_sigma_q"]
    found["log_sigma_ratio"] = paired_log_ratio(found, runs, "final_sigma_q", lambda arm: parent(study, arm))
    found["log_sigma_twin"] = paired_log_ratio(found, runs, "final_sigma_q", lambda arm: study.arms[arm].twin)
    return found


def by_arm(found: pd.DataFrame) -> list[dict[str, Any]]:
    """Rows of ``CAPPING``, in the config's order."""
    rows = []
    for arm, own in found.groupby("arm", sort=False):
        first = own.iloc[0]
        row = {"arm": arm, "correction": first["correction"], "source": first["source"]}
        within = own["applied"] <= own["bound"] * ROUNDED**2 * (1 + 1e-5)
        row |= {"bound": float(first["bound"]), "within_bound": int(within.sum())} | counted(own)
        for name in MEASURES:
            row |= spread(own[name], name)
        rows.append(row)
    return rows
