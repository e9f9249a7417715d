"""The contest of remedies: what each does to the fault, and what it does, and costs, where there is nothing to cure."""

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
    spread,
    spread_columns,
    study_runs,
    usual,
    write_frame,
)
from qkpipe.analysis.loci import unprotected
from qkpipe.analysis.settings import NONE
from qkpipe.analysis.statistics import clopper_pearson
from qkpipe.config import Study
from qkpipe.paths import StudyPaths

OUTPUTS = ("remedies",)

MEASURES = ("loss_over_twin", "healthy_loss_over_twin", "lead", "cost")

REMEDIES = pa.schema(
    [
        *((name, pa.string()) for name in ("remedy", "correction", "source", "arms")),
        *COUNTED,
        *(
            (name, pa.int64())
            for name in ("at_stake", "rescued", "healthy_n", "healthy_collapsed", "healthy_fired")
        ),
        *(
            (f"{share}_{end}", pa.float64())
            for share in ("rescued", "healthy_fired")
            for end in ("low", "high")
        ),
        *spread_columns(*MEASURES),
    ]
)
"""One row a remedy (all but repairs at the source), on the study's own model, optimizer, tokenizer and horizon, against the
``source`` that most remedies were run with. ``at_stake``, ``rescued``, ``lead``, ``loss_over_twin``: as in ``loci``.
``healthy``: runs of the remedy without any fault; ``healthy_fired``: those of them in which it acted though nothing was wrong
(of remedies that have a firing; exact 95% intervals). ``cost``: seconds a step over those of the same arm and seed without the
remedy, by the clock of this machine, healthy pairs where there are any.
"""


def build(paths: StudyPaths, study: Study) -> list[Path]:
    """Write ``analysis/remedies.parquet`` from ``runs``; returns the file."""
    return [write_frame(paths.analysis("remedies"), remedies(study_runs(paths), study), REMEDIES)]


def remedies(runs: pd.DataFrame, study: Study) -> list[dict[str, Any]]:
    """Rows of ``REMEDIES``, in the config's order."""
    corrections = runs.drop_duplicates("arm").set_index("arm")["correction"].to_dict()
    runs = usual(runs, "model", "optimizer", "tokenizer", "steps_planned")
    acting = runs[
        ~runs["correction"].isin([NONE, "repair"])
        & ~runs["correction"].str.contains("splice|fault_only")
        & runs["probe_action"].isna()
    ]
    against = acting[acting["source"] != NONE].drop_duplicates(["source", "intervention"])["source"]
    if against.empty:
        return []
    source = against.mode().iloc[0]
    acting = acting[acting["source"].isin([source, NONE])]
    own = acting.assign(base=acting["arm"].map(lambda arm: unprotected(study, arm, corrections)))
    keys = list(zip(own["base"], own["seed"]))
    for name in ("collapsed", "collapse_step"):
        own[f"base_{name}"] = [of_run(runs, name).get(key) for key in keys]
    own["loss"] = own["final_val_loss"].astype(float) - _reference(
        runs, "final_val_loss", zip(own["arm"].map(lambda arm: study.arms[arm].twin), own["seed"])
    )
    own["lead"] = own["base_collapse_step"].astype(float) - own["fire_step"].astype(float)
    timed = runs.assign(step_s=runs["wall_s"].astype(float) / runs["steps_done"].astype(float))
    own["cost"] = own["wall_s"].astype(float) / own["steps_done"].astype(float)
    own["cost"] /= _reference(timed, "step_s", keys)
    rows = []
    for remedy, both in own.groupby("intervention", sort=False):
        fault, calm = both[both["source"] == source], both[both["source"] == NONE]
        if len(fault):
            rows.append({"remedy": remedy, "source": source} | _row(fault, calm))
    return rows


def _reference(runs: pd.DataFrame, column: str, keys: Any) -> np.ndarray:
    known = of_run(runs, column)
    return np.asarray([known.get(key, np.nan) for key in keys], float)


def _row(fault: pd.DataFrame, calm: pd.DataFrame) -> dict[str, Any]:
    stake = fault[fault["base_collapsed"].notna()]
    stake = stake[stake["base_collapsed"].astype(bool)]
    rescued = int((~stake["collapsed"].astype(bool)).sum())
    low, high = clopper_pearson(rescued, len(stake), LEVEL)
    row = {
        "correction": fault["correction"].iloc[0],
        "arms": ", ".join(dict.fromkeys([*fault["arm"], *calm["arm"]])),
    }
    row |= counted(fault) | {
        "at_stake": len(stake),
        "rescued": rescued,
        "rescued_low": low,
        "rescued_high": high,
    }
    row |= {"healthy_n": len(calm), "healthy_collapsed": int(calm["collapsed"].astype(bool).sum())}
    if pd.concat([fault, calm])["threshold"].notna().any():
        fired = int(calm["fire_step"].notna().sum())
        low, high = clopper_pearson(fired, len(calm), LEVEL)
        row |= {"healthy_fired": fired, "healthy_fired_low": low, "healthy_fired_high": high}
    row |= spread(fault["loss"], "loss_over_twin") | spread(calm["loss"], "healthy_loss_over_twin")
    return row | spread(fault["lead"], "lead") | spread((calm if len(calm) else fault)["cost"], "cost")
