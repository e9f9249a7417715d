"""Anatomy of the guard: when a live trigger fires, how long before the unguarded run collapses, and what happens after."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa

from qkpipe.analysis.curves import CURVES
from qkpipe.analysis.references import parent
from qkpipe.config import RunConfig, Study
from qkpipe.paths import StudyPaths
from qkpipe.store.parquet import read_runs, read_table, write_table

OUTPUTS = ("guard_curves", "guard_firing")

GUARD_CURVES = pa.schema(
    [
        *CURVES,
        ("panel", pa.string()),
        ("role", pa.string()),
        ("threshold", pa.float64()),
        ("fire_step", pa.int64()),
    ]
)
"""One panel a triggered arm; ``role``: triggered, unguarded (what it extends), always_on (a sibling with QK-norm), twin."""

GUARD_FIRING = pa.schema(
    [
        ("run_id", pa.string()),
        ("arm", pa.string()),
        ("intervention", pa.string()),
        ("seed", pa.int64()),
        ("seed_role", pa.string()),
        ("threshold", pa.float64()),
        ("fire_step", pa.int64()),
        ("fire_detail", pa.string()),
        ("collapsed", pa.bool_()),
        ("unguarded_arm", pa.string()),
        ("unguarded_collapsed", pa.bool_()),
        ("unguarded_collapse_step", pa.int64()),
        ("lead_steps", pa.int64()),
    ]
)
"""One row a run with a live trigger. ``lead_steps``: from the firing to the collapse of the same seed without the guard."""


def build(paths: StudyPaths, study: Study) -> list[Path]:
    """Write ``analysis/guard_curves.parquet`` and ``analysis/guard_firing.parquet``; returns the files."""
    runs = read_table(paths.analysis("runs")).to_pandas()
    curves = read_table(paths.analysis("curves")).to_pandas()
    thresholds = {
        arm: threshold
        for arm, seed in runs.groupby("arm")["seed"].first().items()
        if (threshold := trigger_threshold(study.resolve(arm, int(seed)))) is not None
    }
    written = [paths.analysis(name) for name in OUTPUTS]
    panels = [
        _panel(arm, thresholds[arm], runs, curves, study) for arm in study.runnable if arm in thresholds
    ]
    joined = pd.concat(panels) if panels else GUARD_CURVES.empty_table().to_pandas()
    table = pa.Table.from_pandas(joined[GUARD_CURVES.names], GUARD_CURVES, preserve_index=False)
    write_table(written[0], table, GUARD_CURVES)
    write_table(written[1], _firings(paths, runs, thresholds, study), GUARD_FIRING)
    return written


def trigger_threshold(run: RunConfig) -> float | None:
    """Logit past which a live-triggered intervention of the run acts; None if it has none."""
    return next((float(act.threshold) for act in run.interventions if hasattr(act, "threshold")), None)


def panel_roles(study: Study, arm: str) -> dict[str, str]:
    """Arms of the panel of a triggered arm, by arm: what each is there for."""
    unguarded = parent(study, arm)
    roles = {arm: "triggered"}
    if unguarded is None:
        return roles
    roles[unguarded] = "unguarded"
    if twin := study.arms[unguarded].twin:
        roles[twin] = "twin"
    for sibling in study.runnable:
        if parent(study, sibling) == unguarded and study.resolve(sibling, 0).model.qk_norm != "none":
            roles.setdefault(sibling, "always_on")
    return roles


def _panel(
    arm: str, threshold: float, runs: pd.DataFrame, curves: pd.DataFrame, study: Study
) -> pd.DataFrame:
    roles = panel_roles(study, arm)
    shown = curves[curves["arm"].isin(roles)].merge(runs[["run_id", "fire_step"]], on="run_id")
    order = shown["arm"].map({name: position for position, name in enumerate(roles)})
    shown = shown.assign(panel=arm, role=shown["arm"].map(roles), threshold=threshold, order=order)
    shown["fire_step"] = shown["fire_step"].astype("Int64")
    return shown.sort_values(["order", "seed", "step"], kind="stable").drop(columns="order")


def _firings(
    paths: StudyPaths, runs: pd.DataFrame, thresholds: dict[str, float], study: Study
) -> list[dict[str, Any]]:
    by_key = {(run.arm, run.seed): run for run in runs.itertuples()}
    rows = []
    for run in runs[runs["arm"].isin(thresholds)].itertuples():
        unguarded = parent(study, run.arm)
        other = by_key.get((unguarded, run.seed))
        fired, collapse = _int(run.fire_step), _int(other.collapse_step) if other else None
        events = read_runs([paths.run(run.arm, run.seed)], "events").to_pylist()
        detail = next(
            (event["detail"] for event in events if event["step"] == fired and "fired" in event["kind"]), None
        )
        rows.append(
            {
                "run_id": run.run_id,
                "arm": run.arm,
                "intervention": run.intervention,
                "seed": run.seed,
                "seed_role": run.seed_role,
                "threshold": thresholds[run.arm],
                "fire_step": fired,
                "fire_detail": _words(detail),
                "collapsed": bool(run.collapsed),
                "unguarded_arm": unguarded,
                "unguarded_collapsed": bool(other.collapsed) if other else None,
                "unguarded_collapse_step": collapse,
                "lead_steps": collapse - fired if collapse is not None and fired is not None else None,
            }
        )
    return rows


def _words(detail: str | None) -> str | None:
    """An event's JSON detail as ``key value, key value``."""
    if not detail:
        return None
    return ", ".join(f"{key} {value}" for key, value in json.loads(detail).items())


def _int(value: Any) -> int | None:
    return None if pd.isna(value) else int(value)
