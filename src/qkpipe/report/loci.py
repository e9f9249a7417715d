"""Table 4 drawn: every correction against its source, where it acts, and what it costs."""

from __future__ import annotations

from matplotlib.figure import Figure

from qkpipe.paths import StudyPaths
from qkpipe.report import style
from qkpipe.report.forest import empty, forest
from qkpipe.store.parquet import read_table

LABEL = "Table 4, drawn"
TABLES = ("loci",)
QUERY = "SELECT arm, correction, unprotected, at_stake, rescued, fired, loss_over_twin_median, lead_median FROM loci"
CAPTION = (
    "Corrections and where they act: share of runs that collapsed with its exact 95% interval; final validation loss "
    "less that of the healthy twin of the same seed; the final σ(W_Q); and, for live triggers, the steps from the "
    "firing to the collapse of the same seed without it (medians over seeds with the smallest and largest)."
)


def figure(paths: StudyPaths) -> Figure:
    """Drawn from ``loci`` alone."""
    table = read_table(paths.analysis("loci")).to_pandas()
    if table.empty:
        return empty("No run in which something acts against a fault.")
    colours = style.group_colours(table["group"])
    columns = {
        "collapsed": "collapsed",
        "loss_over_twin": "loss over twin (nat)",
        "final_sigma_q": "final σ(W_Q)",
        "lead": "lead (steps)",
    }
    return forest(
        table, list(table["arm"]), columns, [colours[g] for g in table["group"]], {"loss_over_twin": 0}
    )
