"""Figure 2's controls: k and side swept, other directions, late start, isotropic shrinking, the healthy twin."""

from __future__ import annotations

from matplotlib.figure import Figure

from qkpipe.paths import StudyPaths
from qkpipe.report import style
from qkpipe.report.forest import empty, forest
from qkpipe.store.parquet import read_table

LABEL = "Figure 2, controls"
TABLES = ("probe_controls",)
QUERY = "SELECT arm, control, k, side, n, collapsed, log_sigma_ratio_median FROM probe_controls"
CAPTION = (
    "The causal probe and its controls: share of runs that collapsed with its exact 95% interval, the log ratio of "
    "the final σ(W_Q) to the same seed without the probe, and the share of the update's energy that was taken out "
    "(medians over seeds with the smallest and largest)."
)


def figure(paths: StudyPaths) -> Figure:
    """Drawn from ``probe_controls`` alone."""
    table = read_table(paths.analysis("probe_controls")).to_pandas()
    if table.empty:
        return empty("No probed run.")
    table = table.sort_values(["control", "action", "directions", "side", "k"], kind="stable")
    labels = [
        f"{row.arm}: {row.action.replace('_', ' ')}, k={row.k}, {row.side.replace('_', '-')}"
        + (f", from {row.start_step}" if row.start_step else "")
        for row in table.itertuples()
    ]
    palette = style.group_colours(table["action"])
    columns = {
        "collapsed": "collapsed",
        "log_sigma_ratio": "log σ(W_Q) over unprobed",
        "removed_fraction": "energy removed",
    }
    return forest(table, labels, columns, [palette[a] for a in table["action"]], {"log_sigma_ratio": 0})
