"""One look for every figure: quiet axes, colour-blind-safe colours by arm group, files that are equal for equal input."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure

INK, MUTED, RULE = "#1f2328", "#6e7781", "#d8dee4"
COLLAPSE = "#b3261e"

# Okabe and Ito's colours, in the order in which groups appear in the study.
PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#5d5fad", "#8c6d31")

LABELS = {
    "loss": "smoothed loss (nat)",
    "sigma_q": "σ(W_Q), max over layers",
    "max_logit": "max attention logit",
    "on_fraction": "|C|² / |D|²",
}
LOG_SCALED = {"sigma_q", "max_logit"}


def apply() -> None:
    """Set the style; text becomes paths, so that it looks the same everywhere, and neither dates nor random ids enter the
    files.
    """
    sns.set_theme(
        context="paper",
        style="ticks",
        rc={
            "font.family": "sans-serif",
            "font.sans-serif": ["DejaVu Sans"],
            "font.size": 8.5,
            "axes.titlesize": 9,
            "axes.titleweight": "bold",
            "axes.titlelocation": "left",
            "axes.labelsize": 8.5,
            "axes.labelcolor": INK,
            "axes.edgecolor": MUTED,
            "axes.linewidth": 0.6,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "xtick.color": MUTED,
            "ytick.color": MUTED,
            "xtick.labelcolor": INK,
            "ytick.labelcolor": INK,
            "xtick.labelsize": 7.5,
            "ytick.labelsize": 7.5,
            "xtick.major.width": 0.6,
            "ytick.major.width": 0.6,
            "xtick.major.size": 3,
            "ytick.major.size": 3,
            "xtick.minor.size": 0,
            "ytick.minor.size": 0,
            "text.color": INK,
            "legend.frameon": False,
            "figure.facecolor": "white",
            "savefig.facecolor": "white",
            "svg.hashsalt": "qkpipe",
            "svg.fonttype": "path",
        },
    )


def group_colours(groups: Iterable[str]) -> dict[str, str]:
    """Colour of every arm group, by order of appearance."""
    names = list(dict.fromkeys(groups))
    return {name: PALETTE[position % len(PALETTE)] for position, name in enumerate(names)}


def leading(arms: pd.DataFrame) -> pd.DataFrame:
    """Rows of ``dissociation`` for the arms that the study leads with, or all where it names none (or has none of them yet):
    a figure of one panel an arm cannot show hundreds.
    """
    named = arms[arms["headline"].astype(bool)]
    return named if len(named) else arms


def draw_seeds(
    ax: Axes, curves: pd.DataFrame, column: str, colour: str, label: str | None = None, zorder: float = 2
) -> None:
    """Every seed as a thin line, their median (where all seeds still have a value) as a thick one."""
    wide = curves.pivot(index="step", columns="seed", values=column).astype(float)
    wide = wide.where(np.isfinite(wide)).interpolate(limit_area="inside")
    if wide.dropna(how="all").empty:
        return
    for seed in wide:
        ax.plot(wide.index, wide[seed], color=colour, linewidth=0.7, alpha=0.55, zorder=zorder)
    median = wide.dropna().median(axis=1)
    ax.plot(
        median.index,
        median,
        color=colour,
        linewidth=1.7,
        label=label,
        zorder=zorder + 1,
        solid_capstyle="round",
    )


def mark_events(
    ax: Axes,
    run: pd.DataFrame,
    column: str,
    collapse_step: float | None,
    fire_step: float | None,
    colour: str,
) -> None:
    """A red cross where one run's curve collapses, a triangle where its trigger fires."""
    known = run.dropna(subset=[column]).sort_values("step")
    for step, marker, edge, face in (
        (collapse_step, "x", COLLAPSE, COLLAPSE),
        (fire_step, "v", "white", colour),
    ):
        if known.empty or step is None or pd.isna(step):
            continue
        height = float(np.interp(step, known["step"], known[column]))
        shape = {
            "marker": marker,
            "s": 26 if marker == "x" else 34,
            "linewidths": 1.4 if marker == "x" else 0.8,
        }
        style = {"color": edge} if marker == "x" else {"facecolor": face, "edgecolor": edge}
        ax.scatter([step], [height], zorder=5, clip_on=False, **shape, **style)


def arm_colours(shown: Iterable[str], references: Iterable[str]) -> dict[str, str]:
    """References in greys, drawn first; the arms that a figure is about in colours."""
    greys = ("#a9b1ba", "#57606a", "#c9b79c")
    return {arm: greys[i % len(greys)] for i, arm in enumerate(references)} | group_colours(shown)


def legend_below(figure: Figure, ax: Axes) -> None:
    """One legend for the whole figure, under it."""
    handles, labels = ax.get_legend_handles_labels()
    if handles:
        figure.legend(
            handles,
            labels,
            loc="upper center",
            bbox_to_anchor=(0.5, 0.045),
            ncols=min(len(labels), 3),
            fontsize=8,
        )


def label_axis(ax: Axes, column: str, title: bool = False) -> None:
    """Name a measure's axis (or its panel) and scale it."""
    (ax.set_title if title else ax.set_ylabel)(LABELS[column])
    if column in LOG_SCALED:
        ax.set_yscale("log")
        low, high = ax.get_ylim()
        subs = (1.0, 3.0) if high / low < 1e3 else (1.0,)
        ax.yaxis.set_major_locator(matplotlib.ticker.LogLocator(subs=subs, numticks=5))
        ax.yaxis.set_major_formatter(plain_log_ticks())
        ax.yaxis.set_minor_formatter(matplotlib.ticker.NullFormatter())
    ax.grid(axis="y", color=RULE, linewidth=0.5, zorder=0)
    ax.set_axisbelow(True)


def logarithmic(ax: Axes, *sides: str) -> None:
    """Scale the axes ``x``, ``y`` by the logarithm, where there is something positive to show."""
    for side in sides:
        if np.isfinite(ax.dataLim.minpos["xy".index(side)]):
            getattr(ax, f"set_{side}scale")("log")
            getattr(ax, f"{side}axis").set_major_formatter(plain_log_ticks())


def plain_log_ticks() -> matplotlib.ticker.Formatter:
    return matplotlib.ticker.FuncFormatter(
        lambda value, _: f"{value:g}" if 1e-3 <= value < 1e5 else f"{value:.0e}"
    )


def save(figure: Figure, paths: Iterable[Path]) -> list[Path]:
    """Write the figure to every path (the suffix says how: svg or png) and close it."""
    written = []
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.tmp")
        metadata = {"Date": None, "Creator": None} if path.suffix == ".svg" else {"Software": None}
        figure.savefig(
            temporary,
            format=path.suffix[1:],
            dpi=170,
            bbox_inches="tight",
            pad_inches=0.08,
            metadata=metadata,
        )
        temporary.replace(path)
        written.append(path)
    plt.close(figure)
    return written
