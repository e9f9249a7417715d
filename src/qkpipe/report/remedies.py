"""The contest of remedies: containment, loss against the healthy twin, and what each costs where nothing is wrong."""

from __future__ import annotations

from matplotlib.figure import Figure

from qkpipe.paths import StudyPaths
from qkpipe.report import style
from qkpipe.report.forest import empty, forest
from qkpipe.store.parquet import read_table

LABEL = "Remedies"
TABLES = ("remedies",)
QUERY = "SELECT remedy, collapsed, n, rescued, at_stake, healthy_fired, healthy_n, cost_median FROM remedies"
CAPTION = (
    "Remedies against the study's main fault and on its healthy twin: share of faulty runs that collapsed in spite of it, "
    "with the exact 95% interval; final validation loss less the healthy twin's, of faulty runs and of healthy ones under "
    "the remedy; and the time of a step over that without it (medians over seeds with the smallest and largest)."
)


def figure(paths: StudyPaths) -> Figure:
    """Drawn from ``remedies`` alone."""
    table = read_table(paths.analysis("remedies")).to_pandas()
    if table.empty:
        return empty("No run in which a remedy acts against a fault.")
    colours = style.group_colours(table["correction"])
    columns = {
        "collapsed": "collapsed",
        "loss_over_twin": "faulty: over twin",
        "healthy_loss_over_twin": "healthy: over twin",
        "cost": "time of a step, ratio",
    }
    reference = {"loss_over_twin": 0, "healthy_loss_over_twin": 0, "cost": 1}
    return forest(
        table, list(table["remedy"]), columns, [colours[name] for name in table["correction"]], reference
    )
