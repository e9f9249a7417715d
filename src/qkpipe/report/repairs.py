"""Table 4 by precision: what every repair at the source does to the collapse, to r and to sigma(W_Q)."""

from __future__ import annotations

from matplotlib.figure import Figure

from qkpipe.paths import StudyPaths
from qkpipe.report import style
from qkpipe.report.forest import empty, forest
from qkpipe.store.parquet import read_table

LABEL = "Table 4, by precision"
TABLES = ("repairs",)
QUERY = "SELECT precision, repair, rescued, at_stake, rescued_low, rescued_high, log_residual_ratio_median FROM repairs"
CAPTION = (
    "Repairs at the source, a colour for each precision: share of repaired runs that collapsed with its exact 95% "
    "interval; log ratios of the early row-sum residual r and of the final σ(W_Q) to the unrepaired run of the same seed "
    "(below 0: less); and the final validation loss less that of the healthy twin (medians over seeds with the smallest "
    "and largest)."
)


def figure(paths: StudyPaths) -> Figure:
    """Drawn from ``repairs`` alone."""
    table = read_table(paths.analysis("repairs")).to_pandas()
    if table.empty:
        return empty("No run with a repair at the source beside the same run without it.")
    colours = style.group_colours(table["precision"])
    columns = {
        "collapsed": "collapsed",
        "log_residual_ratio": "log r ratio",
        "log_sigma_ratio": "log σ(W_Q) ratio",
        "loss_over_twin": "loss over twin (nat)",
    }
    labels = [f"{row.precision}: {row.repair}" for row in table.itertuples()]
    return forest(
        table,
        labels,
        columns,
        [colours[name] for name in table["precision"]],
        dict.fromkeys(list(columns)[1:], 0),
    )
