"""``study.duckdb``: every table of a scale in one file that opens from any folder."""

from __future__ import annotations

import os
from pathlib import Path

import duckdb
import pyarrow as pa

from qkpipe.errors import BadInput
from qkpipe.paths import RUN_TABLES, StudyPaths
from qkpipe.store.parquet import read_table

COPY_LIMIT = 20_000_000
"""Rows of a telemetry table up to which it is copied; beyond, only the macro ``telemetry`` reads it."""

QUERY_MEMORY = "2GB"
"""What a query may take; DuckDB does larger ones in pieces, by way of a temporary file."""

DESCRIPTIONS = {
    "runs": "one row a run: what it was, how it ended, both verdicts",
    "curves": "smoothed loss, sigma(W_Q) and largest logit of every run at its telemetry steps",
    "contrasts": "every arm against its twin and its parent, paired by seed; exploratory",
    "claims": "declared claims and their verdicts",
    "exclusions": "runs on disk that are in no table, and why",
    "dissociation": "one row an arm over its seeds",
    "probe_curves": "curves of the probed arms and their references, with the update's energies",
    "guard_curves": "curves around each live-triggered arm",
    "guard_firing": "one row a run with a live trigger: firing, threshold, lead over the unguarded collapse",
    "signals": "what monitors could watch, by run and look",
    "residual": "one row a run: the early row-sum residual and what followed",
    "isolation": "which quantity of the recurrence makes or repairs the collapse (Table 1)",
    "factorial": "source x correction x setting (Table 2), cells that do not apply named",
    "generality": "sources run in more than one setting (Table S1)",
    "entry": "faults outside attention by arm: structure, size, coherence, outcome (Table 3)",
    "entry_runs": "the same by run",
    "entry_predictors": "how well each property of an error ranks the outcome",
    "probe_controls": "one row a probed arm, and what control it is",
    "loci": "one row an arm in which something acts: rescued, fired, cost (Table 4)",
    "threshold_sweep": "every threshold: false firings, warnings, lead",
    "threshold_transfer": "thresholds of all architectures but one",
    "capping": "what QK normalisation bounds (Figure S1)",
    "capping_curves": "curves of the normalised arms and of what they extend",
    "onsets": "when each signal leaves health, by doomed run",
    "onset_order": "which signal moves before which",
    "entropy_heads": "entropy and largest logit by head, doomed runs and twins",
    "law_runs": "runs of the residual law",
    "law": "coefficients of the residual law",
    "law_collapse": "what other settings add to the law beside r",
    "law_settings": "the same model on the settings instead of the residual",
    "same_mode": "order of events, first head and rescues by dose",
    "prediction": "what the law says of a run that was not made",
    "contest": "monitors: false alarms, lead, areas",
    "contest_runs": "the contest by run and monitor",
    "contest_roc": "the monitors' ROC",
    "survival": "Kaplan-Meier curves by arm",
    "sensitivity": "verdicts by a grid of crash rules",
    "repairs": "repairs at the source by precision, against the same arm without them",
    "remedies": "remedies against the main fault and on the healthy twin: contained, fired without cause, cost",
    "horizon": "arms longer than the study's horizon: collapses, late ones, cost",
    "horizon_curves": "their curves",
    "portability": "one row a run made on two devices: verdicts, first differing step, sigma gap",
    "portability_arms": "agreement of the two devices by arm",
    "portability_curves": "curves of both devices",
    "device": "the machine and the extent of the device check; empty: no GPU was measured",
    "device_checks": "every check of the kernels: error and what is allowed",
    "device_benchmark": "the kernels against their peers; no times where a check failed",
    "device_residual": "row-sum residual of a small GPT-2 under three attentions",
    "device_training": "a small GPT-2 with amplified error, unguarded and guarded",
    "steps": "per-step training scalars",
    "layers": "spectra, entropies and row-sum residuals by layer",
    "heads": "largest logits and entropies by head",
    "routes": "gradient and error norms by route",
    "probe": "energies of the causal probe by layer and matrix",
    "events": "what happened and when",
    "timing": "everything that a clock decides",
}


def build(paths: StudyPaths, copy_limit: int = COPY_LIMIT) -> Path:
    """Make the database anew from ``analysis/*.parquet``, ``tables/*.parquet`` and the telemetry of the runs in ``runs``.

    Telemetry tables of more than ``copy_limit`` rows are left out; ``FROM telemetry(root, name)`` reads any telemetry table
    from Parquet, ``root`` being the folder of the scale (``results/micro``). The old file stays until the new one is whole.
    Returns the database's path.
    """
    runs = read_table(paths.analysis("runs"), ["arm", "seed"]).to_pylist()
    tables = {path.stem: [path] for path in sorted(paths.analysis("*").parent.glob("*.parquet"))}
    tables |= {path.stem: [path] for path in sorted(paths.table("*").parent.glob("*.parquet"))}
    if taken := sorted(set(tables) & set(RUN_TABLES)):
        raise BadInput(
            f"{paths.results}: table name {taken[0]!r} is taken by the telemetry table of that name"
        )
    tables |= {name: [paths.run(run["arm"], run["seed"]).table(name) for run in runs] for name in RUN_TABLES}

    temporary = paths.database.with_name(f".{paths.database.name}.{os.getpid()}.tmp")
    temporary.unlink(missing_ok=True)
    try:
        with duckdb.connect(temporary) as connection:
            for name, files in tables.items():
                _copy(connection, name, files, copy_limit)
            connection.execute(
                "CREATE MACRO telemetry(root, name) AS TABLE SELECT * FROM "
                "read_parquet(root || '/runs/*/seed=*/' || name || '.parquet', hive_partitioning = false, union_by_name = true) "
                "WHERE run_id IN (SELECT run_id FROM runs)"
            )
        os.replace(temporary, paths.database)
    finally:
        temporary.unlink(missing_ok=True)
    return paths.database


def query(database: Path, sql: str) -> pa.Table:
    """Result of one SQL query on ``database``, opened read-only; :class:`BadInput` with DuckDB's first line otherwise."""
    if not database.exists():
        raise BadInput(f"{database}: no such file; it is built by the study's database step")
    try:
        with duckdb.connect(database, read_only=True, config={"memory_limit": QUERY_MEMORY}) as connection:
            connection.execute(
                "SET enable_progress_bar = false"
            )  # it goes to standard output, into the answer
            result = connection.sql(sql)
            if result is None:
                raise BadInput(f"sql: {sql!r} returns no table; give a query (SELECT ... or FROM ...)")
            return result.to_arrow_table()
    except duckdb.Error as error:
        raise BadInput(f"{database}: {str(error).splitlines()[0]}") from None


def _copy(connection: duckdb.DuckDBPyConnection, name: str, files: list[Path], limit: int) -> None:
    if not files:
        return
    source = duckdb.read_parquet(
        [str(file) for file in files],
        connection=connection,
        hive_partitioning=False,
        union_by_name=name in RUN_TABLES,
    )
    if name in RUN_TABLES and source.count("*").fetchone()[0] > limit:
        return
    source.create(name)
    if description := DESCRIPTIONS.get(name):
        quoted = description.replace("'", "''")
        connection.execute(f"COMMENT ON TABLE \"{name}\" IS '{quoted}'")
