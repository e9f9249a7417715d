"""Every threshold the guard could have had: false activations, warnings and their lead, by setting."""

from __future__ import annotations

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from qkpipe.paths import StudyPaths
from qkpipe.report import style
from qkpipe.report.forest import empty
from qkpipe.store.parquet import read_table

LABEL = "Figure 3, thresholds"
TABLES = ("threshold_sweep",)
QUERY = "SELECT model, optimizer, threshold, healthy_fired, healthy_n, doomed_fired, doomed_n, lead_median FROM threshold_sweep"
CAPTION = (
    "The guard's threshold swept over unguarded runs: the share of healthy runs that would have fired (a false "
    "activation), the share of doomed runs that would have fired before their collapse, with exact 95% intervals, and "
    "the lead from there to the collapse (median with the smallest and largest). The dashed line is the paper's 30."
)


def figure(paths: StudyPaths) -> Figure:
    """Drawn from ``threshold_sweep`` alone: one row a setting."""
    table = read_table(paths.analysis("threshold_sweep")).to_pandas()
    if table.empty:
        return empty("No setting has both healthy runs and runs that collapsed.")
    settings = list(table.groupby(["model", "optimizer"], sort=False))
    fig, axes = plt.subplots(
        len(settings),
        2,
        figsize=(8.6, 0.5 + 2.5 * len(settings)),
        sharex=True,
        squeeze=False,
        gridspec_kw={"wspace": 0.22, "hspace": 0.3},
    )
    for row, ((model, optimizer), own) in zip(axes, settings, strict=True):
        for kind, colour, label in (
            ("healthy", style.PALETTE[2], "healthy runs that fire"),
            ("doomed", style.PALETTE[1], "doomed runs that fire in time"),
        ):
            share = own[f"{kind}_fired"] / own[f"{kind}_n"]
            row[0].fill_between(
                own["threshold"],
                own[f"{kind}_low"],
                own[f"{kind}_high"],
                color=colour,
                alpha=0.16,
                linewidth=0,
            )
            row[0].plot(
                own["threshold"],
                share,
                color=colour,
                linewidth=1.6,
                label=label,
            )
        row[1].fill_between(
            own["threshold"],
            own["lead_min"],
            own["lead_max"],
            color=style.PALETTE[1],
            alpha=0.16,
            linewidth=0,
        )
        row[1].plot(own["threshold"], own["lead_median"], color=style.PALETTE[1], linewidth=1.6)
        healthy, doomed = own["healthy_n"].iloc[0], own["doomed_n"].iloc[0]
        row[0].set_title(f"{model}, {optimizer}\nshare of {healthy} healthy, {doomed} doomed", fontsize=8)
        row[1].set_title("lead (steps)", fontsize=8)
        for ax in row:
            ax.axvline(30, color=style.INK, linewidth=0.8, linestyle=(0, (4, 3)))
            ax.set_xscale("log")
            ax.xaxis.set_major_formatter(style.plain_log_ticks())
            ax.grid(axis="y", color=style.RULE, linewidth=0.5)
    for ax in axes[-1]:
        ax.set_xlabel("threshold on the largest logit")
    style.legend_below(fig, axes[0][0])
    return fig
