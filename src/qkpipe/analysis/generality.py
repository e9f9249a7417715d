"""Source x correction by architecture, optimizer and tokenizer: the factorial of Table 2, and its generality (Table S1).

A cell is *not applicable* where the correction cannot change a bit: a clean splice on routes that a weight-gradient fault
does not touch, attention being clean. Such a cell is named, so that its absence is no gap.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from qkpipe.analysis.frames import (
    COUNTED,
    counted,
    median_known,
    paired_log_ratio,
    spread,
    spread_columns,
    study_runs,
    usual,
    watched,
    write_frame,
)
from qkpipe.analysis.settings import NONE
from qkpipe.config import Study
from qkpipe.paths import StudyPaths

OUTPUTS = ("factorial", "generality")

UNIONS = {"vo": {"value", "proj"}, "all": {"qk", "value", "proj", "mlp"}}
CELL = ("source", "correction", "model", "optimizer", "tokenizer")
MEASURES = ("log_sigma", "log_logit", "final_val_loss", "log_sigma_twin")

FACTORIAL = pa.schema(
    [
        *((name, pa.string()) for name in (*CELL, "status", "arms")),
        ("bounded", pa.bool_()),
        *COUNTED,
        ("fired", pa.int64()),
        ("median_collapse_step", pa.float64()),
        *spread_columns(*MEASURES),
    ]
)
"""One row a cell. ``correction``: as the run's label has it (with routes and thresholds). ``status``: ``run``, ``not
applicable``, or ``missing`` (the source and the correction are both run on this model, not together). ``bounded``: a
normalisation caps the logit. ``log_sigma_twin``: log ratio of the final sigma(W_Q) to the twin's.
"""

GENERALITY = FACTORIAL
"""The same, its rows being the uncorrected and QK-corrected runs by setting: what the study's own model says, and the
others.
"""


def build(paths: StudyPaths, study: Study) -> list[Path]:
    """Write ``factorial`` and ``generality`` from ``runs``; returns the files."""
    runs = study_runs(paths)
    table = cells(runs, study)
    return [
        write_frame(paths.analysis("factorial"), table, FACTORIAL),
        write_frame(paths.analysis("generality"), across_settings(table), GENERALITY),
    ]


def cells(runs: pd.DataFrame, study: Study) -> list[dict[str, Any]]:
    """Rows of ``FACTORIAL``: all probe-free runs of the study's horizon, then the cells that were not run."""
    shown = usual(runs[runs["probe_action"].isna() & ~watched(runs)], "accumulation", "steps_planned").copy()
    shown["kinds"], shown["correction"] = shown["correction"], shown["intervention"]
    shown["log_sigma"] = np.log(shown["final_sigma_q"].astype(float))
    shown["log_logit"] = np.log(shown["peak_logit"].astype(float))
    shown["log_sigma_twin"] = paired_log_ratio(shown, runs, "final_sigma_q", lambda arm: study.arms[arm].twin)
    rows, seen = [], set()
    for key, own in shown.groupby(list(CELL), sort=False):
        seen.add(key)
        row = dict(zip(CELL, key)) | {"status": "run", "arms": ", ".join(dict.fromkeys(own["arm"]))}
        row["bounded"] = any("qk_norm" in kinds or "guard" in kinds for kinds in own["kinds"])
        row |= counted(own) | {
            "fired": int(own["fire_step"].notna().sum()),
            "median_collapse_step": median_known(own["collapse_step"]),
        }
        for name in MEASURES:
            row |= spread(own[name], name)
        rows.append(row)
    return rows + _absent(shown, seen)


def _absent(shown: pd.DataFrame, seen: set[tuple[str, ...]]) -> list[dict[str, Any]]:
    rows = []
    faulty = shown[shown["source"] != NONE]
    for setting, own in faulty.groupby(list(CELL[2:]), sort=False):
        sources = own.drop_duplicates("source").set_index("source")["route"]
        corrections = [name for name in own["correction"].unique() if "repair" not in name]
        for source, correction in product(sources.index, corrections):
            if (source, correction, *setting) in seen:
                continue
            status = "missing" if applicable(sources[source], correction) else "not applicable"
            rows.append(dict(zip(CELL, (source, correction, *setting))) | {"status": status})
    return rows


def applicable(route: str, correction: str) -> bool:
    """Whether ``correction`` can change a bit of a run whose fault lies on ``route`` (``attention``: on every route)."""
    if not correction.startswith("splice(") or "+splice" in correction or not correction.endswith(")"):
        return True
    if route in ("attention", NONE):
        return True
    return bool(_routes(route) & _routes(correction[len("splice(") : -1]))


def _routes(text: str) -> set[str]:
    return {route for name in text.split("+") for route in UNIONS.get(name, {name})}


def across_settings(table: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The cells that were run, of every source that was run in more than one setting, source by source."""
    ran = [row for row in table if row["status"] == "run"]
    settings: dict[str, set[tuple[str, ...]]] = {}
    for row in ran:
        settings.setdefault(row["source"], set()).add(tuple(row[name] for name in CELL[2:]))
    shared = [row for row in ran if len(settings[row["source"]]) > 1]
    return sorted(shared, key=lambda row: tuple(row[name] for name in CELL))
