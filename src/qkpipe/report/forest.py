"""Rows of dots with their ranges: the one drawing that most comparisons of arms need."""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from qkpipe.report import style

ROW = 0.27
"""Height of a row in inches."""

SHARE = "collapsed"


def empty(sentence: str) -> Figure:
    """A figure that says why there is nothing to draw."""
    fig, ax = plt.subplots(figsize=(8.6, 1.1))
    ax.axis("off")
    ax.text(0.5, 0.5, sentence, ha="center", va="center", color=style.MUTED, fontsize=9)
    return fig


def forest(
    frame: pd.DataFrame,
    labels: Sequence[str],
    columns: dict[str, str],
    colours: Sequence[str],
    reference: dict[str, float] | None = None,
) -> Figure:
    """One row of ``frame`` a line, one panel a column.

    ``columns``: name -> title; ``collapsed`` is drawn as the share of ``n`` with its exact interval, anything else as the
    median with smallest and largest (``<name>_median``, ``_min``, ``_max``). ``reference``: column -> where a line
    stands.
    """
    height = 0.75 + ROW * max(len(frame), 1)
    fig, axes = plt.subplots(
        1, len(columns), figsize=(8.6, height), sharey=True, squeeze=False, gridspec_kw={"wspace": 0.12}
    )
    for ax, (column, title) in zip(axes[0], columns.items(), strict=True):
        if column == SHARE:
            shares(ax, frame, colours)
        else:
            ranges(ax, *(frame[f"{column}_{part}"] for part in ("median", "min", "max")), colours)
            ax.xaxis.set_major_locator(MaxNLocator(4))
        if reference and column in reference:
            ax.axvline(reference[column], color=style.MUTED, linewidth=0.8, zorder=0)
        ax.set_title(title)
        ax.grid(axis="x", color=style.RULE, linewidth=0.5)
        ax.set_axisbelow(True)
        ax.tick_params(axis="y", length=0)
    axes[0][0].set_yticks(range(len(frame)), labels)
    axes[0][0].set_ylim(len(frame) - 0.5, -0.5)
    return fig


def ranges(ax: Axes, middle: pd.Series, low: pd.Series, high: pd.Series, colours: Sequence[str]) -> None:
    """Dots with whiskers, one a row from the top; what is not known is left out."""
    for row, (m, a, b, colour) in enumerate(zip(middle, low, high, colours)):
        if pd.isna(m):
            continue
        if np.isfinite(a) and np.isfinite(b):
            ax.plot([a, b], [row, row], color=colour, linewidth=1.6, alpha=0.45, solid_capstyle="round")
        ax.plot([m], [row], "o", color=colour, markersize=4.6, markeredgecolor="white", markeredgewidth=0.5)


def shares(ax: Axes, frame: pd.DataFrame, colours: Sequence[str]) -> None:
    """Share collapsed with its exact interval and the count it is."""
    middle = frame["collapsed"] / frame["n"].where(frame["n"] > 0)
    ranges(ax, middle, frame["collapsed_low"], frame["collapsed_high"], colours)
    for row, (k, n) in enumerate(zip(frame["collapsed"], frame["n"])):
        if n > 0:
            ax.annotate(
                f"{k:.0f}/{n:.0f}",
                (1.06, row),
                fontsize=7,
                color=style.MUTED,
                va="center",
                annotation_clip=False,
            )
    ax.set_xlim(-0.04, 1.25)
    ax.set_xticks([0, 0.5, 1])
