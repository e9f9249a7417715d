"""The long horizon: loss, sigma(W_Q) and logits over ten times the study's steps."""

from __future__ import annotations

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from qkpipe.paths import StudyPaths
from qkpipe.report import style
from qkpipe.report.forest import empty
from qkpipe.store.parquet import read_table

LABEL = "Long horizon"
TABLES = ("horizon", "horizon_curves")
QUERY = "SELECT arm, collapsed, n, late, loss_over_always_on_median, loss_over_always_on_low FROM horizon"
CAPTION = (
    "The long horizon. From left: smoothed training loss, the largest singular value of W_Q over layers, and the largest "
    "applied logit. Thin lines are seeds, thick ones medians; the dashed line is where the study's other runs end."
)


def figure(paths: StudyPaths) -> Figure:
    """Drawn from ``horizon`` and ``horizon_curves``."""
    table = read_table(paths.analysis("horizon")).to_pandas()
    if table.empty:
        return empty("No run longer than the study's own horizon.")
    curves = read_table(paths.analysis("horizon_curves")).to_pandas()
    colours = style.group_colours(table["arm"])
    fig, axes = plt.subplots(1, 3, figsize=(8.6, 2.8), sharex=True, gridspec_kw={"wspace": 0.28})
    for ax, measure in zip(axes, ("loss", "sigma_q", "max_logit"), strict=True):
        for arm, colour in colours.items():
            style.draw_seeds(ax, curves[curves["arm"] == arm], measure, colour, arm)
        style.label_axis(ax, measure, title=True)
        ax.axvline(table["short_steps"].iloc[0], color=style.INK, linewidth=0.8, linestyle=(0, (4, 3)))
        ax.set_xlabel("step")
    style.legend_below(fig, axes[0])
    fig.subplots_adjust(bottom=0.24)
    return fig
