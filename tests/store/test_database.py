import os

import duckdb
import pytest

from qkpipe.analysis import contrasts
from qkpipe.errors import BadInput
from qkpipe.paths import RUN_TABLES
from qkpipe.store import database


@pytest.fixture(scope="module")
def built(synthetic):
    paths, study = synthetic
    contrasts.build(paths, study)
    return database.build(paths)


def _one(path, sql):
    return database.query(path, sql).to_pylist()[0]


def test_every_table_is_there_and_holds_all_runs(synthetic, built):
    _, study = synthetic
    names = {row["name"] for row in database.query(built, "SHOW TABLES").to_pylist()}
    assert names >= {"runs", "curves", "exclusions", "contrasts", *RUN_TABLES}
    n = len(study.requested("core"))
    assert _one(built, "SELECT count(*) AS n FROM runs") == {"n": n}
    assert _one(built, "SELECT count(DISTINCT run_id) AS n FROM steps SEMI JOIN runs USING (run_id)") == {
        "n": n
    }
    comment = _one(built, "SELECT comment FROM duckdb_tables() WHERE table_name = 'runs'")
    assert "one row a run" in comment["comment"]


def test_it_opens_from_any_folder_without_the_parquet_files(built, tmp_path, monkeypatch):
    copy = tmp_path / "elsewhere.duckdb"
    copy.write_bytes(built.read_bytes())
    monkeypatch.chdir(tmp_path)
    with duckdb.connect("elsewhere.duckdb", read_only=True) as connection:
        assert connection.sql("SELECT count(*) FROM heads JOIN runs USING (run_id)").fetchone()[0] > 0


def test_large_telemetry_stays_in_parquet_behind_the_macro(synthetic, tmp_path):
    paths, _ = synthetic
    full = _one(database.build(paths), "SELECT count(*) AS n FROM steps")
    small = database.build(paths, copy_limit=50)
    names = {row["name"] for row in database.query(small, "SHOW TABLES").to_pylist()}
    assert "steps" not in names and {"events", "runs"} <= names
    root = paths.results.as_posix()
    assert _one(small, f"SELECT count(*) AS n FROM telemetry('{root}', 'steps')") == full
    database.build(paths)


def test_runs_outside_the_runs_table_are_not_read_by_the_macro(synthetic):
    paths, _ = synthetic
    database.build(paths)
    stray = paths.run("fp32", 99)
    stray.folder.mkdir(parents=True)
    try:
        rows = duckdb.sql(
            f"SELECT 'other' AS run_id, * EXCLUDE run_id FROM '{paths.run('fp32', 0).table('events')}'"
        )
        rows.write_parquet(str(stray.table("events")))
        steps = paths.run("fp32", 0).table("steps")
        duckdb.sql(f"SELECT 'other' AS run_id, * EXCLUDE run_id FROM '{steps}'").write_parquet(
            str(stray.table("steps"))
        )
        root = paths.results.as_posix()
        seen = _one(
            paths.database,
            f"SELECT count(*) FILTER (run_id = 'other') AS n FROM telemetry('{root}', 'steps')",
        )
        assert seen == {"n": 0}
    finally:
        for file in stray.folder.iterdir():
            os.unlink(file)
        stray.folder.rmdir()


def test_an_interrupted_build_leaves_the_old_database(synthetic, built, monkeypatch):
    paths, _ = synthetic
    before = built.read_bytes()

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(database, "_copy", interrupted)
    with pytest.raises(KeyboardInterrupt):
        database.build(paths)
    assert built.read_bytes() == before
    assert not list(paths.results.glob(".*.tmp*"))


def test_name_of_a_telemetry_table_is_refused(synthetic):
    paths, _ = synthetic
    clash = paths.analysis("probe")
    clash.write_bytes(paths.analysis("runs").read_bytes())
    try:
        with pytest.raises(BadInput, match="'probe' is taken"):
            database.build(paths)
    finally:
        clash.unlink()


@pytest.mark.parametrize(
    ("sql", "message"),
    [("SELECT nope FROM runs", "nope"), ("CREATE TABLE x (i INT)", "read-only"), ("", "returns no table")],
)
def test_bad_queries_are_one_line(built, sql, message):
    with pytest.raises(BadInput, match=message) as error:
        database.query(built, sql)
    assert "\n" not in str(error.value)


def test_a_long_querys_progress_stays_out_of_the_answer(built):
    """DuckDB writes its bar to standard output."""
    assert _one(built, "SELECT current_setting('enable_progress_bar') AS shown") == {"shown": False}


def test_query_without_a_database(tmp_path):
    with pytest.raises(BadInput, match="no such file"):
        database.query(tmp_path / "study.duckdb", "SELECT 1")
