"""A device check's result file becomes tables and a section of the report; nothing wrong is shown as a speed."""

import json
import re

import pytest

from qkpipe.bench import device
from qkpipe.bench.table import SCHEMA
from qkpipe.errors import BadInput
from qkpipe.paths import StudyPaths
from qkpipe.report.device import section
from qkpipe.store.parquet import read_table


def results(passed=True, **changes):
    shape = "B=16 H=12 T=1024 D=64"
    attention = {"operator": "attention", "shape": shape, "p20": 0.9, "p80": 1.2, "floor": None, "goal": None}
    return {
        "schema": device.RESULT_SCHEMA,
        "quick": False,
        "complete": True,
        "environment": {
            "device": "NVIDIA H100", "cuda_device": True, "capability": "9.0", "python": "3.12.3", "torch": "2.11.0",
            "triton": "3.6.0", "cuda": "12.8",
        },
        "checks": [
            {"name": "healthy D=64 out", "passed": True, "error": 1e-3, "allowed": 2e-3, "differs": 0.25},
            {"name": "uniform D=64 dq", "passed": passed, "error": 3.0, "allowed": 2.0},
        ],
        "benchmarks": [
            attention | {"setting": "sdpa flash", "peer": None, "p50": 1.0, "flops": 1e9},
            attention | {"setting": "sdpa cudnn", "peer": "sdpa flash", "error": "not built"},
            attention | {"setting": "healthy", "peer": "sdpa flash", "p50": 1.25, "floor": 0.9, "goal": 1.0},
            {"operator": "quantize_mx", "setting": "mxfp4", "shape": shape, "peer": "copy", "p20": 1, "p50": 1, "p80": 1},
        ],
        "ratios": [],
        "residual": [
            {"setting": setting, "step": step, "loss": 5.0, "residual_r": 1e-3, "max_logit": 2.0}
            for setting in ("sdpa", "faulty") for step in (9, 19)
        ],
        "training": [
            {"run": "guarded", "step": 24, "loss": float("nan"), "max_logit": 31.0, "sigma_q": 4.0, "guard_active": True}
        ],
        "left_out": [],
        "failed": [],
        "seconds": {"checks": 20.0, "benchmarks": 30.0},
    } | changes  # fmt: skip


@pytest.fixture
def paths(tmp_path):
    return StudyPaths("micro", tmp_path)


def ingest(paths, found):
    source = paths.root / "found.json"
    source.write_text(json.dumps(found))
    device.build(paths, source)
    return {name: read_table(paths.table(name)).to_pylist() for name in device.TABLES}


def test_times_and_ratios_of_medians(paths):
    tables = ingest(paths, results())
    assert read_table(paths.table("device_benchmark")).schema.equals(SCHEMA, check_metadata=True)
    flash, healthy, mx = tables["device_benchmark"]  # a backend that is not there has no row
    assert (healthy["ratio"], healthy["peer_p50_ms"], healthy["floor"]) == (1.25, 1.0, 0.9)
    assert flash["peer"] is None and flash["ratio"] is None and flash["p20_ms"] == 0.9
    assert mx["ratio"] is None  # its peer was not timed
    assert all(row["gate"] and row["device"] == "NVIDIA H100" for row in tables["device_benchmark"])
    (machine,) = tables["device"]
    assert (machine["gpu"], machine["n_checks"], machine["n_failed"], machine["seconds"]) == (
        True,
        2,
        0,
        50.0,
    )
    shown = section(paths)
    assert [row["setting"] for row in shown["missed"]] == ["healthy, B=16 H=12 T=1024 D=64"]
    assert [(row["setting"], row["step"]) for row in shown["residual"]] == [("sdpa", 19), ("faulty", 19)]


@pytest.mark.parametrize("found", [results(passed=False), results(checks=[])], ids=["failed", "none"])
def test_no_speed_where_a_check_failed_or_none_ran(paths, found):
    tables = ingest(paths, found)
    assert len(tables["device_benchmark"]) == 3
    for row in tables["device_benchmark"]:
        assert row["gate"] is False
        assert not any(
            row[name] for name in SCHEMA.names if name.endswith("_ms") or name in ("ratio", "flops")
        )
    assert section(paths)["benchmark"] == []


def test_a_part_that_failed_is_counted_and_named(paths):
    tables = ingest(
        paths, results(failed=[{"part": "residual", "reason": "ended after 70 s"}], complete=False)
    )
    (machine,) = tables["device"]
    assert machine["n_failed"] == 1 and machine["left_out"] == ["residual: ended after 70 s"]


def test_without_a_result_file_the_tables_are_empty(paths):
    device.build(paths, None)
    assert section(paths) is None
    for name, schema in device.TABLES.items():
        table = read_table(paths.table(name))
        assert table.num_rows == 0 and table.schema.equals(schema)


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "not JSON"), ("[]", "schema: None; allowed: 2"), ('{"schema": 1}', "schema: 1; allowed: 2")],
)
def test_what_is_no_result_file_is_refused(paths, text, message):
    source = paths.root / "found.json"
    source.write_text(text)
    with pytest.raises(BadInput, match=re.escape(f"{source}: {message}")):
        device.build(paths, source)
    with pytest.raises(BadInput, match=r"nowhere\.json: no such file"):
        device.build(paths, paths.root / "nowhere.json")
