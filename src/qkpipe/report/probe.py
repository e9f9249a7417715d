"""Figure 2, causal probe: updates held off the leading singular directions of W_Q and W_K, or the same energy taken
elsewhere.
"""

from __future__ import annotations

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from qkpipe.analysis.regime import is_candidate
from qkpipe.paths import StudyPaths
from qkpipe.report import style
from qkpipe.store.parquet import read_table

LABEL = "Figure 2"
TABLES = ("probe_curves",)
QUERY = "SELECT arm, probe, seed, step, sigma_q, max_logit, loss, on_fraction FROM probe_curves ORDER BY ALL"
CAPTION = (
    "Causal probe: the update's component along the leading singular directions of W_Q and W_K is taken out (on target), or "
    "the same energy is taken from the rest (off target). Top left: the largest singular value of W_Q over layers; top right: "
    "the largest logit; bottom left: smoothed loss; bottom right: the part |C|²/|D|² of the update's energy that lies along "
    "these directions. Thin lines are seeds, thick ones medians; grey arms are what the probed ones are compared with."
)
MEASURES = ("sigma_q", "max_logit", "loss", "on_fraction")


def figure(paths: StudyPaths) -> Figure:
    """Drawn from ``probe_curves`` alone; references are grey (their own arms say which), probed arms coloured."""
    curves = read_table(paths.analysis("probe_curves")).to_pandas()
    curves = curves[~curves["arm"].map(is_candidate).astype(bool)]
    probes = curves.drop_duplicates("arm").set_index("arm")["probe"]
    colours = style.arm_colours(probes[probes != "none"].index, probes[probes == "none"].index)
    fig, axes = plt.subplots(
        2, 2, figsize=(8.6, 5.2), sharex=True, gridspec_kw={"hspace": 0.24, "wspace": 0.24}
    )
    for ax, measure in zip(axes.flat, MEASURES, strict=True):
        ax.margins(x=0.02)
        for arm, colour in colours.items():
            label = arm if probes[arm] == "none" else f"{arm}: {probes[arm]}"
            style.draw_seeds(ax, curves[curves["arm"] == arm], measure, colour, label)
        style.label_axis(ax, measure, title=True)
    for ax in axes[-1]:
        ax.set_xlabel("step")
    style.legend_below(fig, axes.flat[0])
    return fig
