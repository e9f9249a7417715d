"""One row a run: what was asked, how it ended, and both verdicts. Every other table and figure starts here."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa

from qkpipe.analysis.curves import CURVES
from qkpipe.analysis.measured import AXES, SCALARS, measured
from qkpipe.analysis.settings import settings
from qkpipe.config import RunKey, Study
from qkpipe.paths import StudyPaths
from qkpipe.store.parquet import write_table
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
    known = measured(paths, found.completed)
    rows: list[dict[str, Any]] = []
    curves: list[pa.Table] = []
    for run in found.completed:
        own = known[run.run_id]
        identity = {
            "run_id": run.run_id,
            "arm": run.key.arm,
            "group": run.config.group,
            "seed": run.key.seed,
            "seed_role": study.role(run.key.arm, run.key.seed),
        }
        rows.append(identity | {"scale": study.scale} | describe(run) | {name: own[name] for name in SCALARS})
        n = len(own["step"])
        columns = {name: [value] * n for name, value in identity.items()} | {name: own[name] for name in AXES}
        curves.append(pa.table(columns, CURVES))
    written = [paths.analysis(name) for name in OUTPUTS]
    write_table(written[0], rows, RUNS)
    write_table(written[1], pa.concat_tables([CURVES.empty_table(), *curves]), CURVES)
    write_table(written[2], [vars(exclusion) for exclusion in found.excluded], EXCLUSIONS)
    return written


def describe(run: CompletedRun) -> dict[str, Any]:
    """What one run was, by its config and its record (columns of ``runs``)."""
    record = run.record
    names = (
        "steps_planned", "steps_done", "fire_step", "tokens", "epochs", "device", "config_hash", "data_hash",
        "code_version",
    )  # fmt: skip
    return {
        **run.config.labels(),
        **settings(run.config),
        "twin": run.config.twin,
        **{name: record[name] for name in names},
    }
