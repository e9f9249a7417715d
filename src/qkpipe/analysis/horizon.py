"""The long horizon: does what holds for the study's length hold for ten times as long, and what does it cost by then?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from qkpipe.analysis.curves import CURVES
from qkpipe.analysis.frames import (
    COUNTED,
    bootstrap,
    counted,
    median_known,
    of_run,
    read_frame,
    spread,
    spread_columns,
    study_runs,
    write_frame,
)
from qkpipe.config import Study
from qkpipe.paths import StudyPaths

OUTPUTS = ("horizon", "horizon_curves")

MEASURES = ("final_val_loss", "loss_over_twin", "loss_over_always_on", "final_sigma_q", "peak_logit")

HORIZON = pa.schema(
    [
        *((name, pa.string()) for name in ("arm", "correction", "source", "always_on")),
        *((name, pa.int64()) for name in ("steps_planned", "short_steps")),
        *COUNTED,
        *((name, pa.int64()) for name in ("fired", "short_n", "short_collapsed", "late")),
        ("median_collapse_step", pa.float64()),
        *spread_columns(*MEASURES),
        *((f"loss_over_always_on_{end}", pa.float64()) for end in ("low", "high")),
    ]
)
"""One row an arm that is planned for more steps than the study's arms are. ``short_n``, ``short_collapsed``: runs of these
seeds within the study's own horizon ``short_steps``, by the same settings; ``late``: runs whose collapse comes after it.
Losses are validation losses at the end, less that of the healthy twin and of the arm of the same source and horizon with QK
normalisation from the start (``always_on``), seed by seed; the interval of the mean of the latter is a bootstrap over seeds.
"""

HORIZON_CURVES = CURVES
"""Curves of these runs."""


def build(paths: StudyPaths, study: Study) -> list[Path]:
    """Write ``horizon`` and ``horizon_curves`` from ``runs`` and ``curves``; returns the files."""
    runs, curves = study_runs(paths), read_frame(paths, "curves")
    rows = horizon(runs, study)
    shown = curves[curves["arm"].isin([row["arm"] for row in rows])]
    return [
        write_frame(paths.analysis("horizon"), rows, HORIZON),
        write_frame(paths.analysis("horizon_curves"), shown, HORIZON_CURVES),
    ]


def horizon(runs: pd.DataFrame, study: Study) -> list[dict[str, Any]]:
    """Rows of ``HORIZON``, in the config's order."""
    if runs.empty:
        return []
    short = int(runs.drop_duplicates("arm")["steps_planned"].mode().iloc[0])
    long = runs[runs["steps_planned"] > short]
    same = ["source", "intervention", "probe", "tile", "model", "optimizer", "tokenizer", "seed"]
    brief = runs[runs["steps_planned"] == short].drop_duplicates(same)
    loss = of_run(runs, "final_val_loss")
    rows = []
    for arm, own in long.groupby("arm", sort=False):
        first = own.iloc[0]
        always = long[
            (long["source"] == first["source"])
            & (long["correction"] == "qk_norm")
            & (long["steps_planned"] == first["steps_planned"])
        ]
        always_on = None if always.empty else always["arm"].iloc[0]
        before = own[same].merge(brief, on=same)
        own = own.copy()
        for name, other in (("loss_over_twin", study.arms[arm].twin), ("loss_over_always_on", always_on)):
            reference = np.asarray([loss.get((other, seed), np.nan) for seed in own["seed"]], float)
            own[name] = own["final_val_loss"].astype(float) - reference
        row = {"arm": arm, "always_on": always_on, "short_steps": short} | counted(own)
        row |= {name: first[name] for name in ("correction", "source", "steps_planned")}
        row |= {
            "fired": int(own["fire_step"].notna().sum()),
            "short_n": len(before),
            "short_collapsed": int(before["collapsed"].astype(bool).sum()),
            "late": int((own["collapse_step"].astype(float) >= short).sum()),
            "median_collapse_step": median_known(own["collapse_step"]),
        }
        for name in MEASURES:
            row |= spread(own[name], name)
        known = own.dropna(subset=["loss_over_always_on"])
        difference = known["loss_over_always_on"].to_numpy(float)
        low, high = bootstrap(known["seed"], lambda rows, d=difference: float(d[rows].mean()))
        rows.append(row | {"loss_over_always_on_low": low, "loss_over_always_on_high": high})
    return rows
