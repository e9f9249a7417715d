"""Writes a run's telemetry: rows are buffered in memory, flushed as numbered parts, and joined when the run ends.

A part belongs to a checkpoint: training flushes, remembers the count inside the checkpoint, and on resume drops the parts
written after it. So the joined tables of a killed and resumed run equal those of an unbroken one bit for bit.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from qkpipe.paths import RUN_TABLES, RunPaths, ScratchPaths
from qkpipe.telemetry.schema import TABLES


def write_parquet(path: Path, table: pa.Table) -> None:
    """Write ``table`` so that a reader sees the old file or the new one, never a torn one.

    Equal tables give equal bytes: chunks are merged first, so that row groups do not tell how the table came about.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        pq.write_table(table.combine_chunks(), temporary, compression="zstd")
        written = pq.read_metadata(temporary)
        if (written.num_rows, written.num_columns) != table.shape:
            raise OSError(
                f"{path}: wrote {table.shape} but read back {written.num_rows, written.num_columns}"
            )
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


class PartWriter:
    """Telemetry of one run between its checkpoints.

    It starts at the parts already on disk: call :meth:`truncate` first, with the checkpoint's count, or 0 when fresh.
    """

    def __init__(self, scratch: ScratchPaths, run_id: str) -> None:
        self._folder = scratch.parts
        self._run_id = run_id
        self._count = max((number for number, _ in self._parts()), default=0)
        self._clear()

    def add(self, table: str, **columns: Any) -> None:
        """Buffer one row; ``run_id`` is filled in, columns not given are null.

        Raises :class:`KeyError` for a table or a column that the schema does not have.
        """
        buffer = self._buffers[table]
        if unknown := columns.keys() - buffer.keys():
            raise KeyError(f"{table}: no column {sorted(unknown)}; allowed: {', '.join(buffer)}")
        for name, values in buffer.items():
            values.append(columns.get(name))
        self._rows[table] += 1

    def flush(self) -> int:
        """Write the buffered rows as one more part; returns the count of parts, to be kept in the checkpoint."""
        filled = [name for name in RUN_TABLES if self._rows[name]]
        if filled:
            for name in filled:
                write_parquet(self._part(self._count + 1, name), self._table(name))
            self._count += 1
            self._clear()
        return self._count

    def truncate(self, count: int) -> None:
        """Forget everything after the first ``count`` parts: later part files and all buffered rows."""
        if self._folder.is_dir():
            for leftover in self._folder.glob(".*.tmp"):
                leftover.unlink()
        for number, path in self._parts():
            if number > count:
                path.unlink()
        self._count = count
        self._clear()

    def finish(self, run: RunPaths) -> None:
        """Flush, then join the parts to the run's table files; every table gets a file, also an empty one."""
        self.flush()
        numbers = range(1, self._count + 1)
        for name in RUN_TABLES:
            parts = [self._part(number, name) for number in numbers]
            tables = [pq.read_table(part, schema=TABLES[name]) for part in parts if part.exists()]
            write_parquet(run.table(name), pa.concat_tables(tables) if tables else TABLES[name].empty_table())

    def _clear(self) -> None:
        self._buffers: dict[str, dict[str, list[Any]]] = {
            name: {column: [] for column in TABLES[name].names if column != "run_id"} for name in RUN_TABLES
        }
        self._rows = dict.fromkeys(RUN_TABLES, 0)

    def _table(self, name: str) -> pa.Table:
        columns = {"run_id": [self._run_id] * self._rows[name], **self._buffers[name]}
        return pa.table(columns, schema=TABLES[name])

    def _part(self, number: int, table: str) -> Path:
        return self._folder / f"{number:06d}-{table}.parquet"

    def _parts(self) -> list[tuple[int, Path]]:
        return [(int(path.name.split("-")[0]), path) for path in sorted(self._folder.glob("[0-9]*.parquet"))]


class Silent:
    """The :class:`PartWriter` of a process that leaves the writing to another one."""

    def add(self, table: str, **columns: Any) -> None: ...

    def flush(self) -> int:
        return 0

    def truncate(self, count: int) -> None: ...

    def finish(self, run: RunPaths) -> None: ...
