import math

import numpy as np
import pyarrow.parquet as pq
import pytest

from qkpipe.paths import RUN_TABLES, RunPaths, ScratchPaths
from qkpipe.telemetry.schema import TABLES
from qkpipe.telemetry.writer import PartWriter, write_parquet


def _log(writer: PartWriter, steps: range) -> None:
    for step in steps:
        writer.add("steps", step=step, loss=5.0 / (step + 1), lr=1e-3, guard_active=False)
        if step % 2 == 0:
            for layer in range(2):
                writer.add("layers", step=step, layer=layer, sigma_q_1=float(step + layer))


def _bytes(run: RunPaths) -> dict[str, bytes]:
    return {name: run.table(name).read_bytes() for name in RUN_TABLES}


def test_every_table_is_written_with_its_schema_and_run_id(tmp_path):
    writer = PartWriter(ScratchPaths(tmp_path / "scratch"), "r1")
    _log(writer, range(3))
    writer.finish(RunPaths(tmp_path / "run"))
    for name in RUN_TABLES:
        table = pq.read_table(tmp_path / "run" / f"{name}.parquet")
        assert table.schema.equals(TABLES[name], check_metadata=True)
        assert set(table["run_id"].to_pylist()) <= {"r1"}
    steps = pq.read_table(tmp_path / "run" / "steps.parquet").to_pydict()
    assert steps["step"] == [0, 1, 2]
    assert steps["val_loss"] == [None, None, None]
    assert pq.read_metadata(tmp_path / "run" / "layers.parquet").num_rows == 4
    assert pq.read_metadata(tmp_path / "run" / "events.parquet").num_rows == 0


def test_killed_and_resumed_run_has_the_bytes_of_an_unbroken_one(tmp_path):
    unbroken = PartWriter(ScratchPaths(tmp_path / "a"), "r1")
    _log(unbroken, range(12))
    unbroken.finish(RunPaths(tmp_path / "run_a"))

    first = PartWriter(ScratchPaths(tmp_path / "b"), "r1")
    _log(first, range(5))
    count = first.flush()
    _log(first, range(5, 9))
    first.flush()  # written, but killed before the checkpoint remembered it
    (tmp_path / "b" / "parts" / ".000003-steps.parquet.7.tmp").write_bytes(b"torn")

    second = PartWriter(ScratchPaths(tmp_path / "b"), "r1")
    second.truncate(count)
    _log(second, range(5, 12))
    second.finish(RunPaths(tmp_path / "run_b"))
    assert _bytes(RunPaths(tmp_path / "run_a")) == _bytes(RunPaths(tmp_path / "run_b"))
    assert not list((tmp_path / "b" / "parts").glob(".*"))


def test_truncate_drops_buffered_rows_and_a_fresh_start_drops_all(tmp_path):
    writer = PartWriter(ScratchPaths(tmp_path), "r1")
    _log(writer, range(4))
    assert writer.flush() == 1
    _log(writer, range(4, 6))
    writer.truncate(0)
    assert writer.flush() == 0
    writer.finish(RunPaths(tmp_path / "run"))
    assert pq.read_metadata(tmp_path / "run" / "steps.parquet").num_rows == 0


def test_flush_without_rows_adds_no_part(tmp_path):
    writer = PartWriter(ScratchPaths(tmp_path), "r1")
    _log(writer, range(1))
    assert [writer.flush(), writer.flush()] == [1, 1]


@pytest.mark.parametrize(("table", "column"), [("stepz", "step"), ("steps", "losss"), ("steps", "run_id")])
def test_unknown_table_or_column_raises(tmp_path, table, column):
    writer = PartWriter(ScratchPaths(tmp_path), "r1")
    with pytest.raises(KeyError):
        writer.add(table, **{column: 1})
    assert writer.flush() == 0


def test_non_finite_values_and_numpy_scalars_survive(tmp_path):
    writer = PartWriter(ScratchPaths(tmp_path), "r1")
    writer.add("steps", step=np.int64(0), loss=np.float32(0.5), grad_norm=math.inf, update_norm=math.nan)
    writer.finish(RunPaths(tmp_path / "run"))
    row = pq.read_table(tmp_path / "run" / "steps.parquet").to_pylist()[0]
    assert (row["step"], row["loss"], row["grad_norm"], row["clipped_norm"]) == (0, 0.5, math.inf, None)
    assert math.isnan(row["update_norm"])


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "t.parquet"
    write_parquet(path, TABLES["events"].empty_table())
    before = path.read_bytes()

    def torn(table, where, **_):
        where.write_bytes(b"PAR1")
        raise OSError("disk full")

    monkeypatch.setattr(pq, "write_table", torn)
    with pytest.raises(OSError, match="disk full"):
        write_parquet(path, TABLES["events"].empty_table())
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["t.parquet"]
