"""Figure 3, anatomy of the guard: what the trigger sees, when it acts, and what would have happened without it."""

from __future__ import annotations

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from qkpipe.paths import StudyPaths
from qkpipe.report import style
from qkpipe.store.parquet import read_table

LABEL = "Figure 3"
TABLES = ("guard_curves", "guard_firing", "dissociation")
QUERY = "SELECT panel, role, arm, seed, step, max_logit, sigma_q, loss FROM guard_curves ORDER BY ALL"
CAPTION = (
    "Anatomy of the guard. Top: the largest attention logit as applied, and the threshold (dashed); middle: the largest "
    "singular value of W_Q over layers; bottom: smoothed loss. Triangles mark the step at which the trigger fired, red crosses "
    "the collapse of the same seed without it. Thin lines are seeds, thick ones medians; always on is the same normalisation "
    "from the first step. Triggered arms that the study leads with, or all where it leads with none; the tables have all."
)
MEASURES = ("max_logit", "sigma_q", "loss")
ROLE_COLOURS = {
    "triggered": style.PALETTE[0],
    "unguarded": style.PALETTE[1],
    "always_on": style.PALETTE[2],
    "twin": "#8c959f",
}


def figure(paths: StudyPaths) -> Figure:
    """Drawn from its tables alone: one column a triggered arm, of those the study leads with."""
    curves = read_table(paths.analysis("guard_curves")).to_pandas()
    firings = read_table(paths.analysis("guard_firing")).to_pandas()
    arms = read_table(paths.analysis("dissociation")).to_pandas()
    panels = list(style.leading(arms[arms["arm"].isin(curves["panel"])])["arm"])
    columns = max(len(panels), 1)
    fig, axes = plt.subplots(
        len(MEASURES),
        columns,
        figsize=(max(7.6, 3.6 * columns), 6.0),
        sharex=True,
        sharey="row",
        squeeze=False,
        gridspec_kw={"hspace": 0.2, "wspace": 0.1},
    )
    for column, panel in zip(axes.T, panels, strict=False):
        shown = curves[curves["panel"] == panel]
        column[0].set_title(f"{panel} (τ = {shown['threshold'].iloc[0]:g})")
        for ax, measure in zip(column, MEASURES, strict=True):
            _panel(ax, shown, firings[firings["arm"] == panel], measure)
    for ax, measure in zip(axes[:, 0], MEASURES, strict=True):
        style.label_axis(ax, measure)
    for ax in axes[-1]:
        ax.set_xlabel("step")
    style.legend_below(fig, axes[0][0])
    return fig


def _panel(ax: Axes, curves: pd.DataFrame, firings: pd.DataFrame, measure: str) -> None:
    ax.margins(x=0.02)
    if measure == "max_logit":
        ax.axhline(
            curves["threshold"].iloc[0], color=style.INK, linewidth=0.8, linestyle=(0, (4, 3)), zorder=1
        )
    for role, own in curves.groupby("role", sort=False):
        for arm, lines in own.groupby("arm", sort=False):
            label = f"{arm} ({role.replace('_', ' ')})"
            style.draw_seeds(
                ax, lines, measure, ROLE_COLOURS[role], label, zorder=3 if role == "triggered" else 2
            )
    for firing in firings.itertuples():
        seed = curves[curves["seed"] == firing.seed]
        guarded, unguarded = seed[seed["arm"] == firing.arm], seed[seed["arm"] == firing.unguarded_arm]
        if (
            measure == "max_logit"
        ):  # the trigger looks at every step, telemetry only at some: the firing is at the threshold
            guarded = guarded.assign(max_logit=firing.threshold)
        style.mark_events(ax, guarded, measure, None, firing.fire_step, ROLE_COLOURS["triggered"])
        style.mark_events(
            ax, unguarded, measure, firing.unguarded_collapse_step, None, ROLE_COLOURS["unguarded"]
        )
    style.label_axis(ax, measure)
    ax.set_ylabel("")
