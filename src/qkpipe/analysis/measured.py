"""What a run's own files say, computed once: kept in ``measured.parquet``, so that a new run does not re-read the others.

The file is no output of the workflow but a memory: without it everything is computed anew. A row holds as long as the run's
``run.json`` and the code that measures are the same.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Iterable
from types import ModuleType
from typing import Any

import pandas as pd
import pyarrow as pa

from qkpipe.analysis import curves, verdict
from qkpipe.analysis.curves import CURVES, last_finite, peak_finite, run_curves
from qkpipe.analysis.verdict import PAPER, PRIMARY, judge, smooth
from qkpipe.errors import BadInput
from qkpipe.paths import RunPaths, StudyPaths
from qkpipe.store.parquet import read_table, write_table
from qkpipe.store.scan import CompletedRun
from qkpipe.telemetry.schema import RUNS

SCALARS = (
    "collapsed", "collapse_step", "censored", "collapsed_paper", "collapse_step_paper", "min_loss", "final_loss",
    "final_val_loss", "peak_sigma_q", "final_sigma_q", "peak_logit", "wall_s",
)  # fmt: skip
"""Columns of ``runs`` that are read out of telemetry."""

AXES = tuple(name for name in CURVES.names if name not in ("run_id", "arm", "group", "seed", "seed_role"))
"""Columns of ``curves`` that are: a list each, in one row a run."""

MEASURED = pa.schema(
    [
        ("run_id", pa.string()),
        ("stamp", pa.string()),
        *(RUNS.field(name) for name in SCALARS),
        *(pa.field(name, pa.list_(CURVES.field(name).type)) for name in AXES),
    ]
)


def measured(paths: StudyPaths, completed: Iterable[CompletedRun]) -> dict[str, dict[str, Any]]:
    """``run_id`` -> its row of :data:`MEASURED`; only runs that are new or have changed are read."""
    known = {row["run_id"]: row for row in _remembered(paths)}
    code = _code()
    rows = {}
    for run in completed:
        stamp = f"{run.paths.record.stat().st_mtime_ns}-{code}"
        row = known.get(run.run_id)
        if row is None or row["stamp"] != stamp:
            row = {"run_id": run.run_id, "stamp": stamp, **_measure(run.paths)}
        rows[run.run_id] = row
    if rows != known:
        write_table(paths.measured, list(rows.values()), MEASURED)
    return rows


def _remembered(paths: StudyPaths) -> list[dict[str, Any]]:
    try:
        table = read_table(paths.measured)
    except BadInput:  # missing or torn: a memory can be lost
        return []
    return table.to_pylist() if table.schema.equals(MEASURED) else []


def _measure(run: RunPaths) -> dict[str, Any]:
    """Final values carry the last finite value forward."""
    frame = run_curves(run)
    steps = read_table(run.table("steps"), ["step", "loss", "max_logit", "val_loss"]).to_pandas()
    timing = read_table(run.table("timing"), ["wall_s"]).to_pandas()
    primary, paper = judge(steps["loss"], PRIMARY), judge(steps["loss"], PAPER)
    ema = pd.Series(smooth(steps["loss"]))
    return {
        "collapsed": primary.collapsed,
        "collapse_step": _step(steps, primary.collapse_index),
        "censored": primary.censored,
        "collapsed_paper": paper.collapsed,
        "collapse_step_paper": _step(steps, paper.collapse_index),
        "min_loss": float(ema.min()) if len(ema) else None,
        "final_loss": last_finite(ema),
        "final_val_loss": last_finite(steps["val_loss"]),
        "peak_sigma_q": peak_finite(frame["sigma_q"]),
        "final_sigma_q": last_finite(frame["sigma_q"]),
        "peak_logit": peak_finite(pd.concat([frame["max_logit"], steps["max_logit"]])),
        "wall_s": float(timing["wall_s"].sum()),
        **{
            name: pa.array(frame[name], CURVES.field(name).type, from_pandas=True).to_pylist()
            for name in AXES
        },
    }


def _step(steps: pd.DataFrame, index: int | None) -> int | None:
    return None if index is None else int(steps["step"].iloc[index])


def _code() -> str:
    """Changes with the source of whatever a row is computed by."""
    modules: tuple[ModuleType | Any, ...] = (inspect.getmodule(_code), curves, verdict)
    return hashlib.sha256("".join(inspect.getsource(module) for module in modules).encode()).hexdigest()[:16]
