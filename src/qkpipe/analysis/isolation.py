"""Which quantity's precision makes the collapse, which one's repairs it, and what more or less of the same fault does
(Table 1).
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
    median_known,
    read_frame,
    spread,
    spread_columns,
    study_runs,
    usual,
    watched,
    write_frame,
)
from qkpipe.analysis.residual import doses
from qkpipe.analysis.settings import EVERY, NONE, RECURRENCE
from qkpipe.config import Study
from qkpipe.paths import StudyPaths

OUTPUTS = ("isolation",)

KEY = ("quantities", "bits", "rounding", "tile", "repair", "attention_gain", "source")

ISOLATION = pa.schema(
    [
        ("question", pa.string()),
        ("what", pa.string()),
        ("quantities", pa.string()),
        ("bits", pa.int64()),
        ("rounding", pa.string()),
        ("tile", pa.int64()),
        ("repair", pa.string()),
        ("attention_gain", pa.float64()),
        ("source", pa.string()),
        ("arms", pa.string()),
        *COUNTED,
        ("median_collapse_step", pa.float64()),
        *spread_columns("log_sigma", "log_logit", "final_val_loss", "residual"),
    ]
)
"""One row a setting of the recurrence, over its arms and seeds, attention being the only source and nothing acting but a
source-local repair. ``question``: ``clean`` (nothing rounded), ``makes`` (only the named quantities are), ``repairs`` (all
but the named ones are), ``dose`` (all are), ``repair`` (a source-local repair is on); ``what`` names them. ``residual``:
the dose of :mod:`qkpipe.analysis.residual`; sigma and logit are natural logs, of W_Q at the end and of the run's peak.
"""


def build(paths: StudyPaths, study: Study) -> list[Path]:
    """Write ``analysis/isolation.parquet`` from ``runs`` and ``signals``; returns the file."""
    runs = study_runs(paths)
    table = isolate(runs.merge(doses(runs, read_frame(paths, "signals"))[["run_id", "dose"]], on="run_id"))
    return [write_frame(paths.analysis("isolation"), table, ISOLATION)]


def isolate(runs: pd.DataFrame) -> list[dict[str, Any]]:
    """Rows of the table; ``runs`` carries the column ``dose``."""
    runs = usual(runs, "model", "optimizer", "tokenizer", "accumulation", "steps_planned")
    shown = runs[
        (runs["attention"] == "streaming")
        & (runs["fault"] == NONE)
        & runs["correction"].isin([NONE, "repair"])
        & runs["probe_action"].isna()
        & ~watched(runs)
    ]
    rows = [_row(group) for _, group in shown.groupby(list(KEY), sort=False, dropna=False)]
    order = {question: i for i, question in enumerate(("clean", "makes", "repairs", "dose", "repair"))}
    return sorted(rows, key=lambda row: (order[row["question"]], row["what"]))


def question(quantities: str, repair: str) -> tuple[str, str]:
    """What a setting asks, and the quantities (or the repair) that it is about."""
    if repair != NONE:
        return "repair", repair
    if quantities == NONE:
        return "clean", "fp32"
    if quantities == EVERY:
        return "dose", EVERY
    rounded = quantities.split("+")
    if 2 * len(rounded) <= len(RECURRENCE):
        return "makes", quantities
    return "repairs", "+".join(quantity for quantity in RECURRENCE if quantity not in rounded)


def _row(runs: pd.DataFrame) -> dict[str, Any]:
    first = runs.iloc[0]
    asked, what = question(first["quantities"], first["repair"])
    row = {name: first[name] for name in KEY} | {"question": asked, "what": what}
    return (
        row
        | counted(runs)
        | {
            "arms": ", ".join(dict.fromkeys(runs["arm"])),
            "median_collapse_step": median_known(runs["collapse_step"]),
        }
        | spread(np.log(runs["final_sigma_q"].astype(float)), "log_sigma")
        | spread(np.log(runs["peak_logit"].astype(float)), "log_logit")
        | spread(runs["final_val_loss"], "final_val_loss")
        | spread(runs["dose"], "residual")
    )
