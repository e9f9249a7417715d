"""Every threshold the guard could have had: false firings on healthy runs, warning before a collapse, and transfer.

Counterfactual and exact: a guard is dormant until it fires, so what an unguarded run's logits cross first is when a guard
with that threshold would have fired in it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from qkpipe.analysis.frames import doomed, healthy, read_frame, study_runs, usual, write_frame
from qkpipe.analysis.statistics import clopper_pearson
from qkpipe.config import Study
from qkpipe.config.models import PAPER_TAU
from qkpipe.paths import StudyPaths

OUTPUTS = ("threshold_sweep", "threshold_transfer")

GRID = tuple(float(round(x, 2)) for x in np.geomspace(5, 500, 25))

RATES = [
    *((f"{kind}_{part}", pa.int64()) for kind in ("healthy", "doomed") for part in ("n", "fired")),
    *((f"{kind}_{part}", pa.float64()) for kind in ("healthy", "doomed") for part in ("low", "high")),
    *((f"lead_{part}", pa.float64()) for part in ("median", "min", "max")),
]

SWEEP = pa.schema(
    [
        ("model", pa.string()),
        ("optimizer", pa.string()),
        ("threshold", pa.float64()),
        *RATES,
        ("guarded_n", pa.int64()),
        ("guarded_contained", pa.int64()),
    ]
)
"""One row a setting and threshold. ``healthy_fired`` of ``healthy_n`` healthy runs would have fired (a false activation);
``doomed_fired`` of ``doomed_n`` before their collapse, ``lead``: steps from there to the collapse. Intervals are exact at
95%. ``guarded``: runs that really had a guard at this threshold, and those of them that did not collapse.
"""

TRANSFER = pa.schema(
    [
        ("model", pa.string()),
        ("calibrated_on", pa.string()),
        ("calibration_runs", pa.int64()),
        ("threshold", pa.float64()),
        *RATES,
    ]
)
"""One row an architecture: the largest logit of the healthy runs of every *other* architecture as its threshold, all
trained by the study's own optimizer.
"""


def build(paths: StudyPaths, study: Study) -> list[Path]:
    """Write ``threshold_sweep`` and ``threshold_transfer`` from ``runs`` and ``signals``; returns the files."""
    runs = usual(study_runs(paths), "steps_planned", "tokenizer")
    signals = read_frame(paths, "signals")
    return [
        write_frame(paths.analysis("threshold_sweep"), sweep(runs, signals, study.tau), SWEEP),
        write_frame(
            paths.analysis("threshold_transfer"), transfer(usual(runs, "optimizer"), signals), TRANSFER
        ),
    ]


def sweep(runs: pd.DataFrame, signals: pd.DataFrame, tau: float) -> list[dict[str, Any]]:
    """Rows of ``SWEEP``: a grid, the paper's threshold, the study's own, and those that runs were guarded with."""
    rows = []
    for (model, optimizer), own in runs.groupby(["model", "optimizer"], sort=False):
        if not (healthy(own).any() and doomed(own).any()):
            continue
        guarded = own[own["correction"] == "guard"]
        used = set(guarded["threshold"].dropna())
        for threshold in sorted({*GRID, PAPER_TAU, tau, *used}):
            same = guarded[np.isclose(guarded["threshold"].astype(float), threshold)]
            rows.append(
                {"model": model, "optimizer": optimizer, "threshold": threshold}
                | rates(own, signals, threshold)
                | {"guarded_n": len(same), "guarded_contained": int((~same["collapsed"].astype(bool)).sum())}
            )
    return rows


def transfer(runs: pd.DataFrame, signals: pd.DataFrame) -> list[dict[str, Any]]:
    """Rows of ``TRANSFER``; needs two architectures with healthy runs."""
    calm = runs[healthy(runs)]
    peaks = signals[signals["run_id"].isin(calm["run_id"])].groupby("run_id")["max_logit"].max()
    rows = []
    for model in calm["model"].unique():
        others = calm[calm["model"] != model]
        if others.empty:
            continue
        threshold = float(peaks[others["run_id"]].max())
        rows.append(
            {
                "model": model,
                "calibrated_on": ", ".join(dict.fromkeys(others["model"])),
                "calibration_runs": len(others),
                "threshold": threshold,
            }
            | rates(runs[runs["model"] == model], signals, threshold)
        )
    return rows


def rates(runs: pd.DataFrame, signals: pd.DataFrame, threshold: float) -> dict[str, Any]:
    """What a guard at ``threshold`` would have done in the unguarded runs."""
    row: dict[str, Any] = {}
    crossed = signals[signals["max_logit"] > threshold].groupby("run_id")["step"].min()
    for kind, chosen in (("healthy", runs[healthy(runs)]), ("doomed", runs[doomed(runs)])):
        fired = crossed.reindex(chosen["run_id"]).to_numpy(float)
        if kind == "doomed":
            lead = chosen["collapse_step"].to_numpy(float) - fired
            fired = np.where(lead > 0, fired, np.nan)
            known = lead[lead > 0]
            for part in ("median", "min", "max"):
                row[f"lead_{part}"] = float(getattr(np, part)(known)) if len(known) else None
        k, n = int(np.isfinite(fired).sum()), len(chosen)
        low, high = clopper_pearson(k, n)
        row |= {f"{kind}_n": n, f"{kind}_fired": k, f"{kind}_low": low, f"{kind}_high": high}
    return row
