"""Table 3 drawn, entry: what an error's structure in time does at a given size, and which property predicts it."""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from qkpipe.paths import StudyPaths
from qkpipe.report import style
from qkpipe.report.forest import empty, ranges
from qkpipe.store.parquet import read_table

LABEL = "Table 3, drawn"
TABLES = ("entry", "entry_runs", "entry_predictors")
QUERY = "SELECT arm, structure, hold_in_memories, seed, coherence, error_ratio, log_sigma_ratio FROM entry_runs ORDER BY ALL"
CAPTION = (
    "Entry, by the error's structure in time. Left: by run, the "
    "log ratio of the final σ(W_Q) to the healthy twin's against the error's temporal "
    "sign-coherence; the size of a point grows with the error's norm over the gradient's. Middle: the same against "
    "the time for which signs are held, in memories of Adam's first moment, 1/(1-β1). Right: Spearman's correlation "
    "of each predictor with that outcome over all these runs, with 95% bootstrap intervals over seeds."
)
NAMES = {
    "error_ratio": "size per step",
    "error_mean": "mean",
    "coherence": "coherence",
    "residual_r_mean": "residual r",
}


def figure(paths: StudyPaths) -> Figure:
    """Drawn from ``entry_runs`` and ``entry_predictors``."""
    runs = read_table(paths.analysis("entry_runs")).to_pandas().dropna(subset=["log_sigma_ratio"])
    predictors = read_table(paths.analysis("entry_predictors")).to_pandas()
    if runs.empty:
        return empty("No uncorrected run with a fault in its gradients beside its twin.")
    fig, axes = plt.subplots(
        1, 3, figsize=(8.6, 3.0), gridspec_kw={"wspace": 0.42, "width_ratios": (1, 1, 0.8)}
    )
    structures = runs["structure"].fillna("quantizer's own")
    colours = style.group_colours(structures)
    for structure, own in runs.groupby(structures, sort=False):
        size = 14 + 26 * own["error_ratio"].clip(0, 2).fillna(0)
        known = own["coherence"].notna()
        axes[0].scatter(
            own.loc[known, "coherence"], own.loc[known, "log_sigma_ratio"], size[known],
            color=colours[structure], alpha=0.75, linewidths=0, label=structure.replace("_", " "),
        )  # fmt: skip
        held = own["hold_in_memories"].replace(np.inf, np.nan)
        axes[1].scatter(held, own["log_sigma_ratio"], 18, color=colours[structure], alpha=0.75, linewidths=0)
        forever = own[np.isinf(own["hold_in_memories"].astype(float))]
        axes[1].scatter(
            [100] * len(forever),
            forever["log_sigma_ratio"],
            18,
            color=colours[structure],
            alpha=0.75,
            linewidths=0,
        )
    axes[0].set_xlabel("sign-coherence of the error")
    axes[0].set_ylabel("log σ(W_Q) over twin")
    axes[1].set_xscale("log")
    axes[1].set_xlim(0.05, 200)
    axes[1].set_xticks([0.1, 1, 10, 100], ["0.1", "1", "10", "whole run"])
    axes[1].axvline(1, color=style.MUTED, linewidth=0.8, linestyle=(0, (4, 3)))
    axes[1].set_xlabel("sign-hold time · (1-β1)")
    for ax in axes[:2]:
        ax.axhline(0, color=style.RULE, linewidth=0.8, zorder=0)
    _predictors(
        axes[2], predictors[(predictors["route"] == "any") & (predictors["outcome"] == "log_sigma_ratio")]
    )
    style.legend_below(fig, axes[0])
    fig.subplots_adjust(bottom=0.27)
    return fig


def _predictors(ax: Axes, rows: pd.DataFrame) -> None:
    ranges(ax, rows["rank_correlation"], rows["low"], rows["high"], [style.PALETTE[0]] * len(rows))
    ax.set_yticks(range(len(rows)), [NAMES[name] for name in rows["predictor"]])
    ax.set_ylim(len(rows) - 0.5, -0.5)
    ax.set_xlim(-1.05, 1.05)
    ax.axvline(0, color=style.MUTED, linewidth=0.8, zorder=0)
    ax.set_xlabel("rank correlation")
