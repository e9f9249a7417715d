"""The spectral and logit outcome of a run: one number out of its telemetry."""

from __future__ import annotations

import math

import pyarrow as pa
import pyarrow.compute as pc

CHANNEL = {"log_sigma": ("layers", "sigma_q_1"), "log_max_logit": ("heads", "max_logit")}
"""Outcome -> the telemetry table and column whose maximum over layers (and heads) it is the log of."""


def log_channel(telemetry: pa.Table, column: str, at: int | None = None) -> dict[str, float]:
    """``run_id`` -> log of the maximum of ``column`` over layers and heads, at step ``at`` (None: at the
    end).

    ``telemetry`` is a ``layers`` or ``heads`` table of many runs. Taken is the last row up to ``at`` in which
    every value is finite: a diverged run keeps its last finite value. A run without such a row, or whose
    maximum is not positive there, is absent.
    """
    if at is not None:
        telemetry = telemetry.filter(pc.field("step") <= at)
    finite = pc.fill_null(pc.is_finite(telemetry[column]), False)
    steps = (
        telemetry.append_column("finite", finite)
        .group_by(["run_id", "step"])
        .aggregate([(column, "max"), ("finite", "all")])
    )
    last: dict[str, tuple[int, float]] = {}
    names = ("run_id", "step", f"{column}_max", "finite_all")
    for run_id, step, value, all_finite in zip(*(steps[name].to_pylist() for name in names)):
        if all_finite and (run_id not in last or step > last[run_id][0]):
            last[run_id] = (step, value)
    return {run_id: math.log(value) for run_id, (_, value) in last.items() if value > 0}
