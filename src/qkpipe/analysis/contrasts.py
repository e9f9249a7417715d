"""Every arm against its twin and its parent, paired by seed: description only, so no p-value, whatever the seeds' role."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from pyarrow import csv

from qkpipe.analysis.curves import last_finite, logit_is_bounded
from qkpipe.analysis.references import references
from qkpipe.config import Study
from qkpipe.paths import StudyPaths
from qkpipe.store.parquet import read_table, write_table

OUTCOMES = ("log_sigma_ratio", "log_logit_ratio", "final_loss_diff")

CONTRASTS = pa.schema(
    [
        ("arm", pa.string()),
        ("reference", pa.string()),
        ("relation", pa.string()),
        ("seed_role", pa.string()),
        ("label", pa.string()),
        ("seeds", pa.string()),
        ("n_pairs", pa.int64()),
        ("collapsed_arm", pa.int64()),
        ("collapsed_reference", pa.int64()),
        *((f"{outcome}_{part}", pa.float64()) for outcome in OUTCOMES for part in ("mean", "min", "max")),
        ("logit_bounded", pa.bool_()),
    ]
)
"""Ratios are natural logs of arm over reference at the end of the run; mean, min and max are over the paired seeds.
``log_logit_ratio`` is null where a normalisation bounds the logits of either side (``logit_bounded``).
"""


def build(paths: StudyPaths, study: Study) -> list[Path]:
    """Write ``tables/contrasts.parquet`` and ``.csv`` from ``runs`` and ``curves``; returns the files written."""
    runs = read_table(paths.analysis("runs")).to_pandas()
    curves = read_table(paths.analysis("curves")).to_pandas()
    table = contrasts(runs, curves, study)
    written = [paths.table("contrasts"), paths.table("contrasts", "csv")]
    write_table(written[0], table, CONTRASTS)
    csv.write_csv(read_table(written[0]), written[1])
    return written


def contrasts(runs: pd.DataFrame, curves: pd.DataFrame, study: Study) -> list[dict[str, Any]]:
    """Rows of the contrast table, arm by arm in the config's order; a role of seeds is never mixed with another."""
    ends = _ends(runs, curves)
    rows: list[dict[str, Any]] = []
    for arm in study.runnable:
        for relation, reference in references(study, arm).items():
            for role, treated in ends[ends["arm"] == arm].groupby("seed_role", sort=True):
                pairs = treated.merge(ends[ends["arm"] == reference], on="seed", suffixes=("", "_reference"))
                if len(pairs):
                    identity = {"arm": arm, "reference": reference, "relation": relation, "seed_role": role}
                    rows.append(identity | _contrast(pairs.sort_values("seed")))
    return rows


def _ends(runs: pd.DataFrame, curves: pd.DataFrame) -> pd.DataFrame:
    """One row a run: collapse, and log sigma, log logit, loss at the end."""
    by_run = dict(iter(curves.groupby("run_id")))
    ends = runs[["run_id", "arm", "seed", "seed_role", "collapsed", "final_loss"]].copy()
    ends["log_sigma"] = np.log(runs["final_sigma_q"].astype(float))
    final_logit = pd.Series(
        [last_finite(by_run[run]["max_logit"]) for run in runs["run_id"]], runs.index, float
    )
    ends["log_logit"] = np.log(final_logit.where(final_logit > 0))
    ends["bounded"] = [logit_is_bounded(by_run[run]) for run in runs["run_id"]]
    return ends


def _contrast(pairs: pd.DataFrame) -> dict[str, Any]:
    bounded = bool((pairs["bounded"] | pairs["bounded_reference"]).any())
    differences = {
        "log_sigma_ratio": pairs["log_sigma"] - pairs["log_sigma_reference"],
        "log_logit_ratio": pairs["log_logit"] - pairs["log_logit_reference"],
        "final_loss_diff": pairs["final_loss"] - pairs["final_loss_reference"],
    }
    row: dict[str, Any] = {
        "label": "exploratory",
        "seeds": ", ".join(str(seed) for seed in pairs["seed"]),
        "n_pairs": len(pairs),
        "collapsed_arm": int(pairs["collapsed"].sum()),
        "collapsed_reference": int(pairs["collapsed_reference"].sum()),
        "logit_bounded": bounded,
    }
    for outcome, difference in differences.items():
        values = difference.dropna()
        known = len(values) > 0 and not (outcome == "log_logit_ratio" and bounded)
        for part in ("mean", "min", "max"):
            row[f"{outcome}_{part}"] = float(getattr(values, part)()) if known else None
    return row
