"""The guard's threshold tau, from healthy runs alone, and how often it would fire on other healthy runs.

The rule, per scale, model, optimizer (with its learning rate) and horizon: take the largest attention logit
of every calibration run, and let tau be the j-th largest of the n, j = floor(level * (n + 1)). A new healthy
run is exchangeable with them, so its maximum passes tau with probability j / (n + 1) <= level: at 5%, 19 runs
give their maximum, 18 give nothing. The unit is the seed (arms that share one are one run, at their larger
maximum), and a doomed run is never looked at.

The false-activation rate is counted on held-out healthy runs, with its exact upper bound: 59 without a firing
give 5% at 95% confidence. The paper's tau = 30 stands beside.

tau is *not identifiable*, with the reason, where
- there are too few calibration seeds for the level;
- a healthy run collapsed, so that no logit is healthy at this setting;
- healthy logits still climb at the end: the rule, applied to the first three quarters of the horizon, gives a
  threshold that calibration runs pass in the last quarter significantly more often than ``level``. Such a tau
  belongs to the horizon, and a longer run crosses it;
- held-out runs pass it significantly more often than ``level``: healthy drift crosses it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from qkpipe.analysis.statistics import clopper_pearson, upper_bound
from qkpipe.config import Study
from qkpipe.config.models import PAPER_TAU
from qkpipe.errors import BadInput
from qkpipe.paths import StudyPaths
from qkpipe.store.parquet import read_runs, read_table, write_table

EARLY = 0.75
"""Share of the horizon that the drift check takes for early."""

ROLES = ("calibration", "held_out")
SETTING = ("scale", "model", "optimizer", "steps_planned")

THRESHOLDS = pa.schema(
    [
        *((name, pa.string()) for name in SETTING[:-1]),
        ("steps_planned", pa.int64()),
        ("rule", pa.string()),
        ("tau", pa.float64()),
        ("level", pa.float64()),
        ("confidence", pa.float64()),
        ("n_calibration", pa.int64()),
        ("n_drifted", pa.int64()),
        ("n_held_out", pa.int64()),
        ("n_fired", pa.int64()),
        ("rate", pa.float64()),
        ("rate_upper", pa.float64()),
        ("identifiable", pa.bool_()),
        ("reason", pa.string()),
        ("sensed_every", pa.int64()),
        ("arms", pa.string()),
        ("calibration_seeds", pa.string()),
        ("held_out_seeds", pa.string()),
    ]
)
"""One row a setting and rule (``calibrated``, ``paper``). ``n_drifted``: calibration seeds that pass the
early threshold late. ``sensed_every``: steps between two looks at the logits; the numbers hold for a guard
that looks as often, and one that looks more often sees larger maxima.
"""


@dataclass(frozen=True)
class _Healthy:
    """Largest logits of one seed over its healthy arms; infinite once a run collapsed."""

    seed: int
    peak: float
    early: float
    late: float


def thresholds(runs: pa.Table, logits: pa.Table, level: float = 0.05, confidence: float = 0.95) -> pa.Table:
    """One row a setting and rule (schema ``THRESHOLDS``).

    ``runs`` has the schema ``telemetry.schema.RUNS``, ``logits`` (run_id, step, max_logit) the telemetry (``steps``,
    ``heads``) of at least the calibration and held-out runs. A seed that lacks one of the calibration arms is not counted.
    Raises :class:`BadInput` for a calibration or held-out run that has a fault or an intervention.
    """
    rows = [row for row in runs.to_pylist() if row["seed_role"] in ROLES]
    for row in rows:
        for column in ("source", "intervention"):
            if row[column] not in (None, "none"):
                raise BadInput(
                    f"runs: arm={row['arm']!r}, seed={row['seed']} ({row['seed_role']}) has {column}={row[column]!r}; "
                    "thresholds are taken from healthy runs, allowed: none"
                )
    curves = _logits(logits, {row["run_id"] for row in rows})
    table = []
    for setting in dict.fromkeys(tuple(row[name] for name in SETTING) for row in rows):
        inside = [row for row in rows if tuple(row[name] for name in SETTING) == setting]
        by_role = {role: {row["arm"] for row in inside if row["seed_role"] == role} for role in ROLES}
        arms = sorted(by_role["calibration"] or by_role["held_out"])
        calibration, held_out = (_healthy_seeds(inside, role, arms, curves, setting[-1]) for role in ROLES)
        shared = dict(zip(SETTING, setting)) | {
            "level": level,
            "confidence": confidence,
            "n_calibration": len(calibration),
            "n_held_out": len(held_out),
            "sensed_every": _interval(curves[row["run_id"]] for row in inside),
            "arms": ",".join(arms),
            "calibration_seeds": ",".join(str(run.seed) for run in calibration),
            "held_out_seeds": ",".join(str(run.seed) for run in held_out),
        }
        tau = run_maximum(calibration, level)
        n_drifted, reason = _drift(calibration, level, confidence)
        if tau is None:
            reason = (
                f"{len(calibration)} calibration seeds; a level of {level:g} needs {math.ceil(1 / level) - 1}"
            )
        elif any(math.isinf(run.peak) for run in calibration):
            tau, reason = None, "a healthy run collapsed"
        table.append(
            shared
            | _rates(tau, held_out, level, confidence, reason)
            | {"rule": "calibrated", "n_drifted": n_drifted}
        )
        table.append(shared | _rates(PAPER_TAU, held_out, level, confidence, None) | {"rule": "paper"})
    return pa.Table.from_pylist(table, THRESHOLDS)


def build(paths: StudyPaths, study: Study) -> list[Path]:
    """Write ``tables/threshold.parquet`` from the calibration and held-out runs that are there (any scale of ``study``)."""
    runs = read_table(paths.analysis("runs"))
    rows = zip(*(runs[name].to_pylist() for name in ("arm", "seed", "seed_role")))
    folders = [paths.run(arm, seed) for arm, seed, role in rows if role in ROLES]
    columns = ["run_id", "step", "max_logit"]
    every_step = read_runs(folders, "steps", columns)
    logits = pa.concat_tables(
        [every_step.filter(every_step["max_logit"].is_valid()), read_runs(folders, "heads", columns)]
    )
    written = paths.table("threshold")
    write_table(written, thresholds(runs, logits), THRESHOLDS)
    return [written]


def run_maximum(calibration: list[_Healthy], level: float, part: str = "peak") -> float | None:
    """The rule: the j-th largest of n maxima, j = floor(level * (n + 1)); None where j = 0."""
    allowed = math.floor(level * (len(calibration) + 1) + 1e-9)
    maxima = sorted((getattr(run, part) for run in calibration), reverse=True)
    return maxima[allowed - 1] if allowed else None


def _drift(calibration: list[_Healthy], level: float, confidence: float) -> tuple[int | None, str | None]:
    early = run_maximum(calibration, level, "early")
    if early is None:
        return None, None
    drifted = sum(run.late > early for run in calibration)
    if not _exceeds(drifted, len(calibration), level, confidence):
        return drifted, None
    return drifted, (
        f"healthy logits still climb: {drifted} of {len(calibration)} calibration seeds pass the threshold of the "
        f"first {EARLY:.0%} of the horizon after it"
    )


def _rates(
    tau: float | None, held_out: list[_Healthy], level: float, confidence: float, reason: str | None
) -> dict[str, Any]:
    """How often held-out runs pass ``tau``, and whether that leaves it identifiable."""
    row: dict[str, Any] = {"tau": tau, "identifiable": reason is None, "reason": reason}
    if tau is None or not held_out:
        return row
    fired, n = sum(run.peak > tau for run in held_out), len(held_out)
    if reason is None and _exceeds(fired, n, level, confidence):
        crossed = f"healthy drift crosses it: {fired} of {n} held-out seeds"
        row |= {"identifiable": False, "reason": crossed}
    return row | {"n_fired": fired, "rate": fired / n, "rate_upper": upper_bound(fired, n, confidence)}


def _exceeds(k: int, n: int, level: float, confidence: float) -> bool:
    """Whether a rate seen as k of n is above ``level`` at this one-sided confidence."""
    return clopper_pearson(k, n, 2 * confidence - 1)[0] > level


def _logits(sensed: pa.Table, run_ids: set[str]) -> dict[str, list[tuple[int, float]]]:
    """``run_id`` -> (step, largest logit over layers and heads) in step order; a non-finite one is infinite."""
    sensed = sensed.filter(pc.is_in(sensed["run_id"], pa.array(sorted(run_ids), pa.string())))
    finite = pc.fill_null(pc.is_finite(sensed["max_logit"]), False)
    sensed = pa.table(
        {
            "run_id": sensed["run_id"],
            "step": sensed["step"],
            "logit": pc.if_else(finite, sensed["max_logit"], math.inf),
        }
    )
    curves: dict[str, list[tuple[int, float]]] = {run_id: [] for run_id in run_ids}
    steps = sensed.group_by(["run_id", "step"]).aggregate([("logit", "max")]).sort_by("step")
    for run_id, step, logit in zip(*(steps[name].to_pylist() for name in ("run_id", "step", "logit_max"))):
        curves[run_id].append((step, logit))
    return curves


def _healthy_seeds(
    rows: list[dict[str, Any]],
    role: str,
    arms: list[str],
    logits: Mapping[str, list[tuple[int, float]]],
    horizon: int,
) -> list[_Healthy]:
    seeds: dict[int, dict[str, dict[str, Any]]] = {}
    for row in rows:
        if row["seed_role"] == role and logits[row["run_id"]]:
            seeds.setdefault(row["seed"], {})[row["arm"]] = row
    healthy = []
    for seed, by_arm in sorted(seeds.items()):
        if not by_arm.keys() >= set(arms):
            continue
        if any(by_arm[arm]["collapsed"] or by_arm[arm]["collapsed_paper"] for arm in arms):
            healthy.append(_Healthy(seed, math.inf, math.inf, math.inf))
            continue
        curve = [point for arm in arms for point in logits[by_arm[arm]["run_id"]]]
        early = max((logit for step, logit in curve if step <= EARLY * horizon), default=-math.inf)
        late = max((logit for step, logit in curve if step > EARLY * horizon), default=-math.inf)
        healthy.append(_Healthy(seed, max(early, late), early, late))
    return healthy


def _interval(curves: Iterable[list[tuple[int, float]]]) -> int | None:
    """Largest usual distance between two looks: the second step seen less the first, over runs."""
    distances = [curve[1][0] - curve[0][0] for curve in curves if len(curve) > 1]
    return max(distances, default=None)
