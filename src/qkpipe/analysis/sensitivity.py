"""How much the verdicts rest on the constants of the crash rule: every run judged anew over a grid of them."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa

from qkpipe.analysis.frames import median_known, study_runs, write_frame
from qkpipe.analysis.verdict import PAPER, PRIMARY, CrashRule, judge
from qkpipe.config import Study
from qkpipe.paths import StudyPaths
from qkpipe.store.parquet import read_runs

OUTPUTS = ("sensitivity",)

CONSTANTS = ("open_fraction", "open_nat", "close_fraction", "close_nat", "smoothing", "censor_steps")

SENSITIVITY = pa.schema(
    [
        ("rule", pa.string()),
        *((name, pa.float64()) for name in CONSTANTS),
        ("arm", pa.string()),
        ("group", pa.string()),
        *((name, pa.int64()) for name in ("n", "collapsed", "agree")),
        ("median_collapse_step", pa.float64()),
    ]
)
"""One row a rule and arm. ``agree``: runs on which the rule says what the primary one says."""


def rules() -> dict[str, CrashRule]:
    """The grid by name: the primary rule with one constant changed or two, and the paper's, as it is and scaled."""
    grid = {"primary": PRIMARY, "paper": PAPER}
    for open_fraction, close_fraction in product((0.1, 0.2, 0.3, 0.4), (0.05, 0.1, 0.15)):
        if close_fraction < open_fraction:
            changed = replace(PRIMARY, open_fraction=open_fraction, close_fraction=close_fraction)
            grid[f"open {open_fraction:g}, close {close_fraction:g}"] = changed
    for nat in (0.05, 0.2, 0.4):
        grid[f"open {nat:g} nat"] = replace(PRIMARY, open_nat=nat)
    for smoothing in (0.9, 0.98):
        grid[f"EMA {smoothing:g}"] = replace(PRIMARY, smoothing=smoothing)
    for steps in (0, 25, 100):
        grid[f"last {steps} censored"] = replace(PRIMARY, censor_steps=steps)
    for scale in (0.5, 0.75, 1.5):
        scaled = replace(PAPER, open_nat=scale * PAPER.open_nat, close_nat=scale * PAPER.close_nat)
        grid[f"paper x{scale:g}"] = scaled
    kept = {}
    for name, rule in grid.items():  # the primary rule again under another name says nothing new
        if rule not in kept.values():
            kept[name] = rule
    return kept


def build(paths: StudyPaths, study: Study) -> list[Path]:
    """Write ``analysis/sensitivity.parquet`` from ``runs`` and every run's losses; returns the file."""
    runs = study_runs(paths)
    losses = {
        run.run_id: read_runs([paths.run(run.arm, run.seed)], "steps", ["step", "loss"]).to_pandas()
        for run in runs.itertuples()
    }
    return [write_frame(paths.analysis("sensitivity"), sensitivity(runs, losses), SENSITIVITY)]


def sensitivity(runs: pd.DataFrame, losses: dict[str, pd.DataFrame]) -> list[dict[str, Any]]:
    """Rows of ``SENSITIVITY``; ``losses``: run_id -> frame of step and loss."""
    verdicts = []
    for run_id, frame in losses.items():
        for name, rule in rules().items():
            verdict = judge(frame["loss"], rule)
            step = None if verdict.collapse_index is None else int(frame["step"].iloc[verdict.collapse_index])
            verdicts.append({"run_id": run_id, "rule": name, "verdict": verdict.collapsed, "at": step})
    judged = pd.DataFrame(verdicts, columns=["run_id", "rule", "verdict", "at"])
    judged = judged.merge(runs[["run_id", "arm", "group", "collapsed"]], on="run_id")
    rows = []
    for (name, arm), own in judged.groupby(["rule", "arm"], sort=False):
        rule = rules()[name]
        rows.append(
            {
                "rule": name,
                **{constant: getattr(rule, constant) for constant in CONSTANTS},
                "arm": arm,
                "group": own["group"].iloc[0],
                "n": len(own),
                "collapsed": int(own["verdict"].sum()),
                "agree": int((own["verdict"] == own["collapsed"]).sum()),
                "median_collapse_step": median_known(own["at"]),
            }
        )
    return rows
