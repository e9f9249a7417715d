"""Table 1 drawn, isolation: which quantity's precision makes or repairs the collapse, and the dose-response."""

from __future__ import annotations

from matplotlib.figure import Figure

from qkpipe.analysis.settings import EVERY, NONE
from qkpipe.paths import StudyPaths
from qkpipe.report import style
from qkpipe.report.forest import empty, forest
from qkpipe.store.parquet import read_table

LABEL = "Table 1, drawn"
TABLES = ("isolation",)
QUERY = "SELECT question, what, bits, tile, rounding, n, collapsed, log_sigma_median, residual_median FROM isolation"
CAPTION = (
    "Isolation. Each row is one setting of the streaming recurrence, attention being the only source: clean, only the "
    "named quantities rounded (makes), all but the named ones (repairs), all of them (dose), or all with a repair at "
    "the source. Share of runs that collapsed with its exact 95% interval; then medians over seeds with the smallest "
    "and largest: natural logs of the final σ(W_Q) and of the largest logit, and log10 of the early row-sum residual "
    "r."
)
QUESTIONS = ("clean", "makes", "repairs", "dose", "repair")


def figure(paths: StudyPaths) -> Figure:
    """Drawn from ``isolation`` alone."""
    import numpy as np

    table = read_table(paths.analysis("isolation")).to_pandas()
    if table.empty:
        return empty("No run with a fault of the recurrence alone.")
    for part in ("median", "min", "max"):
        values = table[f"residual_{part}"].astype(float)
        table[f"log_r_{part}"] = np.log10(values.where(values > 0))
    colours = dict(zip(QUESTIONS, ("#8c959f", *style.PALETTE)))
    labels = [describe(row) for row in table.itertuples()]
    columns = {
        "collapsed": "collapsed",
        "log_sigma": "log σ(W_Q)",
        "log_logit": "log max logit",
        "log_r": "log10 r",
    }
    return forest(table, labels, columns, [colours[question] for question in table["question"]])


def describe(row: object) -> str:
    """A row's setting in one line."""
    what = {"clean": "fp32", "dose": "all", "makes": f"only {row.what}", "repairs": f"all but {row.what}"}
    rounded = "only " + row.quantities if row.quantities not in (EVERY, NONE) else "all"
    parts = [what.get(row.question, f"{rounded}, {row.what}")]
    parts += [part for part in row.source.split("-") if part.startswith(("ring", "io("))]
    if row.bits == row.bits:  # not NaN
        parts.append(f"m={row.bits:.0f}")
    parts.append(f"tile {row.tile:.0f}")
    if row.rounding not in (None, "even"):
        parts.append(row.rounding.replace("_", " "))
    if row.attention_gain != 1:
        parts.append(f"gain {row.attention_gain:g}")
    return ", ".join(parts)
