"""The row-sum residual r of every run: how large it is before anything else has moved, and how its sign behaves in time.

The dose of a run is its r while the model is still healthy: the geometric mean over the looks from the end of the
learning-rate warm-up to twice its length, r being the mean over layers, and only up to the collapse.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa

from qkpipe.analysis.frames import read_frame, write_frame
from qkpipe.config import Study
from qkpipe.paths import StudyPaths

OUTPUTS = ("residual",)

RESIDUAL = pa.schema(
    [
        *((name, pa.string()) for name in ("run_id", "arm", "group", "source", "correction", "repair")),
        *((name, pa.string()) for name in ("quantities", "rounding", "model", "optimizer")),
        ("bits", pa.int64()),
        ("tile", pa.int64()),
        ("attention_gain", pa.float64()),
        ("lr", pa.float64()),
        ("seed", pa.int64()),
        ("seed_role", pa.string()),
        ("dose", pa.float64()),
        ("signed", pa.float64()),
        ("turns", pa.float64()),
        ("collapsed", pa.bool_()),
        ("collapse_step", pa.int64()),
        ("log_sigma", pa.float64()),
    ]
)
"""One row a run whose backward is observable. ``dose``: above; ``signed``: mean row sum of dS over the same looks;
``turns``: how often a layer's mean row sum changes its sign between looks before the collapse (1/2 for a coin);
``log_sigma`` at the end.
"""


def build(paths: StudyPaths, study: Study) -> list[Path]:
    """Write ``analysis/residual.parquet`` from ``runs`` and ``signals``, candidate regimes included; returns the file."""
    runs = read_frame(paths, "runs")
    found = runs.merge(doses(runs, read_frame(paths, "signals")), on="run_id")
    found["log_sigma"] = np.log(found["final_sigma_q"].astype(float))
    return [write_frame(paths.analysis("residual"), found.dropna(subset=["dose"]), RESIDUAL)]


def doses(runs: pd.DataFrame, signals: pd.DataFrame) -> pd.DataFrame:
    """``run_id``, ``dose``, ``signed``, ``turns`` of every run; NaN where no look falls into the window."""
    looks = signals.merge(runs[["run_id", "warmup", "collapse_step"]], on="run_id")
    before = looks[~(looks["step"] >= looks["collapse_step"].astype(float))]
    window = before[(before["step"] >= before["warmup"]) & (before["step"] <= 2 * before["warmup"])]
    r = window["residual_r_mean"].where(np.isfinite(window["residual_r_mean"]))
    with np.errstate(divide="ignore"):
        log_r = np.log(r.where(r > 0))
    found = pd.DataFrame(
        {
            "dose": np.exp(log_r.groupby(window["run_id"]).mean()),
            "signed": window.groupby("run_id")["residual_mean"].mean(),
            "turns": before.groupby("run_id")["residual_turns"].mean(),
        }
    )
    return found.reindex(runs["run_id"]).rename_axis("run_id").reset_index()
