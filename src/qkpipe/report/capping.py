"""Figure S1, capping: QK normalisation holds the applied logits, not sigma(W_Q)."""

from __future__ import annotations

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from qkpipe.paths import StudyPaths
from qkpipe.report import style
from qkpipe.report.forest import empty
from qkpipe.store.parquet import read_table

LABEL = "Figure S1"
TABLES = ("capping", "capping_curves")
QUERY = "SELECT arm, role, seed, step, max_logit, max_logit_raw, sigma_q FROM capping_curves ORDER BY ALL"
CAPTION = (
    "QK normalisation caps the logits, not σ(W_Q). From left: the largest logit as applied, the largest logit that "
    "the same weights would give without the normalisation, and the largest singular value of W_Q over layers. Thin "
    "lines are seeds, thick ones medians; grey arms are the same without the correction."
)
TITLES = {"max_logit": "applied logit", "max_logit_raw": "logit without normalisation", "sigma_q": "σ(W_Q)"}


def figure(paths: StudyPaths) -> Figure:
    """Drawn from ``capping_curves`` alone."""
    curves = read_table(paths.analysis("capping_curves")).to_pandas()
    if curves.empty:
        return empty("No run with QK normalisation on.")
    roles = curves.drop_duplicates("arm").set_index("arm")["role"]
    colours = style.arm_colours(roles[roles == "capped"].index, roles[roles == "uncapped"].index)
    fig, axes = plt.subplots(1, 3, figsize=(8.6, 2.8), sharex=True, gridspec_kw={"wspace": 0.28})
    for ax, (measure, title) in zip(axes, TITLES.items(), strict=True):
        for arm, colour in colours.items():
            style.draw_seeds(ax, curves[curves["arm"] == arm], measure, colour, arm)
        style.logarithmic(ax, "y")
        ax.set_title(title)
        ax.set_xlabel("step")
        ax.grid(axis="y", color=style.RULE, linewidth=0.5)
    style.legend_below(fig, axes[0])
    fig.subplots_adjust(bottom=0.24)
    return fig
