"""The causal probe: what holding updates off (or on) the leading singular directions does to the spectral runaway."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pyarrow as pa

from qkpipe.analysis.curves import CURVES
from qkpipe.analysis.references import references
from qkpipe.config import Study
from qkpipe.paths import StudyPaths
from qkpipe.store.parquet import read_runs, read_table, write_table

OUTPUTS = ("probe_curves",)

PROBE_CURVES = pa.schema(
    [*CURVES, ("probe", pa.string()), ("on_fraction", pa.float64()), ("removed_fraction", pa.float64())]
)
"""Curves of every probed arm and of the arms it is compared with. ``on_fraction``: |C|^2 / |D|^2, the part of the update's
energy along the probe's directions, over layers and matrices; ``removed_fraction``: what the probe took away of it.
"""


def build(paths: StudyPaths, study: Study) -> list[Path]:
    """Write ``analysis/probe_curves.parquet`` from ``runs``, ``curves`` and the runs' probe telemetry; returns the file."""
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
    return [path]


def energy_fractions(telemetry: pd.DataFrame) -> pd.DataFrame:
    """Energies along and removed, as fractions of the whole update's, summed over layers and matrices, by run and step."""
    energies = telemetry.groupby(["run_id", "step"])[["energy_total", "energy_on", "energy_removed"]].sum()
    total = energies["energy_total"].where(energies["energy_total"] > 0)
    fractions = {
        "on_fraction": energies["energy_on"] / total,
        "removed_fraction": energies["energy_removed"] / total,
    }
    return pd.DataFrame(fractions).reset_index()
