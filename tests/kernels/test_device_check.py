"""The device check runs from end to end without a GPU, without pydantic, and says what it left out."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip(
    "triton", reason="triton is not installed: make kernels-test runs these under 3.6 and 3.9"
)

HEAVY = ("snakemake", "mlflow", "duckdb", "datasets", "pydantic", "numba", "pandas", "scipy")


def test_quick_check_passes_with_torch_triton_and_numpy_alone(tmp_path):
    out = tmp_path / "results.json"
    script = (
        f"import runpy, sys; sys.modules.update(dict.fromkeys({HEAVY}));"  # None makes an import fail
        f"sys.argv = ['device_check', '--out', {str(out)!r}, '--device', 'cpu', '--quick'];"
        "runpy.run_module('qkpipe_kernels.device_check', run_name='__main__')"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    results = json.loads(out.read_text())
    assert results["checks"] and all(row["passed"] for row in results["checks"])
    assert results["benchmarks"] == [] and "benchmarks" in results["left_out"][0]
    assert {row["setting"] for row in results["residual"]} == {"sdpa", "healthy", "faulty"}
    assert {row["run"] for row in results["training"]} == {"faulty", "guarded"}


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
