"""How the number of collapses depends on the constants of the crash rule, arm by arm."""

from __future__ import annotations

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from qkpipe.paths import StudyPaths
from qkpipe.report import style
from qkpipe.report.forest import empty
from qkpipe.report.generality import MAP
from qkpipe.store.parquet import read_table

LABEL = "Sensitivity"
TABLES = ("sensitivity",)
QUERY = "SELECT rule, arm, n, collapsed, agree, median_collapse_step FROM sensitivity ORDER BY ALL"
CAPTION = (
    "Every run judged anew: collapsed runs of an arm by each rule, the primary one first, then it with one or two "
    "constants changed, and the paper's. Arms that no rule ever calls collapsed are left out."
)


def figure(paths: StudyPaths) -> Figure:
    """Drawn from ``sensitivity`` alone."""
    table = read_table(paths.analysis("sensitivity")).to_pandas()
    table = table[table.groupby("arm")["collapsed"].transform("max") > 0]
    if table.empty:
        return empty("No rule of the grid calls any run collapsed.")
    arms, rules = list(dict.fromkeys(table["arm"])), list(dict.fromkeys(table["rule"]))
    fig, ax = plt.subplots(figsize=(8.6, 1.3 + 0.26 * len(arms)))
    for row in table.itertuples():
        x, y = rules.index(row.rule), arms.index(row.arm)
        ax.add_patch(
            plt.Rectangle((x - 0.48, y - 0.45), 0.96, 0.9, color=MAP(row.collapsed / row.n), linewidth=0)
        )
        ax.text(x, y, f"{row.collapsed}/{row.n}", ha="center", va="center", fontsize=6.2)
    ax.set_xticks(range(len(rules)), rules, rotation=40, ha="right", fontsize=6.8)
    ax.set_yticks(range(len(arms)), arms, fontsize=7.2)
    ax.set_xlim(-0.5, len(rules) - 0.5)
    ax.set_ylim(len(arms) - 0.5, -0.5)
    ax.tick_params(length=0, labelcolor=style.INK)
    for side in ax.spines.values():
        side.set_visible(False)
    return fig
