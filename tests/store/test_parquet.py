import pyarrow as pa
import pytest

from qkpipe.errors import BadInput
from qkpipe.paths import RunPaths
from qkpipe.store.parquet import read_runs, read_table, write_table
from qkpipe.telemetry.schema import RUNS, TABLES


def test_rows_take_the_schema_and_absent_columns_are_null(tmp_path):
    path = tmp_path / "deep" / "runs.parquet"
    write_table(path, [{"run_id": "a", "seed": 1}, {"run_id": "b"}], RUNS)
    table = read_table(path)
    assert table.schema.equals(RUNS, check_metadata=True)
    assert table["seed"].to_pylist() == [1, None]
    assert read_table(path, ["seed"]).column_names == ["seed"]


def test_a_table_is_cast_and_put_in_order(tmp_path):
    table = pa.table(
        {"detail": ["{}"], "kind": ["x"], "extra": [1], "step": pa.array([3], pa.int32()), "run_id": ["a"]}
    )
    write_table(tmp_path / "events.parquet", table, TABLES["events"])
    assert read_table(tmp_path / "events.parquet").schema.equals(TABLES["events"])


def test_unknown_column_raises_and_writes_nothing(tmp_path):
    with pytest.raises(ValueError, match="sead"):
        write_table(tmp_path / "runs.parquet", [{"sead": 1}], RUNS)
    assert not list(tmp_path.iterdir())


def test_missing_and_torn_files_are_named(tmp_path):
    with pytest.raises(BadInput, match="no such file"):
        read_table(tmp_path / "runs.parquet")
    write_table(tmp_path / "runs.parquet", [{"run_id": "a"}], RUNS)
    torn = tmp_path / "torn.parquet"
    torn.write_bytes((tmp_path / "runs.parquet").read_bytes()[:-20])
    with pytest.raises(BadInput, match=r"torn\.parquet: not a readable Parquet"):
        read_table(torn)


def test_many_runs_are_read_in_order_and_none_gives_an_empty_table(tmp_path):
    folders = [RunPaths(tmp_path / str(i)) for i in (2, 1)]
    for run in folders:
        write_table(
            run.table("events"), [{"run_id": run.folder.name, "step": 0, "kind": "x"}], TABLES["events"]
        )
    assert read_runs(folders, "events", ["run_id"])["run_id"].to_pylist() == ["2", "1"]
    empty = read_runs([], "events")
    assert empty.num_rows == 0 and empty.schema.equals(TABLES["events"])


def test_a_column_that_older_runs_lack_is_null(tmp_path):
    from qkpipe.paths import RunPaths

    old, new = RunPaths(tmp_path / "old"), RunPaths(tmp_path / "new")
    schema = TABLES["layers"]
    write_table(new.table("layers"), [{"run_id": "b", "step": 0, "update_coherence": 0.5}], schema)
    earlier = pa.schema([field for field in schema if field.name != "update_coherence"])
    write_table(old.table("layers"), [{"run_id": "a", "step": 0}], earlier)
    both = read_runs([old, new], "layers")
    assert both.schema.equals(schema) and both["update_coherence"].to_pylist() == [None, 0.5]
    assert read_runs([old], "layers", ["step", "update_coherence"]).column_names == [
        "step",
        "update_coherence",
    ]
