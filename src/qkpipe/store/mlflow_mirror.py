"""Mirrors runs to MLflow. Parquet is the truth and MLflow a view: one process writes it, workers never do.

A mirrored run is found by its tag ``qkpipe.run_id``; how far it got is the tag ``qkpipe.mirrored_step``. A second mirror of a
finished run adds nothing, and an interrupted one goes on where it stopped: a metric's time stamp is the run's start plus its
step in milliseconds, so that writing a batch twice is writing it once.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pandas as pd
import pyarrow as pa

from qkpipe.config import RunConfig, RunKey, Study
from qkpipe.paths import ScratchPaths, StudyPaths
from qkpipe.store.parquet import read_table
from qkpipe.store.scan import CompletedRun, scan
from qkpipe.telemetry.schema import TABLES

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

DEFAULT_TRACKING_URI = "sqlite:///mlflow.db"
WATCH_SECONDS = 15.0
METRICS_A_CALL, PARAMS_A_CALL = 1000, 100  # MLflow's limits of one log_batch

STEP_METRICS = ("loss", "val_loss", "lr", "grad_norm", "update_norm", "guard_active")
LAYER_METRICS = ("sigma_q_1", "sigma_k_1", "sigma_qk_max", "residual_r")
OUTCOMES = ("collapsed", "collapse_step", "censored", "collapsed_paper", "fire_step", "seed_role")


def mirror(paths: StudyPaths, study: Study, tracking_uri: str | None = None, watch: bool = False) -> int:
    """Bring MLflow up to date with the runs of the current config; returns how many runs were written to.

    The store is ``tracking_uri``, by default ``sqlite:///mlflow.db`` in the working directory, where ``mlflow ui`` looks. With
    ``watch``, goes on until interrupted, and shows unfinished runs of the study's targets as far as their last checkpoint.
    """
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    from mlflow import MlflowClient

    for noisy in ("mlflow", "alembic"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    client = MlflowClient(tracking_uri or DEFAULT_TRACKING_URI)
    written = _mirror_once(client, paths, study, live=watch)
    try:
        while watch:
            time.sleep(WATCH_SECONDS)
            written += _mirror_once(client, paths, study, live=True)
    except KeyboardInterrupt:
        pass
    return written


def _mirror_once(client: MlflowClient, paths: StudyPaths, study: Study, live: bool) -> int:
    from mlflow.entities import RunTag

    name = f"qkpipe-{study.scale}"
    known = client.get_experiment_by_name(name)
    experiment = known.experiment_id if known else client.create_experiment(name)
    mirrored = {run.data.tags.get("qkpipe.run_id"): run for run in _runs(client, experiment)}
    outcomes = _outcomes(paths)
    completed = scan(paths, study).completed
    written = 0
    for done in completed:
        run = mirrored.get(done.config.run_id)
        outcome = outcomes.get(done.config.run_id, {})
        if run is not None and run.info.status == "FINISHED" and outcome.items() <= run.data.tags.items():
            continue
        run = run or _create(client, experiment, done.config, paths, _ended_ms(done) - _wall_ms(done))
        tables = {name: read_table(done.paths.table(name)) for name in ("steps", "layers", "heads")}
        _log(client, run, tables)
        tags = {
            "qkpipe.code_version": done.record["code_version"],
            "qkpipe.stop_reason": done.record["stop_reason"],
        }
        client.log_batch(
            run.info.run_id, tags=[RunTag(key, value) for key, value in (tags | outcome).items()]
        )
        client.set_terminated(run.info.run_id, "FINISHED", end_time=_ended_ms(done))
        written += 1
    if live:
        for config, scratch in _unfinished(paths, study, {done.key for done in completed}):
            run = mirrored.get(config.run_id)
            run = run or _create(client, experiment, config, paths, int(time.time() * 1000))
            tables = {name: _read_parts(scratch, name) for name in ("steps", "layers", "heads")}
            written += _log(client, run, tables)
    return written


def _runs(client: MlflowClient, experiment: str) -> Iterator[Run]:
    token = None
    while True:
        page = client.search_runs([experiment], max_results=1000, page_token=token)
        yield from page
        token = page.token
        if not token:
            return


def _create(
    client: MlflowClient, experiment: str, config: RunConfig, paths: StudyPaths, start_ms: int
) -> Run:
    tags = {
        "qkpipe.run_id": config.run_id,
        "qkpipe.config_hash": config.config_hash,
        "qkpipe.arm": config.arm,
        "qkpipe.group": config.group,
        "qkpipe.seed": str(config.seed),
        "qkpipe.twin": config.twin or "none",
        **{f"qkpipe.{name}": value for name, value in config.labels().items()},
        "mlflow.note.content": f"{config.description}\n\nReport: `{paths.report}`",
    }
    name = f"{config.arm}/seed={config.seed}"
    run = client.create_run(experiment, start_time=start_ms, tags=tags, run_name=name)
    from mlflow.entities import Param

    params = [Param(key, str(value)) for key, value in flatten(config.model_dump(mode="json")).items()]
    for start in range(0, len(params), PARAMS_A_CALL):
        client.log_batch(run.info.run_id, params=params[start : start + PARAMS_A_CALL])
    return run


def flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    """Nested config as ``a.b.0.c`` -> leaf; empty lists and mappings are leaves."""
    items = (
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
    )
    if not items or not value:
        return {prefix: value}
    return {
        key: leaf
        for name, inner in items
        for key, leaf in flatten(inner, f"{prefix}.{name}" if prefix else str(name)).items()
    }


def _log(client: MlflowClient, run: Run, tables: dict[str, pa.Table]) -> bool:
    """Log the metrics after the step that was mirrored last; returns whether there were any."""
    from mlflow.entities import Metric, RunTag

    done = int(run.data.tags.get("qkpipe.mirrored_step", -1))
    points = metrics(tables)
    points = points[points["step"] > done]
    if points.empty:
        return False
    start = run.info.start_time
    logged = [Metric(row.key, row.value, start + row.step, row.step) for row in points.itertuples()]
    for first in range(0, len(logged), METRICS_A_CALL):
        client.log_batch(run.info.run_id, metrics=logged[first : first + METRICS_A_CALL])
    client.log_batch(run.info.run_id, tags=[RunTag("qkpipe.mirrored_step", str(points["step"].max()))])
    return True


def metrics(tables: dict[str, pa.Table]) -> pd.DataFrame:
    """Points (``step``, ``key``, ``value``) at the telemetry steps, validations and the last step, by step.

    Per-layer and per-head values are their maxima. Parquet holds every step; MLflow gets what a curve needs.
    """
    steps = tables["steps"].to_pandas().set_index("step")
    layers = tables["layers"].to_pandas().groupby("step")[list(LAYER_METRICS)].max()
    heads = tables["heads"].to_pandas().groupby("step")[["max_logit"]].max()
    shown = steps.index.isin(layers.index) | steps["val_loss"].notna() | (steps.index == steps.index.max())
    columns = steps.loc[shown, list(STEP_METRICS)].astype(float).join(layers.join(heads, how="outer"))
    points = (
        columns.rename_axis("step")
        .reset_index()
        .melt("step", var_name="key")
        .sort_values("step", kind="stable")
    )
    return points[
        points["value"].notna() | (points["key"] == "loss")
    ]  # a NaN loss is a result, other gaps are none


def _outcomes(paths: StudyPaths) -> dict[str, dict[str, str]]:
    """Verdict tags by run id, where the analysis has been made."""
    if not paths.analysis("runs").exists():
        return {}
    rows = read_table(paths.analysis("runs"), ["run_id", *OUTCOMES]).to_pylist()
    return {row["run_id"]: {f"qkpipe.{key}": str(row[key]) for key in OUTCOMES} for row in rows}


def _unfinished(
    paths: StudyPaths, study: Study, done: set[RunKey]
) -> Iterator[tuple[RunConfig, ScratchPaths]]:
    keys = dict.fromkeys(key for target in study.config.targets for key in study.requested(target))
    for key in keys:
        if key not in done:
            config = study.resolve(key.arm, key.seed)
            scratch = paths.scratch(config.run_id)
            if scratch.parts.is_dir():
                yield config, scratch


def _read_parts(scratch: ScratchPaths, table: str) -> pa.Table:
    parts = sorted(scratch.parts.glob(f"[0-9]*-{table}.parquet"))
    return pa.concat_tables([read_table(part) for part in parts]) if parts else TABLES[table].empty_table()


def _ended_ms(done: CompletedRun) -> int:
    return int(done.paths.record.stat().st_mtime * 1000)


def _wall_ms(done: CompletedRun) -> int:
    return int(
        1000 * sum(read_table(done.paths.table("timing"), ["wall_s"])["wall_s"].drop_null().to_pylist())
    )
