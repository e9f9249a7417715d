"""How long each arm lasts: Kaplan-Meier curves with their 95% bands."""

from __future__ import annotations

import math

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from qkpipe.paths import StudyPaths
from qkpipe.report import style
from qkpipe.report.forest import empty
from qkpipe.store.parquet import read_table

LABEL = "Survival"
TABLES = ("survival",)
QUERY = "SELECT arm, step, survival, low, high, at_risk FROM survival ORDER BY ALL"
CAPTION = (
    "Share of runs not yet collapsed (Kaplan-Meier, 95% bands), arms with a collapse; a run that did not collapse is "
    "censored at its end."
)
COLUMNS = 4


def figure(paths: StudyPaths) -> Figure:
    """Drawn from ``survival`` alone: one small panel an arm."""
    table = read_table(paths.analysis("survival")).to_pandas()
    if table.empty:
        return empty("No run collapsed.")
    arms = list(dict.fromkeys(table["arm"]))
    colours = style.group_colours(table["group"])
    rows = math.ceil(len(arms) / COLUMNS)
    fig, axes = plt.subplots(
        rows, COLUMNS, figsize=(8.6, 0.4 + 1.55 * rows), sharex=True, sharey=True, squeeze=False,
        gridspec_kw={"hspace": 0.42, "wspace": 0.1},
    )  # fmt: skip
    for ax in axes.flat[len(arms) :]:
        ax.axis("off")
    for ax, arm in zip(axes.flat, arms):
        own = table[table["arm"] == arm]
        colour = colours[own["group"].iloc[0]]
        ax.fill_between(
            own["step"], own["low"], own["high"], step="post", color=colour, alpha=0.16, linewidth=0
        )
        ax.step(own["step"], own["survival"], where="post", color=colour, linewidth=1.6)
        ax.set_title(arm, fontsize=6.8 if len(arm) > 20 else 8)
        ax.text(
            0.97,
            0.9,
            f"n = {own['n'].iloc[0]}",
            transform=ax.transAxes,
            ha="right",
            va="top",
            fontsize=7,
            color=style.MUTED,
        )
        ax.set_ylim(-0.03, 1.05)
        ax.grid(axis="y", color=style.RULE, linewidth=0.5)
    for ax in axes[-1]:
        ax.set_xlabel("step")
    return fig
