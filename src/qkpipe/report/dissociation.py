"""Figure 1, dissociation: one row an arm, one column a measure; the faulty source stays on, the channel is or is not
closed.
"""

from __future__ import annotations

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from qkpipe.analysis.regime import is_candidate
from qkpipe.paths import StudyPaths
from qkpipe.report import style
from qkpipe.store.parquet import read_table

LABEL = "Figure 1"
TABLES = ("dissociation", "curves", "runs")
QUERY = "SELECT arm, seed, step, loss, sigma_q, max_logit FROM curves ORDER BY ALL"
CAPTION = (
    "The arms that the study leads with, each in a row (all are in the table): smoothed "
    "training loss, the largest singular value of W_Q over layers, and the largest "
    "attention logit as applied. Thin lines are seeds, the thick one their median; grey is the median of the arm's "
    "twin, which differs by the fault alone. Red crosses mark collapses (primary rule), triangles the step at which a "
    "trigger fired."
)
MEASURES = ("loss", "sigma_q", "max_logit")


def figure(paths: StudyPaths) -> Figure:
    """Drawn from ``dissociation``, ``curves`` and ``runs`` alone."""
    table = read_table(paths.analysis("dissociation")).to_pandas()
    arms = style.leading(table[~table["arm"].map(is_candidate).astype(bool)]).to_dict("records")
    curves = read_table(paths.analysis("curves")).to_pandas()
    runs = read_table(paths.analysis("runs")).to_pandas()
    colours = style.group_colours(arm["group"] for arm in arms)
    fig, axes = plt.subplots(
        max(len(arms), 1),
        len(MEASURES),
        figsize=(8.6, 0.6 + 0.86 * max(len(arms), 1)),
        sharex=True,
        sharey="col",
        squeeze=False,
        gridspec_kw={"hspace": 0.22, "wspace": 0.2},
    )
    for row, arm in zip(axes, arms, strict=False):
        _label(row[0], arm, colours[arm["group"]])
        for ax, measure in zip(row, MEASURES, strict=True):
            _panel(ax, arm, measure, curves, runs, colours[arm["group"]])
    for ax, measure in zip(axes[0], MEASURES, strict=True):
        ax.set_title(style.LABELS[measure], pad=8)
    for ax in axes[-1]:
        ax.set_xlabel("step")
    return fig


def _panel(ax: Axes, arm: dict, measure: str, curves: pd.DataFrame, runs: pd.DataFrame, colour: str) -> None:
    ax.margins(x=0.02)
    if arm["twin"] is not None:
        twin = curves[curves["arm"] == arm["twin"]].groupby("step")[measure].median().dropna()
        ax.plot(twin.index, twin, color="#a9b1ba", linewidth=1.2, zorder=1)
    own = curves[curves["arm"] == arm["arm"]]
    style.draw_seeds(ax, own, measure, colour)
    for run in runs[runs["arm"] == arm["arm"]].itertuples():
        style.mark_events(ax, own[own["seed"] == run.seed], measure, run.collapse_step, run.fire_step, colour)
    style.label_axis(ax, measure)
    ax.set_ylabel("")


def _label(ax: Axes, arm: dict, colour: str) -> None:
    ax.annotate(
        arm["arm"],
        (0, 0.62),
        xytext=(-128, 0),
        xycoords="axes fraction",
        textcoords="offset points",
        fontweight="bold",
        color=colour,
    )
    fired = f", {arm['fired']} fired" if arm["fired"] else ""
    verdict = f"{arm['collapsed']}/{arm['n']} collapsed{fired}"
    ax.annotate(
        verdict,
        (0, 0.30),
        xytext=(-128, 0),
        xycoords="axes fraction",
        textcoords="offset points",
        fontsize=7.5,
        color=style.COLLAPSE if arm["collapsed"] else style.MUTED,
    )
