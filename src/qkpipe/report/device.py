"""What the report shows of a GPU: the tables of the device check, or that none was measured."""

from __future__ import annotations

from typing import Any

from qkpipe.paths import StudyPaths
from qkpipe.store.parquet import read_table


def section(paths: StudyPaths) -> dict[str, Any] | None:
    """The context of ``device.html.j2``; None where no result file was read."""
    if not paths.table("device").exists() or not (rows := _rows(paths, "device")):
        return None
    # A ratio needs both times, which no row with a red gate has.
    timed = [row for row in _rows(paths, "device_benchmark") if row["gate"]]
    return rows[0] | {
        "failed": [row for row in _rows(paths, "device_checks") if not row["passed"]],
        "benchmark": timed,
        "missed": [row for row in timed if row["floor"] and row["ratio"] and row["floor"] * row["ratio"] > 1],
        "residual": _last(_rows(paths, "device_residual"), "setting"),
        "training": _last(_rows(paths, "device_training"), "run"),
    }


def _rows(paths: StudyPaths, name: str) -> list[dict[str, Any]]:
    return read_table(paths.table(name)).to_pylist()


def _last(rows: list[dict[str, Any]], key: str) -> list[dict[str, Any]]:
    """The latest row of each ``key``, in order of first appearance."""
    return list({row[key]: row for row in rows}.values())
