"""Reads and writes Parquet: whole tables with explicit schemas, and one telemetry table over many runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from qkpipe.errors import BadInput
from qkpipe.paths import RunPaths
from qkpipe.telemetry.schema import TABLES
from qkpipe.telemetry.writer import write_parquet


def write_table(path: Path, rows: pa.Table | Sequence[Mapping[str, Any]], schema: pa.Schema) -> None:
    """Write ``rows`` (a table, or one mapping a row) with exactly ``schema``; the old file stays until the new is whole.

    Raises :class:`ValueError` for a row with a column that the schema does not have; absent columns are null.
    """
    if isinstance(rows, pa.Table):
        table = rows.select(schema.names).cast(schema).replace_schema_metadata(schema.metadata)
    else:
        unknown = {key for row in rows for key in row} - set(schema.names)
        if unknown:
            raise ValueError(f"{path}: no column {sorted(unknown)}; allowed: {', '.join(schema.names)}")
        table = pa.Table.from_pylist([dict(row) for row in rows], schema=schema)
    write_parquet(path, table)


def read_table(path: Path, columns: list[str] | None = None) -> pa.Table:
    """The table at ``path``; :class:`BadInput` naming the file where it is missing or torn."""
    try:
        return pq.ParquetFile(path).read(columns=columns)
    except FileNotFoundError:
        raise BadInput(f"{path}: no such file; it is written by an earlier step of the study") from None
    except pa.ArrowInvalid as error:
        raise BadInput(f"{path}: not a readable Parquet file: {str(error).splitlines()[0]}") from None


def read_runs(runs: Iterable[RunPaths], name: str, columns: list[str] | None = None) -> pa.Table:
    """Telemetry table ``name`` of many runs, one after the other; empty with its schema where there are none.

    A column that a file is too old to have is null.
    """
    columns = columns or TABLES[name].names
    tables = [_conform(read_table(run.table(name), columns), name, columns) for run in runs]
    return pa.concat_tables(tables) if tables else TABLES[name].empty_table().select(columns)


def _conform(table: pa.Table, name: str, columns: list[str]) -> pa.Table:
    """``columns`` of telemetry table ``name``, null where the file is older than the column."""
    for column in columns:
        if column not in table.column_names:
            table = table.append_column(column, pa.nulls(table.num_rows, TABLES[name].field(column).type))
    return table.select(columns)
