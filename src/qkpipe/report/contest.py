"""The contest of monitors: ROC, lead at the same false-alarm rate, and faults told from hot runs."""

from __future__ import annotations

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from qkpipe.paths import StudyPaths
from qkpipe.report import style
from qkpipe.report.forest import empty, ranges
from qkpipe.store.parquet import read_table

LABEL = "Monitors"
TABLES = ("contest", "contest_roc")
QUERY = (
    "SELECT monitor, rank, false_alarms_k, false_alarms_n, detected_k, detected_n, lead_median FROM contest"
)
CAPTION = (
    "Monitors, the setting with most collapsed runs. From left: the ROC by peak, collapsed runs of numerical faults "
    "against healthy runs that set no threshold; the lead from the alarm to the collapse at a nominal 10% of false "
    "alarms (median, 95% bootstrap interval over seeds); false alarms on other healthy runs with exact intervals (the "
    "line is 10%); and the chance that a fault outscores a stressed run without any numerical error."
)
NAMES = {
    "max_logit": "max logit",
    "sigma_q": "σ(W_Q)",
    "sigma_growth": "σ growth",
    "sigma_qk": "σ(W_Q'W_K)",
    "entropy_min": "entropy",
    "grad_norm": "gradient norm",
    "loss_z": "loss z-score",
    "update_coherence": "update coherence",
    "spectral_alignment": "spectral alignment",
    "residual_r": "residual r",
}


def figure(paths: StudyPaths) -> Figure:
    """Drawn from ``contest`` and ``contest_roc``."""
    table = read_table(paths.analysis("contest")).to_pandas()
    if table.empty:
        return empty("No setting has collapsed runs and healthy runs that set no threshold.")
    own = next(group for _, group in sorted(
        table.groupby(["model", "optimizer"], sort=False), key=lambda item: -item[1]["detected_n"].max()
    ))  # fmt: skip
    roc = read_table(paths.analysis("contest_roc")).to_pandas()
    roc = roc[(roc["model"] == own["model"].iloc[0]) & (roc["optimizer"] == own["optimizer"].iloc[0])]
    fig, axes = plt.subplots(
        1, 4, figsize=(8.6, 3.4), gridspec_kw={"wspace": 0.14, "width_ratios": (1.25, 1, 1, 1)}
    )
    palette = (*style.PALETTE, "#1f2328", "#8c959f")
    colours = dict(zip(NAMES, palette, strict=True))
    for monitor, points in roc.groupby("monitor", sort=False):
        axes[0].plot(
            points["false_alarm_rate"], points["detection_rate"], color=colours[monitor], linewidth=1.3
        )
    axes[0].plot([0, 1], [0, 1], color=style.RULE, linewidth=0.8, zorder=0)
    axes[0].set_xlabel("false alarms")
    axes[0].set_title("doomed runs detected")
    row_colours = [colours[name] for name in own["monitor"]]
    ranges(axes[1], own["lead_median"], own["lead_low"], own["lead_high"], row_colours)
    axes[1].set_title("lead (steps)")
    rate = own["false_alarms_k"] / own["false_alarms_n"]
    ranges(axes[2], rate, own["false_alarms_low"], own["false_alarms_high"], row_colours)
    axes[2].axvline(0.1, color=style.MUTED, linewidth=0.8)
    axes[2].set_title("false alarms")
    ranges(axes[3], own["auc_stressor_value"], own["auc_stressor_low"], own["auc_stressor_high"], row_colours)
    axes[3].axvline(0.5, color=style.MUTED, linewidth=0.8)
    axes[3].set_title("fault over stressor")
    axes[3].set_xlim(-0.05, 1.05)
    for ax in axes[1:]:
        ax.set_ylim(len(own) - 0.5, -0.5)
        ax.set_yticks([])
        ax.grid(axis="x", color=style.RULE, linewidth=0.5)
    axes[3].yaxis.tick_right()
    axes[3].set_yticks(range(len(own)), [NAMES[name] for name in own["monitor"]], fontsize=7.5)
    axes[3].tick_params(axis="y", length=0)
    for tick, colour in zip(axes[3].get_yticklabels(), row_colours):
        tick.set_color(colour)
    return fig
