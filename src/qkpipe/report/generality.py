"""Table 2 and Table S1 drawn: source x correction, one panel a model and optimizer."""

from __future__ import annotations

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure

from qkpipe.paths import StudyPaths
from qkpipe.report import style
from qkpipe.report.forest import empty
from qkpipe.store.parquet import read_table

LABEL = "Table 2 and Table S1, drawn"
TABLES = ("factorial",)
QUERY = (
    "SELECT source, correction, model, optimizer, tokenizer, status, collapsed, n FROM factorial ORDER BY ALL"
)
CAPTION = (
    "Source x correction, a panel for each model, optimizer and tokenizer: runs that collapsed of those there are, "
    "red where all did. n/a: the correction cannot change a bit of such a run (a clean splice away from the fault's "
    "route). A dot: not run. Where there are more corrections or sources than fit, those that were run with one alone are in "
    "the table only."
)
FIT = {"correction": 14, "source": 24}
"""Columns and rows of a panel that are still legible."""
MAP = LinearSegmentedColormap.from_list("share", ["#e6f4ea", "#fdf3dc", "#f4b8b1"])


def figure(paths: StudyPaths) -> Figure:
    """Drawn from ``factorial`` alone; the panel of the study's own setting first."""
    table = read_table(paths.analysis("factorial")).to_pandas()
    if table.empty:
        return empty("No run without a probe.")
    panels = [
        (name, crossed(own)) for name, own in table.groupby(["model", "optimizer", "tokenizer"], sort=False)
    ]
    panels.sort(key=lambda panel: -panel[1]["n"].sum())
    sizes = [own["source"].nunique() for _, own in panels]
    fig, axes = plt.subplots(
        len(panels), 1, figsize=(8.6, sum(sizes) * 0.26 + 1.55 * len(panels)), squeeze=False,
        gridspec_kw={"height_ratios": sizes, "hspace": 1.5 / (sum(sizes) / len(sizes) * 0.26)},
    )  # fmt: skip
    for ax, (setting, own) in zip(axes[:, 0], panels, strict=True):
        _panel(ax, own)
        ax.set_title(", ".join(setting))
    return fig


def crossed(panel: pd.DataFrame) -> pd.DataFrame:
    """Of a panel with too many corrections or sources, those that meet more than one of the other."""
    for side, other in (("correction", "source"), ("source", "correction")):
        if panel[side].nunique() > FIT[side]:
            met = panel[panel["status"] == "run"].groupby(side)[other].nunique()
            panel = panel[panel[side].isin(met.index[met > 1])]
    return panel


def _panel(ax: Axes, table: pd.DataFrame) -> None:
    sources, corrections = list(dict.fromkeys(table["source"])), list(dict.fromkeys(table["correction"]))
    for row in table.itertuples():
        y, x = sources.index(row.source), corrections.index(row.correction)
        if row.status == "run":
            ax.add_patch(
                plt.Rectangle((x - 0.48, y - 0.45), 0.96, 0.9, color=MAP(row.collapsed / row.n), linewidth=0)
            )
        text = (
            f"{row.collapsed:.0f}/{row.n:.0f}"
            if row.status == "run"
            else "n/a"
            if row.status == "not applicable"
            else "·"
        )
        ax.text(
            x,
            y,
            text,
            ha="center",
            va="center",
            fontsize=6.8,
            color=style.INK if row.status == "run" else style.MUTED,
        )
    ax.set_xticks(range(len(corrections)), corrections, rotation=28, ha="right", fontsize=6.8)
    ax.set_yticks(range(len(sources)), sources, fontsize=6.8)
    ax.set_xlim(-0.5, max(len(corrections), 8) - 0.5)
    ax.set_ylim(len(sources) - 0.5, -0.5)
    ax.tick_params(length=0)
    for side in ax.spines.values():
        side.set_visible(False)
