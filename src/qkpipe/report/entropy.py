"""Which moves first: onsets of the signals on one clock, and attention entropy against logits, head by head."""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure

from qkpipe.paths import StudyPaths
from qkpipe.report import style
from qkpipe.report.forest import empty
from qkpipe.store.parquet import read_table

LABEL = "Entropy"
TABLES = ("onsets", "entropy_heads")
QUERY = "SELECT arm, seed, signal, onset_step, collapse_step, lead_steps FROM onsets ORDER BY ALL"
CAPTION = (
    "Left: when each signal leaves, for good, what healthy runs of the same setting show, in steps before the "
    "collapse of the same run; a line is a run, black marks are medians. Right: mean attention entropy of a head "
    "against its largest logit at about twelve looks, runs that collapse beside their healthy twins."
)
NAMES = {
    "residual_r": "residual r",
    "sigma_q": "σ(W_Q)",
    "sigma_qk": "σ(W_Q'W_K)",
    "max_logit_raw": "max logit",
    "entropy_min": "entropy",
    "loss": "loss",
}


def figure(paths: StudyPaths) -> Figure:
    """Drawn from ``onsets`` and ``entropy_heads``."""
    onsets = read_table(paths.analysis("onsets")).to_pandas()
    heads = read_table(paths.analysis("entropy_heads")).to_pandas()
    if onsets.empty:
        return empty("No run collapsed in a setting with two healthy runs or more.")
    fig, (left, right) = plt.subplots(1, 2, figsize=(8.6, 3.2), gridspec_kw={"wspace": 0.25})
    wide = onsets.pivot(index="run_id", columns="signal", values="lead_steps").astype(float)
    order = wide.median().sort_values(ascending=False).index
    arms = onsets.drop_duplicates("run_id").set_index("run_id")["arm"]
    colours = style.group_colours(arms)
    for run, lead in wide[order].iterrows():
        left.plot(
            -lead,
            range(len(order)),
            "-o",
            color=colours[arms[run]],
            alpha=0.45,
            linewidth=0.7,
            markersize=2.6,
        )
    left.plot(-wide[order].median(), range(len(order)), "D", color=style.INK, markersize=5, zorder=4)
    left.set_yticks(range(len(order)), [NAMES[name] for name in order])
    left.invert_yaxis()
    left.axvline(0, color=style.COLLAPSE, linewidth=0.9)
    left.set_xlabel("onset, steps from the collapse")
    for role, colour, label in (
        ("twin", "#a9b1ba", "healthy twin"),
        ("doomed", style.PALETTE[1], "collapses"),
    ):
        own = heads[
            (heads["role"] == role) & np.isfinite(heads["max_logit"].astype(float)) & (heads["max_logit"] > 0)
        ]
        right.scatter(own["max_logit"], own["entropy"], 5, color=colour, alpha=0.5, linewidths=0, label=label)
    style.logarithmic(right, "x")
    right.set_xlabel("largest logit of the head")
    right.set_ylabel("attention entropy (nat)")
    right.legend(fontsize=7.5, markerscale=2)
    return fig
