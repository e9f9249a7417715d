"""Which repair at the source helps at which precision: every repaired arm against the same arm without it, seed by seed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from qkpipe.analysis.frames import (
    COUNTED,
    LEVEL,
    counted,
    of_run,
    paired_log_ratio,
    read_frame,
    spread,
    spread_columns,
    study_runs,
    write_frame,
)
from qkpipe.analysis.isolation import question
from qkpipe.analysis.references import parent
from qkpipe.analysis.residual import doses
from qkpipe.analysis.settings import NONE
from qkpipe.analysis.statistics import clopper_pearson
from qkpipe.config import Study
from qkpipe.paths import StudyPaths

OUTPUTS = ("repairs",)

MEASURES = ("log_residual_ratio", "log_sigma_ratio", "loss_over_twin")

REPAIRS = pa.schema(
    [
        *(
            (name, pa.string())
            for name in ("arm", "repair", "precision", "unrepaired", "quantities", "rounding")
        ),
        *((name, pa.int64()) for name in ("bits", "tile")),
        *((name, pa.float64()) for name in ("attention_gain", "lr")),
        *COUNTED,
        *((name, pa.int64()) for name in ("pairs", "at_stake", "rescued", "harmed")),
        *((name, pa.float64()) for name in ("rescued_low", "rescued_high")),
        *spread_columns(*MEASURES),
    ]
)
"""One row a repaired arm whose only source is attention. ``repair``: what is done at the source, ``fp32 <quantities>`` where
quantities of the recurrence are exact that the unrepaired arm rounds; ``precision``: label of the unrepaired arm's bits,
rounding, gain and quantities. ``at_stake``: pairs in which the unrepaired run collapses, ``rescued`` those of them in which
this one does not (exact interval of the share at 95%), ``harmed``: pairs in which only this one collapses. Ratios are to the
unrepaired run of the seed, natural logs: of the early row-sum residual, and of the final sigma(W_Q).
"""


def build(paths: StudyPaths, study: Study) -> list[Path]:
    """Write ``analysis/repairs.parquet`` from ``runs`` and ``signals``; returns the file."""
    runs = study_runs(paths)
    runs = runs.merge(doses(runs, read_frame(paths, "signals"))[["run_id", "dose"]], on="run_id")
    return [write_frame(paths.analysis("repairs"), repairs(runs, study), REPAIRS)]


def repairs(runs: pd.DataFrame, study: Study) -> list[dict[str, Any]]:
    """Rows of ``REPAIRS``, precision by precision; ``runs`` carries the column ``dose``."""
    shown = runs[
        (runs["attention"] == "streaming")
        & (runs["quantities"] != NONE)
        & (runs["fault"] == NONE)
        & runs["correction"].isin([NONE, "repair"])
        & runs["probe_action"].isna()
    ]
    settings = shown.drop_duplicates("arm").set_index("arm")
    of = {name: of_run(shown, name) for name in ("collapsed", "collapse_step")}
    twin_loss = of_run(runs, "final_val_loss")
    rows = []
    for arm, own in shown.groupby("arm", sort=False):
        base = parent(study, arm)
        if base not in settings.index:
            continue
        done = repair(settings.loc[arm], settings.loc[base])
        if done is None:
            continue
        own = own.assign(base_collapsed=[of["collapsed"].get((base, seed)) for seed in own["seed"]])
        paired = own[own["base_collapsed"].notna()]
        falls, fell = paired["collapsed"].astype(bool), paired["base_collapsed"].astype(bool)
        rescued, at_stake = int((fell & ~falls).sum()), int(fell.sum())
        low, high = clopper_pearson(rescued, at_stake, LEVEL)
        row = {"arm": arm, "repair": done, "unrepaired": base, "precision": precision(settings.loc[base])}
        row |= {
            name: own[name].iloc[0]
            for name in ("quantities", "rounding", "bits", "tile", "attention_gain", "lr")
        }
        row |= counted(own) | {"pairs": len(paired), "at_stake": at_stake, "rescued": rescued}
        row |= {"harmed": int((falls & ~fell).sum()), "rescued_low": low, "rescued_high": high}
        twins = [twin_loss.get((study.arms[arm].twin, seed), np.nan) for seed in own["seed"]]
        own["loss_over_twin"] = own["final_val_loss"].astype(float) - np.asarray(twins, float)
        for name, column in (("log_residual_ratio", "dose"), ("log_sigma_ratio", "final_sigma_q")):
            own[name] = paired_log_ratio(own, shown, column, lambda arm: parent(study, arm))
        for name in MEASURES:
            row |= spread(own[name], name)
        rows.append(row)
    order = {name: i for i, name in enumerate(dict.fromkeys(row["precision"] for row in rows))}
    return sorted(rows, key=lambda row: order[row["precision"]])


def repair(run: pd.Series, unrepaired: pd.Series) -> str | None:
    """What ``run`` repairs that ``unrepaired`` does not, both being rows of ``runs``; None where that is nothing, or where
    they differ in the fault itself.
    """
    fault = ("bits", "rounding", "attention_gain", "tile", "lr", "model", "optimizer", "steps_planned")
    if any(run[name] != unrepaired[name] for name in fault) or unrepaired["repair"] != NONE:
        return None
    if run["repair"] != NONE:
        return run["repair"] if run["quantities"] == unrepaired["quantities"] else None
    asked, what = question(run["quantities"], NONE)
    return f"fp32 {what}" if asked == "repairs" and unrepaired["quantities"] == "all" else None


def precision(run: pd.Series) -> str:
    """A row of ``runs`` as ``m = 2``, with what else its fault has."""
    parts = [f"m = {run['bits']:g}"]
    parts += [f"gain {run['attention_gain']:g}"] if run["attention_gain"] != 1 else []
    parts += [run["rounding"].replace("_", " ")] if run["rounding"] != "even" else []
    parts += [f"{run['quantities']} alone"] if run["quantities"] != "all" else []
    return ", ".join(parts)
