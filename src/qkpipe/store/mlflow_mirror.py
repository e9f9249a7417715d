"""Mirrors runs to MLflow. Parquet is the truth and MLflow a view: one process writes it, workers never do.

A mirrored run is found by its tag ``qkpipe.run_id``; how far it got is the tag ``qkpipe.mirrored_step``. A second mirror of a
finished run adds nothing, and an interrupted one goes on where it stopped: a metric's time stamp is the run's start plus its
step in milliseconds, so that writing a batch twice is writing it once. A server that is away costs nothing but time.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pandas as pd
import pyarrow as pa
from filelock import FileLock

from qkpipe.config import RunConfig, Study
from qkpipe.errors import BadInput
from qkpipe.paths import ScratchPaths, StudyPaths
from qkpipe.store.parquet import read_table
from qkpipe.store.scan import CompletedRun, scan, unfinished
from qkpipe.telemetry.schema import TABLES

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

log = logging.getLogger(__name__)

DEFAULT_TRACKING_URI = "sqlite:///mlflow.db"
WATCH_SECONDS = 15.0
METRICS_A_CALL, PARAMS_A_CALL = 1000, 100  # MLflow's limits of one log_batch

LOGGED = ("steps", "layers", "heads")
"""Telemetry tables that are shown."""

STEP_METRICS = ("loss", "val_loss", "lr", "grad_norm", "update_norm", "guard_active")
LAYER_METRICS = ("sigma_q_1", "sigma_k_1", "sigma_qk_max", "residual_r")
OUTCOMES = ("collapsed", "collapse_step", "censored", "collapsed_paper", "fire_step", "seed_role")


def mirror(
    paths: StudyPaths,
    study: Study,
    tracking_uri: str | None = None,
    *,
    watch: bool = False,
    verify: bool = False,
) -> int:
    """Bring MLflow up to date with the runs of the current config; returns how many runs were written to.

    The store is ``tracking_uri``, else that of ``MLFLOW_TRACKING_URI``, else ``sqlite:///mlflow.db`` in the working directory,
    where ``mlflow ui`` looks.

    Args:
        watch: go on until interrupted, and show unfinished runs as far as their last checkpoint.
        verify: compare every run with what is stored, point by point, unfinished runs too, and write what is missing.

    Raises:
        BadInput: the store does not answer (with ``watch``, that is logged, and tried again later).
    """
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")  # the default waits for minutes
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException

    for noisy in ("mlflow", "alembic", "urllib3"):
        logging.getLogger(noisy).setLevel(logging.ERROR)
    uri = tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or DEFAULT_TRACKING_URI
    written, away = 0, False
    try:
        while True:
            try:
                written += _mirror_once(MlflowClient(uri), paths, study, live=watch or verify, verify=verify)
                away = False
            except MlflowException as error:
                reason = f"{uri}: MLflow does not take the runs: {str(error).splitlines()[0][:200]}"
                if not watch:
                    raise BadInput(f"{reason}; nothing is lost: `qkpipe sync` when it does again") from None
                if not away:
                    log.warning("%s; trying again every %g s", reason, WATCH_SECONDS)
                away = True
            if not watch:
                return written
            time.sleep(WATCH_SECONDS)
    except KeyboardInterrupt:
        return written


def _mirror_once(
    client: MlflowClient, paths: StudyPaths, study: Study, *, live: bool, verify: bool = False
) -> int:
    """One pass; two at a time would create runs twice, so the second waits."""
    with FileLock(paths.results / ".mirror.lock"):
        return _pass(client, paths, study, live, verify)


def _pass(client: MlflowClient, paths: StudyPaths, study: Study, live: bool, verify: bool) -> int:
    from mlflow.entities import RunTag

    name = f"qkpipe-{study.scale}"
    known = client.get_experiment_by_name(name)
    experiment = known.experiment_id if known else client.create_experiment(name)
    mirrored = {run.data.tags.get("qkpipe.run_id"): run for run in _runs(client, experiment)}
    outcomes = _outcomes(paths)
    completed = scan(paths, study).completed
    written = 0
    for done in completed:
        run = mirrored.get(done.run_id)
        outcome = outcomes.get(done.run_id, {})
        closed = (
            run is not None and run.info.status == "FINISHED" and outcome.items() <= run.data.tags.items()
        )
        if closed and not verify:
            continue
        followed = (
            run is not None
        )  # a part that was being written when it was read may have been read in part
        run = run or _create(client, experiment, done.config, paths, _ended_ms(done) - _wall_ms(done))
        tables = {name: read_table(done.paths.table(name)) for name in LOGGED}
        if not _log(client, run, tables, verify or followed) and closed:
            continue
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
        finished = {done.key for done in completed}
        for key, scratch in unfinished(paths, study):
            if key in finished or not scratch.parts.is_dir():
                continue
            try:
                tables = {name: _read_parts(scratch, name) for name in LOGGED}
            except BadInput:  # it ended while it was read: the next pass finds it finished
                continue
            config = study.resolve(key.arm, key.seed)
            run = mirrored.get(config.run_id)
            run = run or _create(client, experiment, config, paths, int(time.time() * 1000))
            written += _log(client, run, tables, verify)
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


def _log(client: MlflowClient, run: Run, tables: dict[str, pa.Table], verify: bool) -> bool:
    """Log the metrics after the step that was mirrored last, or with ``verify`` all that are not stored.

    Returns whether there were any.
    """
    from mlflow.entities import Metric, RunTag

    points = metrics(tables)
    if verify:
        stored = {
            (key, point.step)
            for key in points["key"].unique()
            for point in client.get_metric_history(run.info.run_id, key)
        }
        points = points[[(row.key, row.step) not in stored for row in points.itertuples()]]
    else:
        points = points[points["step"] > int(run.data.tags.get("qkpipe.mirrored_step", -1))]
    if points.empty:
        return False
    start = run.info.start_time
    logged = [Metric(row.key, row.value, start + row.step, row.step) for row in points.itertuples()]
    for first in range(0, len(logged), METRICS_A_CALL):
        client.log_batch(run.info.run_id, metrics=logged[first : first + METRICS_A_CALL])
    last = int(tables["steps"]["step"].to_numpy().max())
    client.log_batch(run.info.run_id, tags=[RunTag("qkpipe.mirrored_step", str(last))])
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


def _read_parts(scratch: ScratchPaths, table: str) -> pa.Table:
    parts = sorted(scratch.parts.glob(f"[0-9]*-{table}.parquet"))
    return pa.concat_tables([read_table(part) for part in parts]) if parts else TABLES[table].empty_table()


def _ended_ms(done: CompletedRun) -> int:
    return int(done.paths.record.stat().st_mtime * 1000)


def _wall_ms(done: CompletedRun) -> int:
    return int(
        1000 * sum(read_table(done.paths.table("timing"), ["wall_s"])["wall_s"].drop_null().to_pylist())
    )
