"""The same runs on two devices: do the verdicts agree, and from which step do the trajectories part?

Both sets have one config hash and one data hash, so the same initialisation, batches and draws; what differs is where they ran.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from numpy.typing import ArrayLike, NDArray

from qkpipe.analysis.frames import LEVEL, spread, spread_columns, whose, write_frame
from qkpipe.analysis.measured import AXES, measured
from qkpipe.analysis.statistics import clopper_pearson
from qkpipe.config import Study
from qkpipe.errors import BadInput
from qkpipe.paths import RUN_TABLES, RunPaths, StudyPaths
from qkpipe.store.parquet import read_table
from qkpipe.store.scan import CompletedRun, scan

OUTPUTS = ("portability", "portability_arms", "portability_curves")

PARTED = 1e-3
"""nat: from here on two losses are called apart; at micro far below the noise of a batch."""

SIDES = ("first", "second")
MEASURES = ("sigma_gap", "val_loss_difference")

_SIDED = {
    "device": pa.string(), "environment": pa.string(), "verdict": pa.string(), "collapsed": pa.bool_(),
    "collapse_step": pa.int64(), "fire_step": pa.int64(), "steps_done": pa.int64(), "final_val_loss": pa.float64(),
}  # fmt: skip

PORTABILITY = pa.schema(
    [
        *((name, pa.string()) for name in ("run_id", "arm", "group")),
        ("seed", pa.int64()),
        *((name, pa.string()) for name in ("seed_role", "second", "config_hash")),
        *((f"{side}_{name}", kind) for name, kind in _SIDED.items() for side in SIDES),
        *((name, pa.bool_()) for name in ("same_environment", "identical", "agree", "fire_agree")),
        *((name, pa.int64()) for name in ("first_bit_step", "parted_step")),
        *((name, pa.float64()) for name in MEASURES),
    ]
)
"""One row a run that is there twice. ``second``: the second set's name. ``environment``: JSON, with the code's version.
``verdict``: collapsed, censored or held, by the primary rule; ``agree``: both sides have the same. ``fire_agree``: a trigger
fired on both sides or on neither. ``identical``: every telemetry table but ``timing`` is equal bit for bit.
``first_bit_step``: the first step whose training loss differs in a bit, ``parted_step``: by 1e-3 nat or more, or is there on one
side alone; null: never. ``sigma_gap``: the largest |difference of log sigma(W_Q)| before the first collapse of either side.
``val_loss_difference``: final validation loss of the second less that of the first, nat.
"""

PORTABILITY_ARMS = pa.schema(
    [
        *((name, pa.string()) for name in ("arm", "group", "second", "first_device", "second_device")),
        *((name, pa.int64()) for name in ("n", "agree")),
        *((name, pa.float64()) for name in ("agree_low", "agree_high")),
        *(
            (name, pa.int64())
            for name in ("identical", "fire_agree", "first_collapsed", "second_collapsed", "both_collapsed")
        ),
        *spread_columns("first_bit_step", "parted_step", "collapse_step_difference", *MEASURES),
        *((name, pa.string()) for name in ("seeds", "seed_roles")),
    ]
)
"""One row an arm: of ``n`` runs, how many have one verdict on both sides, with the exact 95% interval of that share.
``collapse_step_difference``: second less first, of runs that collapsed on both sides (``both_collapsed``). Spreads are over the
seeds that have a value.
"""

PORTABILITY_CURVES = pa.schema(
    [
        *((name, pa.string()) for name in ("side", "arm")),
        *((name, pa.int64()) for name in ("seed", "step")),
        *((name, pa.float64()) for name in ("loss", "sigma_q", "max_logit")),
    ]
)
"""The curves (columns as in ``curves``) of both sides."""


def build(paths: StudyPaths, study: Study) -> list[Path]:
    """Write ``portability``, ``portability_arms`` and ``portability_curves`` over every run of the current config that both
    sets have; returns the files.

    Raises :class:`BadInput` where the study declares no second device, where no run is there twice, and for a pair that was
    trained on different data, which no device explains.
    """
    name = study.portability.device
    second = paths.second(name)
    here, there = ({run.key: run for run in scan(folder, study).completed} for folder in (paths, second))
    shared = [key for key in there if key in here]
    if not shared:
        raise BadInput(f"{second.runs}: no run that {paths.runs} has too; `snakemake portability` makes both")
    both = {
        "first": measured(paths, here.values()),
        "second": measured(second, there.values()),
    }
    rows, curves = [], []
    for key in shared:
        runs = {"first": here[key], "second": there[key]}
        known = {side: both[side][run.run_id] for side, run in runs.items()}
        identity = {
            "arm": key.arm,
            "group": here[key].config.group,
            "seed": key.seed,
            "seed_role": study.role(key.arm, key.seed),
            "second": name,
        }
        frames = {side: pd.DataFrame({name: own[name] for name in AXES}) for side, own in known.items()}
        rows.append(identity | compare(runs, known, frames))
        curves += [frame.assign(side=side, arm=key.arm, seed=key.seed) for side, frame in frames.items()]
    table = pd.DataFrame(rows)
    return [
        write_frame(paths.analysis("portability"), table, PORTABILITY),
        write_frame(paths.analysis("portability_arms"), by_arm(table), PORTABILITY_ARMS),
        write_frame(paths.analysis("portability_curves"), pd.concat(curves), PORTABILITY_CURVES),
    ]


def is_current(paths: StudyPaths, study: Study) -> bool:
    """Whether the tables are there and speak of the study as it is now: its second set, its arms' config."""
    files = [paths.analysis(name) for name in OUTPUTS]
    if study.config.portability is None or not all(file.exists() for file in files):
        return False
    rows = read_table(files[0], ["arm", "second", "config_hash"]).to_pylist()
    return all(
        row["second"] == study.config.portability.device
        and row["arm"] in study.runnable
        and row["config_hash"] == study.config_hash(row["arm"])
        for row in rows
    )


def compare(
    runs: dict[str, CompletedRun], known: dict[str, dict[str, Any]], curves: dict[str, pd.DataFrame]
) -> dict[str, Any]:
    """What one run and its second make differ in (columns of ``PORTABILITY``); ``known`` is what was measured of each, by side,
    ``curves`` the part of it that has steps.
    """
    first, second = (runs[side].record for side in SIDES)
    if first["data_hash"] != second["data_hash"]:
        raise BadInput(
            f"{runs['second'].paths.record}: data hash {second['data_hash'][:12]}, the first set's is "
            f"{first['data_hash'][:12]}; delete the run of the older data and run `snakemake portability` again"
        )
    row: dict[str, Any] = {"run_id": runs["first"].run_id, "config_hash": first["config_hash"]}
    for side, run in runs.items():
        record, own = run.record, known[side]
        environment = record["environment"] | {"code_version": record["code_version"]}
        row |= {
            f"{side}_device": record["device"],
            f"{side}_environment": json.dumps(environment, sort_keys=True),
            f"{side}_verdict": _verdict(own),
            f"{side}_fire_step": record["fire_step"],
            f"{side}_steps_done": record["steps_done"],
            **{f"{side}_{name}": own[name] for name in ("collapsed", "collapse_step", "final_val_loss")},
        }
    losses = [read_table(runs[side].paths.table("steps"), ["loss"])["loss"].to_numpy() for side in SIDES]
    ends = [known[side]["collapse_step"] for side in SIDES if known[side]["collapse_step"] is not None]
    values = [known[side]["final_val_loss"] for side in SIDES]
    return row | {
        "same_environment": all(
            row[f"first_{name}"] == row[f"second_{name}"] for name in ("device", "environment")
        ),
        "identical": identical(runs["first"].paths, runs["second"].paths),
        "agree": row["first_verdict"] == row["second_verdict"],
        "fire_agree": (first["fire_step"] is None) == (second["fire_step"] is None),
        "first_bit_step": first_true(*losses, _differs),
        "parted_step": first_true(*losses, _apart),
        "sigma_gap": sigma_gap(curves["first"], curves["second"], min(ends, default=None)),
        "val_loss_difference": None if None in values else values[1] - values[0],
    }


def identical(first: RunPaths, second: RunPaths) -> bool:
    """Whether every telemetry table but ``timing`` is equal in every bit; any NaN equals any other."""
    names = [name for name in RUN_TABLES if name != "timing"]
    return all(_equal(read_table(first.table(name)), read_table(second.table(name))) for name in names)


def first_true(first: NDArray, second: NDArray, differs: Any) -> int | None:
    """The first step at which two curves, one value a step, differ; a step that one side alone has differs. None: never."""
    n = min(len(first), len(second))
    found = np.flatnonzero(differs(first[:n], second[:n]))
    if len(found):
        return int(found[0])
    return n if len(first) != len(second) else None


def sigma_gap(first: pd.DataFrame, second: pd.DataFrame, until: int | None) -> float | None:
    """Largest |difference of log sigma(W_Q)| over the steps before ``until`` that both sides looked at."""
    pairs = first.merge(second, on="step", suffixes=("", "_second"))
    pairs = pairs[pairs["step"] < (np.inf if until is None else until)]
    with np.errstate(divide="ignore", invalid="ignore"):
        gaps = np.log(pairs["sigma_q_second"].astype(float)) - np.log(pairs["sigma_q"].astype(float))
    gaps = gaps.abs()[np.isfinite(gaps)]
    return float(gaps.max()) if len(gaps) else None


def by_arm(rows: pd.DataFrame) -> list[dict[str, Any]]:
    """Rows of ``PORTABILITY_ARMS``, in order of appearance."""
    table = []
    for arm, own in rows.groupby("arm", sort=False):
        n, agree = len(own), int(own["agree"].sum())
        low, high = clopper_pearson(agree, n, LEVEL)
        lag = own["second_collapse_step"].astype(float) - own["first_collapse_step"].astype(float)
        own = own.assign(collapse_step_difference=lag)
        row = {"arm": arm, "n": n, "agree": agree, "agree_low": low, "agree_high": high}
        row |= {name: own[name].iloc[0] for name in ("group", "second")}
        row |= {name: ", ".join(sorted(set(own[name]))) for name in ("first_device", "second_device")}
        row |= {
            name: int(own[name].sum())
            for name in ("identical", "fire_agree", "first_collapsed", "second_collapsed")
        }
        row["both_collapsed"] = int((own["first_collapsed"] & own["second_collapsed"]).sum())
        for name in ("first_bit_step", "parted_step", "collapse_step_difference", *MEASURES):
            row |= spread(own[name], name)
        table.append(row | whose(own))
    return table


def _verdict(own: dict[str, Any]) -> str:
    return "collapsed" if own["collapsed"] else "censored" if own["censored"] else "held"


def _equal(first: pa.Table, second: pa.Table) -> bool:
    if not first.schema.equals(second.schema) or first.num_rows != second.num_rows:
        return False
    for name in first.column_names:
        a, b = first[name].combine_chunks(), second[name].combine_chunks()
        if not a.is_null().equals(b.is_null()):
            return False
        if not pa.types.is_floating(a.type):
            if not a.equals(b):
                return False
        elif _differs(a.drop_null().to_numpy(), b.drop_null().to_numpy()).any():
            return False
    return True


def _differs(first: ArrayLike, second: ArrayLike) -> NDArray[np.bool_]:
    """Where two float64 curves differ in a bit, the sign of zero included; any NaN equals any other."""
    first, second = (np.ascontiguousarray(values, dtype=np.float64) for values in (first, second))
    return (first.view(np.int64) != second.view(np.int64)) & ~(np.isnan(first) & np.isnan(second))


def _apart(first: ArrayLike, second: ArrayLike) -> NDArray[np.bool_]:
    first, second = np.asarray(first, dtype=np.float64), np.asarray(second, dtype=np.float64)
    with np.errstate(invalid="ignore"):
        near = np.abs(first - second) < PARTED
    return _differs(first, second) & ~near
