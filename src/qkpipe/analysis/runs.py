"""One row a run: what was asked, how it ended, and both verdicts. Every other table and figure starts here."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa

from qkpipe.analysis.curves import CURVES, last_finite, peak_finite, run_curves
from qkpipe.analysis.settings import settings
from qkpipe.analysis.verdict import PAPER, PRIMARY, judge, smooth
from qkpipe.config import RunKey, Study
from qkpipe.paths import StudyPaths
from qkpipe.store.parquet import read_table, write_table
from qkpipe.store.scan import CompletedRun, union
from qkpipe.telemetry.schema import RUNS

OUTPUTS = ("runs", "curves", "exclusions")
"""Names of the analysis files that :func:`aggregate` writes."""

EXCLUSIONS = pa.schema(
    [("arm", pa.string()), ("seed", pa.int64()), ("path", pa.string()), ("reason", pa.string())]
)


def aggregate(paths: StudyPaths, study: Study, requested: Iterable[RunKey]) -> list[Path]:
    """Write ``runs``, ``curves`` and ``exclusions`` over the union of the requested runs and all runs of the same hash.

    Raises :class:`qkpipe.errors.BadInput` naming the requested runs that are not there. Returns the files written.
    """
    found = union(paths, study, requested)
    rows: list[dict[str, Any]] = []
    curves: list[pd.DataFrame] = []
    for run in found.completed:
        role = study.role(run.key.arm, run.key.seed)
        frame = run_curves(run.paths)
        identity = {
            "run_id": run.config.run_id,
            "arm": run.key.arm,
            "group": run.config.group,
            "seed": run.key.seed,
            "seed_role": role,
        }
        rows.append(identity | {"scale": study.scale} | describe(run, frame))
        curves.append(frame.assign(**identity))
    written = [paths.analysis(name) for name in OUTPUTS]
    write_table(written[0], rows, RUNS)
    joined = pd.concat(curves) if curves else CURVES.empty_table().to_pandas()
    write_table(written[1], pa.Table.from_pandas(joined[CURVES.names], CURVES, preserve_index=False), CURVES)
    write_table(written[2], [vars(exclusion) for exclusion in found.excluded], EXCLUSIONS)
    return written


def describe(run: CompletedRun, curves: pd.DataFrame) -> dict[str, Any]:
    """What one run was and how it ended (columns of ``runs``); final values carry the last finite value forward."""
    record = run.record
    steps = read_table(run.paths.table("steps"), ["step", "loss", "max_logit", "val_loss"]).to_pandas()
    timing = read_table(run.paths.table("timing"), ["wall_s"]).to_pandas()
    verdict, paper = judge(steps["loss"], PRIMARY), judge(steps["loss"], PAPER)
    ema = pd.Series(smooth(steps["loss"]))
    return {
        **run.config.labels(),
        **settings(run.config),
        "twin": run.config.twin,
        "steps_planned": record["steps_planned"],
        "steps_done": record["steps_done"],
        "collapsed": verdict.collapsed,
        "collapse_step": _step(steps, verdict.collapse_index),
        "censored": verdict.censored,
        "collapsed_paper": paper.collapsed,
        "collapse_step_paper": _step(steps, paper.collapse_index),
        "fire_step": record["fire_step"],
        "min_loss": float(ema.min()) if len(ema) else None,
        "final_loss": last_finite(ema),
        "final_val_loss": last_finite(steps["val_loss"]),
        "peak_sigma_q": peak_finite(curves["sigma_q"]),
        "final_sigma_q": last_finite(curves["sigma_q"]),
        "peak_logit": peak_finite(pd.concat([curves["max_logit"], steps["max_logit"]])),
        "tokens": record["tokens"],
        "epochs": record["epochs"],
        "wall_s": float(timing["wall_s"].sum()),
        "device": record["device"],
        "config_hash": record["config_hash"],
        "data_hash": record["data_hash"],
        "code_version": record["code_version"],
    }


def _step(steps: pd.DataFrame, index: int | None) -> int | None:
    return None if index is None else int(steps["step"].iloc[index])
