"""How long each arm lasts: Kaplan and Meier's estimate of the share not yet collapsed, runs without a collapse being
censored.
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pyarrow as pa
from lifelines import KaplanMeierFitter

from qkpipe.analysis.frames import LEVEL, study_runs, write_frame
from qkpipe.config import Study
from qkpipe.paths import StudyPaths

OUTPUTS = ("survival",)

SURVIVAL = pa.schema(
    [
        ("arm", pa.string()),
        ("group", pa.string()),
        ("step", pa.int64()),
        *((name, pa.float64()) for name in ("survival", "low", "high")),
        *((name, pa.int64()) for name in ("at_risk", "collapsed", "n")),
    ]
)
"""One row a step at which the curve may change; the interval is the exponential Greenwood one at 95% (lifelines), null
where there is none. Arms with one collapse at least.
"""


def build(paths: StudyPaths, study: Study) -> list[Path]:
    """Write ``analysis/survival.parquet`` from ``runs``; returns the file."""
    return [write_frame(paths.analysis("survival"), survival(study_runs(paths)), SURVIVAL)]


def durations(runs: pd.DataFrame) -> pd.Series:
    """Steps to the collapse, else the steps trained: an excursion opened too late to be judged is no collapse."""
    return (
        runs["collapse_step"]
        .astype(float)
        .where(runs["collapsed"].astype(bool), runs["steps_done"])
        .clip(lower=1)
    )


def survival(runs: pd.DataFrame) -> pd.DataFrame:
    """Rows of ``SURVIVAL``, in the config's order."""
    frames = []
    for arm, own in runs.groupby("arm", sort=False):
        if not own["collapsed"].any():
            continue
        fitted = KaplanMeierFitter(alpha=1 - LEVEL).fit(durations(own), own["collapsed"])
        interval = fitted.confidence_interval_survival_function_
        table = fitted.event_table
        frames.append(
            pd.DataFrame(
                {
                    "arm": arm,
                    "group": own["group"].iloc[0],
                    "step": table.index.astype(int),
                    "survival": fitted.survival_function_.iloc[:, 0].to_numpy(),
                    "low": interval.iloc[:, 0].to_numpy(),
                    "high": interval.iloc[:, 1].to_numpy(),
                    "at_risk": table["at_risk"].to_numpy(),
                    "collapsed": table["observed"].to_numpy(),
                    "n": len(own),
                }
            )
        )
    return pd.concat(frames) if frames else pd.DataFrame(columns=SURVIVAL.names)
