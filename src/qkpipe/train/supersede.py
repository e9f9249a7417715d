"""Moves finished runs of another config out of the way of those that replace them: kept, in no table."""

from __future__ import annotations

import json
from pathlib import Path

from qkpipe.config import RunConfig, Study
from qkpipe.paths import StudyPaths
from qkpipe.telemetry.schema import SCHEMA_VERSION


def is_finished(paths: StudyPaths, run: RunConfig) -> bool:
    """Whether this very run, by its config hash and the schema version, is there."""
    record = paths.run(run.arm, run.seed).record
    return record.exists() and _identity(record) == (run.config_hash, SCHEMA_VERSION)


def supersede(paths: StudyPaths, run: RunConfig) -> Path | None:
    """Move a finished run of another config hash or schema version out of ``run``'s folder.

    Returns where it is now (``superseded/<arm>/seed=<n>-<hash>``), or ``None`` if there was nothing to move.
    """
    place = paths.run(run.arm, run.seed)
    if not place.record.exists() or is_finished(paths, run):
        return None
    found, version = _identity(place.record)
    name = found[:8] if version == SCHEMA_VERSION else f"{found[:8]}-schema{version}"
    aside, copy = paths.superseded(run.arm, run.seed, name), 1
    while aside.exists():
        copy += 1
        aside = paths.superseded(run.arm, run.seed, f"{name}-{copy}")
    aside.parent.mkdir(parents=True, exist_ok=True)
    return place.folder.rename(aside)


def supersede_all(paths: StudyPaths, study: Study) -> list[Path]:
    """:func:`supersede` for every finished run whose arm the study still has; returns where they are now.

    Snakemake deletes a job's outputs before the job starts, so this must come before any job does.
    """
    moved = []
    for record in sorted(paths.runs.glob("*/seed=*/run.json")):
        arm, seed = record.parent.parent.name, record.parent.name.removeprefix("seed=")
        if arm in study.runnable and seed.isdecimal():
            moved.append(supersede(paths, study.resolve(arm, int(seed))))
    return [path for path in moved if path]


def _identity(record: Path) -> tuple[str, int]:
    """Config hash and schema version of a finished run; ``unreadable`` where they cannot be told."""
    try:
        body = json.loads(record.read_text(encoding="utf-8"))
        return str(body["config_hash"]), int(body["schema_version"])
    except (ValueError, KeyError, TypeError):
        return "unreadable", SCHEMA_VERSION
