"""The causal probe: what holding updates off (or on) the leading singular directions does to the spectral runaway."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa

from qkpipe.analysis.curves import CURVES
from qkpipe.analysis.frames import (
    COUNTED,
    counted,
    paired_log_ratio,
    spread,
    spread_columns,
    study_runs,
    write_frame,
)
from qkpipe.analysis.references import parent, references
from qkpipe.analysis.settings import NONE
from qkpipe.config import Study
from qkpipe.paths import StudyPaths
from qkpipe.store.parquet import read_runs, read_table, write_table

OUTPUTS = ("probe_curves", "probe_controls")

PROBE_CURVES = pa.schema(
    [*CURVES, ("probe", pa.string()), ("on_fraction", pa.float64()), ("removed_fraction", pa.float64())]
)
"""Curves of every probed arm and of the arms it is compared with. ``on_fraction``: |C|^2 / |D|^2, the part of the update's
energy along the probe's directions, over layers and matrices; ``removed_fraction``: what the probe took away of it.
"""

CONTROL_MEASURES = ("log_sigma_ratio", "final_sigma_q", "peak_logit", "final_val_loss", "removed_fraction")

PROBE_CONTROLS = pa.schema(
    [
        *(
            (name, pa.string())
            for name in ("arm", "control", "action", "side", "directions", "source", "model")
        ),
        *((name, pa.int64()) for name in ("k", "start_step")),
        *COUNTED,
        ("infeasible", pa.int64()),
        ("unprobed", pa.string()),
        ("unprobed_n", pa.int64()),
        ("unprobed_collapsed", pa.int64()),
        *spread_columns(*CONTROL_MEASURES),
    ]
)
"""One row a probed arm. ``control`` names what it is there for: ``probe``, ``healthy twin`` (no fault), ``next directions``
(k+1..2k), ``random directions`` (fixed), ``late start``, ``isotropic`` (shrunk by the same energy), ``observed``.
``unprobed``: the arm it extends, counted over the same seeds; ``log_sigma_ratio``: final sigma(W_Q) over its, by seed.
``infeasible``: updates on which it could not act.
"""


def build(paths: StudyPaths, study: Study) -> list[Path]:
    """Write ``probe_curves`` and ``probe_controls`` from ``runs``, ``curves`` and the runs' telemetry; returns the files."""
    runs = read_table(paths.analysis("runs")).to_pandas()
    curves = read_table(paths.analysis("curves")).to_pandas()
    probed = runs.loc[runs["probe"] != "none", "arm"].unique()
    members = {*probed, *(reference for arm in probed for reference in references(study, arm).values())}
    shown = runs[runs["arm"].isin(members)]
    telemetry = read_runs((paths.run(run.arm, run.seed) for run in shown.itertuples()), "probe").to_pandas()
    frame = (
        curves[curves["run_id"].isin(shown["run_id"])]
        .merge(shown[["run_id", "probe"]], on="run_id")
        .merge(energy_fractions(telemetry), on=["run_id", "step"], how="left")
    )
    path = paths.analysis("probe_curves")
    write_table(
        path,
        pa.Table.from_pandas(frame[PROBE_CURVES.names], PROBE_CURVES, preserve_index=False),
        PROBE_CURVES,
    )
    return [
        path,
        write_frame(paths.analysis("probe_controls"), controls(paths, frame, study), PROBE_CONTROLS),
    ]


def controls(paths: StudyPaths, curves: pd.DataFrame, study: Study) -> list[dict[str, Any]]:
    """Rows of ``PROBE_CONTROLS``, in the config's order; ``curves`` carries ``removed_fraction`` by run."""
    runs = study_runs(paths)
    removed = curves.groupby("run_id")["removed_fraction"].mean()
    rows = []
    for arm, own in runs[runs["probe_action"].notna()].groupby("arm", sort=False):
        first, unprobed = own.iloc[0], parent(study, arm)
        own = own.assign(removed_fraction=own["run_id"].map(removed))
        own["log_sigma_ratio"] = paired_log_ratio(own, runs, "final_sigma_q", lambda arm: parent(study, arm))
        same = runs[(runs["arm"] == unprobed) & runs["seed"].isin(own["seed"])]
        events = read_runs((paths.run(arm, seed) for seed in own["seed"]), "events", ["kind"])
        row = {"arm": arm, "control": control(first), "source": first["source"], "model": first["model"]}
        row |= {key: first[f"probe_{key}"] for key in ("action", "side", "directions", "k", "start_step")}
        row |= counted(own) | {"infeasible": events["kind"].to_pylist().count("probe_infeasible")}
        row |= {
            "unprobed": unprobed,
            "unprobed_n": len(same),
            "unprobed_collapsed": int(same["collapsed"].sum()),
        }
        for name in CONTROL_MEASURES:
            row |= spread(own[name], name)
        rows.append(row)
    return rows


def control(run: pd.Series) -> str:
    """What a probed run is there for."""
    if run["probe_action"] == "observe":
        return "observed"
    if run["source"] == NONE:
        return "healthy twin"
    if run["probe_action"] == "isotropic":
        return "isotropic"
    if run["probe_directions"] != "leading":
        return f"{run['probe_directions']} directions"
    return "late start" if run["probe_start_step"] else "probe"


def energy_fractions(telemetry: pd.DataFrame) -> pd.DataFrame:
    """Energies along and removed, as fractions of the whole update's, summed over layers and matrices, by run and step."""
    energies = telemetry.groupby(["run_id", "step"])[["energy_total", "energy_on", "energy_removed"]].sum()
    total = energies["energy_total"].where(energies["energy_total"] > 0)
    fractions = {
        "on_fraction": energies["energy_on"] / total,
        "removed_fraction": energies["energy_removed"] / total,
    }
    return pd.DataFrame(fractions).reset_index()
