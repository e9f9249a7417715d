"""From the result file of ``make device-check`` to tables: what ran on a GPU, what it showed, how fast it was.

The tables are there, and empty, where no result file is: that no GPU was measured is a result too.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa

from qkpipe.bench.table import SCHEMA as BENCHMARK
from qkpipe.errors import BadInput
from qkpipe.paths import StudyPaths
from qkpipe.store.parquet import write_table

RESULT_SCHEMA = 2
"""Version of the result file; `qkpipe_kernels.device_check` writes it."""

_B, _F, _I, _S = pa.bool_(), pa.float64(), pa.int64(), pa.string()


def _schema(**columns: pa.DataType) -> pa.Schema:
    return pa.schema(columns.items(), metadata={"qkpipe.schema_version": "1"})


TABLES = {
    "device": _schema(
        device=_S, gpu=_B, capability=_S, python=_S, torch=_S, triton=_S, cuda=_S, quick=_B, complete=_B,
        n_checks=_I, n_failed=_I, seconds=_F, left_out=pa.list_(_S),
    ),
    "device_checks": _schema(name=_S, passed=_B, error=_F, allowed=_F, differs=_F),
    "device_benchmark": BENCHMARK,
    "device_residual": _schema(setting=_S, step=_I, loss=_F, residual_r=_F, max_logit=_F),
    "device_training": _schema(
        run=_S, step=_I, loss=_F, max_logit=_F, sigma_q=_F, guard_active=_B
    ),
}  # fmt: skip
"""The tables by name. ``device`` has one row a result file. n_failed: checks that failed, and parts of the script that did.
left_out: what did not run, and why.
"""


def build(paths: StudyPaths, source: Path | None) -> None:
    """Write every table of :data:`TABLES` from the result file ``source``; None: empty."""
    rows = {name: [] for name in TABLES} if source is None else tables(read(source))
    for name, schema in TABLES.items():
        write_table(paths.table(name), rows[name], schema)


def read(source: Path) -> dict[str, Any]:
    """The result file; :class:`BadInput` naming it where it is none."""
    try:
        results = json.loads(source.read_text())
    except FileNotFoundError:
        raise BadInput(
            f"{source}: no such file; `make device-check` writes it on a machine with a GPU"
        ) from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise BadInput(f"{source}: not JSON: {error}") from None
    found = results.get("schema") if isinstance(results, dict) else None
    if found != RESULT_SCHEMA:
        raise BadInput(
            f"{source}: schema: {found!r}; allowed: {RESULT_SCHEMA} (run `make device-check` again)"
        )
    return results


def measure(out: Path) -> Path:
    """Check and time the kernels on this machine's GPU into the result file ``out``, in a process of its own."""
    out.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "qkpipe_kernels.device_check", "--out", str(out)]
    subprocess.run(
        [*command, "--parts", "checks", "benchmarks"], check=False
    )  # a failed check is in the file
    return out


def tables(results: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Rows of every table. No time survives in them where a check failed or none ran."""
    environment, checks = results["environment"], results["checks"]
    failed = [row for row in checks if not row["passed"]]
    n_failed = len(failed) + len(results["failed"])
    columns = set(TABLES["device"].names)
    device = {key: value for key, value in environment.items() if key in columns}
    device |= {
        "gpu": environment["cuda_device"],
        "quick": results["quick"],
        "complete": results["complete"],
        "n_checks": len(checks),
        "n_failed": n_failed,
        "seconds": sum(results["seconds"].values()),
        "left_out": results["left_out"] + [f"{row['part']}: {row['reason']}" for row in results["failed"]],
    }
    return {
        "device": [device],
        "device_checks": checks,
        "device_benchmark": benchmark_rows(results),
        "device_residual": results["residual"],
        "device_training": results["training"],
    }


def benchmark_rows(results: dict[str, Any]) -> list[dict[str, Any]]:
    """The benchmarks as rows of the benchmark table; ratios are of medians."""
    gate = bool(results["checks"]) and all(row["passed"] for row in results["checks"])
    environment = results["environment"]
    shared = {key: environment[key] for key in ("device", "torch", "triton", "python")}
    timed = {_key(row): row for row in results["benchmarks"] if "p50" in row}
    rows = []
    for key, row in timed.items():
        operator, setting, shape = key
        peer = row.get("peer")
        found = {"operator": operator, "setting": f"{setting}, {shape}", "peer": peer, "gate": gate} | shared
        if gate:
            found |= {f"{name}_ms": row[name] for name in ("p20", "p50", "p80")}
            found |= {name: row.get(name) for name in ("floor", "goal", "bytes", "flops")}
            theirs = timed.get((operator, peer, shape))
            if theirs is not None:
                found |= {f"peer_{name}_ms": theirs[name] for name in ("p20", "p50", "p80")}
                found["ratio"] = row["p50"] / theirs["p50"]
        rows.append(found)
    return rows


def _key(row: dict[str, Any]) -> tuple[str, str, str]:
    return row["operator"], row["setting"], row["shape"]
