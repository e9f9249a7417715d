"""Runs the benchmark and writes its table and figure. No speed is shown for an operator whose check is red."""

from __future__ import annotations

import logging
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch
from matplotlib.figure import Figure

from qkpipe.bench import device, measure, operators, training
from qkpipe.bench.table import SCHEMA
from qkpipe.config.models import RunConfig
from qkpipe.paths import StudyPaths
from qkpipe.report import style
from qkpipe.store.parquet import read_table, write_table
from qkpipe.train.heap import keep_freed_memory

log = logging.getLogger(__name__)


def build(
    run: RunConfig, paths: StudyPaths, *, quick: bool = False, device_check: Path | None = None
) -> list[dict[str, Any]]:
    """Measure all, on one thread; write ``benchmark/operators.parquet`` and the figure; returns the rows.

    ``run`` gives the sizes of the training step. ``quick``: small sizes and a fraction of a second a case. The kernels' rows
    are of a device check: one made now where a GPU is here, else that of the result file ``device_check``, if given.
    """
    torch.set_num_threads(1)
    keep_freed_memory()
    flops, bytes_s = measure.ceilings(0.1 if quick else 1.0)
    shared = {
        "ceiling_gflops": flops / 1e9, "ceiling_gbytes": bytes_s / 1e9, "device": _device(), "threads": 1,
        "torch": torch.__version__, "numba": version("numba"), "python": platform.python_version(),
    }  # fmt: skip
    rows = []
    for case in operators.cases(quick):
        row = {"operator": case.operator, "setting": case.setting, "peer": case.peer, "gate": case.check()}
        if row["gate"]:
            took = measure.interleaved({"ours": case.run, "peer": case.run_peer}, 0.05 if quick else 2.0)
            row |= _times(took["ours"], took["peer"])
            seconds = took["ours"][0]
            row |= {
                "flops": case.flops or None, "bytes": case.bytes,
                "flop_fraction": case.flops / seconds / flops if case.flops else None,
                "byte_fraction": case.bytes / seconds / bytes_s,
            }  # fmt: skip
        rows.append(row | shared)
        log.info(_line(row))
    step, guards = training.compare(run, rounds=1 if quick else 4, blocks=2 if quick else 8)
    none = guards.pop("none")
    compared = [
        (
            "training step",
            "fp32 SDPA, telemetry and guard on",
            "plain eager loop",
            step["ours"],
            step["plain"],
        )
    ]
    compared += [
        ("training step", f"guard dormant, {name}", "no guard", took, none) for name, took in guards.items()
    ]
    for operator, setting, peer, ours, theirs in compared:
        row = {"operator": operator, "setting": setting, "peer": peer, "gate": True, **_times(ours, theirs)}
        rows.append(row | shared)
        log.info(_line(row))
    if torch.cuda.is_available():
        device_check = device.measure(paths.benchmark.with_name("device.json"))
    if device_check is not None:
        kernels = device.benchmark_rows(device.read(device_check))
        rows += kernels
        for row in kernels:
            log.info(_line(row))
    write_table(paths.benchmark, rows, SCHEMA)
    style.apply()
    style.save(figure(paths), [paths.figure("benchmark", suffix) for suffix in ("svg", "png")])
    return rows


def figure(paths: StudyPaths) -> Figure:
    """Time over the peer's, one bar a case, from the table alone."""
    table = read_table(paths.benchmark).to_pandas().dropna(subset=["ratio"]).iloc[::-1]
    fig, ax = plt.subplots(figsize=(7.5, 0.26 * len(table) + 0.8))
    colours = style.group_colours(table["operator"])
    names = table["operator"] + ": " + table["setting"]
    names = names.where(~names.duplicated(keep=False), names + ", over " + table["peer"])
    if table["device"].nunique() > 1:
        names += ", " + table["device"]
    ax.barh(names, table["ratio"], color=[colours[operator] for operator in table["operator"]], height=0.6)
    ax.axvline(1, color=style.INK, linewidth=0.8)
    ax.set_xscale("log")
    ax.set_xlabel("time over the peer's (left of the line: faster than the peer)")
    return fig


def _times(ours: measure.Quantiles, peer: measure.Quantiles) -> dict[str, float]:
    names = ("p20_ms", "p50_ms", "p80_ms")
    row = {name: 1e3 * seconds for name, seconds in zip(names, ours, strict=True)}
    row |= {f"peer_{name}": 1e3 * seconds for name, seconds in zip(names, peer, strict=True)}
    return row | {"ratio": ours[0] / peer[0]}


def _line(row: dict[str, Any]) -> str:
    name = f"{row['operator']}: {row['setting']}"
    if not row["gate"]:
        return f"{name:<72} WRONG RESULT, no time shown"
    compared = f", {row['ratio']:7.3f} x {row['peer']}" if "ratio" in row else ""
    return f"{name:<72} {row['p20_ms']:9.3f} ms{compared}"


def _device() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
