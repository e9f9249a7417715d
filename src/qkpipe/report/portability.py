"""Two devices: the trajectories of the same runs on both, one over the other."""

from __future__ import annotations

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.figure import Figure

from qkpipe.paths import StudyPaths
from qkpipe.report import style
from qkpipe.store.parquet import read_table

LABEL = "Two devices"
TABLES = ("portability", "portability_curves")
QUERY = (
    "SELECT arm, seed, first_verdict, second_verdict, first_bit_step, parted_step, sigma_gap FROM portability"
)
CAPTION = (
    "The same runs on two devices, an arm a row. From left: smoothed training loss, the largest singular value of W_Q over "
    "layers, and the largest applied logit. Grey: the first device; dashed: the second; a line is a seed. Crosses: where a run "
    "of the second device collapsed; triangles: where its trigger fired."
)
MEASURES = ("loss", "sigma_q", "max_logit")


def figure(paths: StudyPaths) -> Figure:
    """Drawn from ``portability`` and ``portability_curves``."""
    table, curves = (read_table(paths.analysis(name)).to_pandas() for name in TABLES)
    colours = style.group_colours(table["arm"])
    fig, axes = plt.subplots(
        len(colours),
        3,
        figsize=(8.6, 1.5 * len(colours) + 0.7),
        sharex=True,
        sharey="col",
        squeeze=False,
        gridspec_kw={"wspace": 0.28},
    )
    for row, (arm, colour) in zip(axes, colours.items(), strict=True):
        runs, own = table[table["arm"] == arm], curves[curves["arm"] == arm]
        for ax, measure in zip(row, MEASURES, strict=True):
            _overlay(ax, runs, own, measure, colour)
        row[0].set_ylabel(arm)
    for ax, measure in zip(axes[0], MEASURES, strict=True):
        style.label_axis(ax, measure, title=True)
    for ax in axes[1:].flat:
        ax.grid(axis="y", color=style.RULE, linewidth=0.5, zorder=0)
        ax.set_axisbelow(True)
    for ax in axes[-1]:
        ax.set_xlabel("step")
    return fig


def _overlay(ax: plt.Axes, runs: pd.DataFrame, curves: pd.DataFrame, measure: str, colour: str) -> None:
    looks = {
        "first": {"color": "#a9b1ba", "linewidth": 2.2, "solid_capstyle": "round"},
        "second": {"color": colour, "linewidth": 0.9, "linestyle": (0, (4, 2))},
    }
    for run in runs.itertuples():
        for side, look in looks.items():
            line = curves[(curves["side"] == side) & (curves["seed"] == run.seed)].sort_values("step")
            line = line.dropna(subset=[measure])
            ax.plot(line["step"], line[measure], **look)
        style.mark_events(ax, line, measure, run.second_collapse_step, run.second_fire_step, colour)
