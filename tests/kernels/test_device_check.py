"""The device check runs from end to end without a GPU, without pydantic, and says what it left out."""

import json
import os
import subprocess
import sys

import pyarrow as pa
import pytest

pytest.importorskip(
    "triton", reason="triton is not installed: make kernels-test runs these under 3.6 and 3.9"
)

from qkpipe_kernels import device_check

from qkpipe.bench import device

HEAVY = ("snakemake", "mlflow", "duckdb", "datasets", "pydantic", "numba", "pandas", "scipy")


def test_quick_check_passes_with_torch_triton_and_numpy_alone(tmp_path):
    out = tmp_path / "results.json"
    # In every process of the check: a module that is None cannot be imported.
    (tmp_path / "sitecustomize.py").write_text(f"import sys; sys.modules.update(dict.fromkeys({HEAVY}))")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    command = [
        sys.executable,
        "-m",
        "qkpipe_kernels.device_check",
        "--out",
        str(out),
        "--device",
        "cpu",
        "--quick",
    ]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    results = json.loads(out.read_text())
    assert results["checks"] and all(row["passed"] for row in results["checks"])
    assert results["benchmarks"] == [] and "benchmarks" in results["left_out"][0]
    assert {row["setting"] for row in results["residual"]} == {"sdpa", "healthy", "faulty"}
    assert {row["run"] for row in results["training"]} == {"faulty", "guarded"}
    assert results["failed"] == [] and not results["complete"]  # tiny sizes are not the whole check
    tables = device.tables(device.read(out))
    assert tables["device"][0]["gpu"] is False
    for name, rows in tables.items():
        assert pa.Table.from_pylist(rows, schema=device.TABLES[name]).num_rows == len(rows)


def work_that(monkeypatch, statement):
    """Let every child of the check run this instead."""
    popen = subprocess.Popen

    def run(command, **options):
        out = command[command.index("--out") + 1]
        return popen([sys.executable, "-c", f"out = {out!r}\n{statement}"], **options)

    monkeypatch.setattr(device_check.subprocess, "Popen", run)


def found(**rows):
    return {"environment": {}, **{name: rows.get(name, []) for name in device_check.ROWS}}


def test_what_a_part_had_shown_by_its_deadline_is_kept(tmp_path, monkeypatch):
    row = {"name": "first", "passed": True, "error": 0.0, "allowed": 1.0}
    text = json.dumps(found(checks=[row]))
    work_that(monkeypatch, f"import time; open(out, 'w').write({text!r}); time.sleep(60)")
    monkeypatch.setattr(device_check, "LIMITS_S", dict.fromkeys(device_check.PARTS, 1))
    monkeypatch.setattr(device_check, "GRACE_S", 2)
    out = tmp_path / "results.json"
    results = device_check.run("cuda", False, out, ["checks", "benchmarks"])
    assert results == json.loads(out.read_text())
    assert results["checks"] == [row] * len(device_check.CHECKS)
    assert [failure["part"] for failure in results["failed"]] == device_check.CHECKS
    assert "ended after 3 s" in results["failed"][0]["reason"]
    assert results["benchmarks"] == [] and "no speed is shown" in results["left_out"][0]  # it was not whole


def test_a_part_that_breaks_takes_no_other_along(tmp_path, monkeypatch):
    work_that(monkeypatch, "raise SystemExit('an illegal memory access')")
    results = device_check.run("cuda", False, tmp_path / "results.json")
    parts = [failure["part"] for failure in results["failed"]]
    assert parts == [*device_check.CHECKS, "residual", "training"]
    assert "illegal memory access" in results["failed"][-1]["reason"]
    assert not results["complete"]


def test_refuses_a_gpu_that_is_not_there(tmp_path):
    command = [sys.executable, "-m", "qkpipe_kernels.device_check", "--out", str(tmp_path / "results.json")]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "0"},
    )
    assert done.returncode == 2
    assert "no CUDA device" in done.stderr
