"""A fair contest of monitors: who warns earliest at the same rate of false alarms, and who can tell a numerical fault from
a hot run.

Every monitor is a number at each look of telemetry, and alarms at the first look, after the learning-rate warm-up, at which
it passes its threshold (entropy falls below it). The threshold is an order statistic of the peaks of healthy *tuning and
calibration* runs, the smallest that at most a tenth of them pass; false alarms are then counted on *other* healthy runs
(held-out and confirmatory seeds), and warnings on collapsed runs of numerical faults. A score is a run's peak: over its
whole length for a healthy run, up to its collapse for a doomed one. All is per setting (model, optimizer, tokenizer,
horizon), since a threshold belongs to one.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from scipy.stats import rankdata

from qkpipe.analysis.frames import (
    SETTING,
    bootstrap,
    doomed,
    healthy,
    read_frame,
    stressed,
    study_runs,
    uncorrected,
    usual,
    write_frame,
)
from qkpipe.analysis.signals import by_run
from qkpipe.analysis.statistics import clopper_pearson
from qkpipe.config import Study
from qkpipe.paths import StudyPaths

OUTPUTS = ("contest", "contest_runs", "contest_roc")

FALSE_ALARMS = 0.10
THRESHOLD_ROLES = ("tuning", "calibration")

MONITORS = {
    "max_logit": 1,
    "sigma_q": 1,
    "sigma_growth": 1,
    "sigma_qk": 1,
    "entropy_min": -1,
    "grad_norm": 1,
    "loss_z": 1,
    "update_coherence": 1,
    "spectral_alignment": 1,
    "residual_r": 1,
}
"""Column of ``signals`` -> the side on which it alarms."""

SHARES = ("false_alarms", "detected", "stressed", "drifting")

CONTEST = pa.schema(
    [
        *((name, pa.string()) for name in ("monitor", "model", "optimizer", "threshold_seeds")),
        ("threshold", pa.float64()),
        ("n_threshold", pa.int64()),
        *((f"{share}_{part}", pa.int64()) for share in SHARES for part in ("k", "n")),
        *((f"{share}_{part}", pa.float64()) for share in SHARES for part in ("low", "high")),
        *((f"lead_{part}", pa.float64()) for part in ("median", "low", "high", "min")),
        *(
            (f"{area}_{part}", pa.float64())
            for area in ("auc", "auc_early", "auc_stressor")
            for part in ("value", "low", "high")
        ),
        ("rank", pa.int64()),
    ]
)
"""One row a monitor and setting. ``false_alarms``: k of n other healthy runs; ``detected``: doomed runs that alarm before
their collapse; ``stressed``: runs of generic stressors, without any numerical error, that alarm; ``drifting``: healthy and
stressed runs that do not collapse, though their logits pass those of every run that made a threshold (exact intervals).
``lead``: steps from the alarm to the collapse over doomed runs, 0 where there was none in time; its interval, like the
areas', is a bootstrap over seeds. ``auc``: doomed against other healthy runs by peak; ``auc_early``: by the peak within
twice the warm-up; ``auc_stressor``: doomed against stressed runs. ``rank`` by median lead among the monitors of the setting
whose false alarms do not refute the nominal tenth.
"""

CONTEST_RUNS = pa.schema(
    [
        *(
            (name, pa.string())
            for name in ("run_id", "arm", "group", "model", "optimizer", "seed_role", "kind", "monitor")
        ),
        *((name, pa.int64()) for name in ("seed", "alarm_step", "collapse_step", "lead_steps")),
        *((name, pa.float64()) for name in ("score", "score_early", "threshold")),
        ("drifting", pa.bool_()),
    ]
)
"""One row a run and monitor; ``kind``: ``threshold`` (healthy, made it), ``healthy`` (the others), ``doomed``,
``stressed``. Scores are peaks on the side of the alarm (entropy: with a minus sign).
"""

CONTEST_ROC = pa.schema(
    [
        *((name, pa.string()) for name in ("monitor", "model", "optimizer")),
        *((name, pa.float64()) for name in ("threshold", "false_alarm_rate", "detection_rate")),
    ]
)
"""The ROC by peak, doomed against other healthy runs."""


def build(paths: StudyPaths, study: Study) -> list[Path]:
    """Write ``contest``, ``contest_runs``, ``contest_roc`` from ``runs`` and ``signals``; returns the files."""
    runs = usual(study_runs(paths), "steps_planned", "tokenizer")
    scored = score(runs, read_frame(paths, "signals"))
    return [
        write_frame(paths.analysis("contest"), contest(scored), CONTEST),
        write_frame(paths.analysis("contest_runs"), scored, CONTEST_RUNS),
        write_frame(paths.analysis("contest_roc"), roc(scored), CONTEST_ROC),
    ]


def kinds(runs: pd.DataFrame) -> pd.Series:
    """What a run is in the contest; null where it takes no part."""
    calm = healthy(runs)
    kind = pd.Series(None, runs.index, object)
    kind[calm & runs["seed_role"].isin(THRESHOLD_ROLES)] = "threshold"
    kind[calm & ~runs["seed_role"].isin(THRESHOLD_ROLES)] = "healthy"
    kind[doomed(runs)] = "doomed"
    kind[uncorrected(runs) & stressed(runs)] = "stressed"
    return kind


def score(runs: pd.DataFrame, signals: pd.DataFrame) -> pd.DataFrame:
    """Rows of ``CONTEST_RUNS``."""
    runs = runs.assign(kind=kinds(runs)).dropna(subset=["kind"])
    looks = by_run(signals, runs)
    looks = looks[looks["step"] >= looks["warmup"]]
    frames = []
    for _, setting in looks.groupby(list(SETTING), sort=False):
        ends = setting["collapse_step"].astype(float)
        before = setting[~((setting["kind"] == "doomed") & (setting["step"] >= ends))]
        drifting = drifters(runs, before)
        for monitor, side in MONITORS.items():
            values = side * before[monitor]
            known = before.assign(value=values).dropna(subset=["value"])
            if known.empty:
                continue
            peaks = known.groupby("run_id")["value"].max()
            early = known[known["step"] <= 2 * known["warmup"]].groupby("run_id")["value"].max()
            rows = runs[runs["run_id"].isin(peaks.index)].copy()
            rows["monitor"], rows["drifting"] = monitor, rows["run_id"].isin(drifting)
            rows["score"], rows["score_early"] = rows["run_id"].map(peaks), rows["run_id"].map(early)
            limit = threshold(rows.loc[rows["kind"] == "threshold", "score"])
            alarms = known[known["value"] > limit].groupby("run_id")["step"].min()
            rows["threshold"], rows["alarm_step"] = limit, rows["run_id"].map(alarms)
            rows["lead_steps"] = rows["collapse_step"].astype(float) - rows["alarm_step"]
            frames.append(rows)
    return pd.concat(frames) if frames else pd.DataFrame(columns=CONTEST_RUNS.names)


def drifters(runs: pd.DataFrame, looks: pd.DataFrame) -> set[str]:
    """Runs without a numerical error and without a collapse whose logits pass those of every run that made a threshold."""
    peaks = runs["run_id"].map(looks.groupby("run_id")["max_logit"].max())
    limit = peaks[runs["kind"] == "threshold"].max()
    calm = runs["kind"].isin(["healthy", "stressed"]) & ~runs["collapsed"].astype(bool)
    return set(runs.loc[calm & (peaks > limit), "run_id"])


def threshold(peaks: pd.Series) -> float:
    """The order statistic that a new exchangeable run passes with probability at most ``FALSE_ALARMS``; NaN for too few
    runs.
    """
    allowed = math.floor(FALSE_ALARMS * (len(peaks) + 1) + 1e-9)
    return float(peaks.sort_values(ascending=False).iloc[allowed - 1]) if allowed else math.nan


def contest(scored: pd.DataFrame) -> list[dict[str, Any]]:
    """Rows of ``CONTEST``, by setting and rank."""
    rows = []
    for (model, optimizer), setting in scored.groupby(["model", "optimizer"], sort=False):
        own = [_row(monitor, runs) for monitor, runs in setting.groupby("monitor", sort=False)]
        own = [row for row in own if row["detected_n"] and row["false_alarms_n"]]
        fair = [
            row for row in own if row["false_alarms_low"] <= FALSE_ALARMS and row["threshold"] is not None
        ]
        fair.sort(key=lambda row: (-row["lead_median"], -row["auc_value"]))
        for rank, row in enumerate(fair, 1):
            row["rank"] = rank
        own.sort(key=lambda row: row.get("rank", math.inf))
        rows += [row | {"model": model, "optimizer": optimizer} for row in own]
    return rows


def _row(monitor: str, runs: pd.DataFrame) -> dict[str, Any]:
    made, calm, fallen, hot = (
        runs[runs["kind"] == kind] for kind in ("threshold", "healthy", "doomed", "stressed")
    )
    limit = threshold(made["score"])
    row: dict[str, Any] = {
        "monitor": monitor,
        "threshold": None if math.isnan(limit) else limit * MONITORS[monitor],
    }
    row |= {"n_threshold": len(made), "threshold_seeds": ", ".join(map(str, sorted(set(made["seed"]))))}
    in_time = fallen["lead_steps"] > 0
    counts = {
        "false_alarms": calm["alarm_step"].notna(),
        "detected": in_time,
        "stressed": hot["alarm_step"].notna(),
        "drifting": runs.loc[runs["drifting"], "alarm_step"].notna(),
    }
    for share, hits in counts.items():
        low, high = clopper_pearson(int(hits.sum()), len(hits))
        row |= {
            f"{share}_k": int(hits.sum()),
            f"{share}_n": len(hits),
            f"{share}_low": low,
            f"{share}_high": high,
        }
    leads = fallen.assign(lead=fallen["lead_steps"].where(in_time, 0.0).astype(float))
    row["lead_median"] = leads["lead"].median()
    row["lead_min"] = leads["lead"].min()
    lead = leads["lead"].to_numpy()
    row["lead_low"], row["lead_high"] = bootstrap(leads["seed"], lambda rows: np.median(lead[rows]))
    for area, column, others in (
        ("auc", "score", calm),
        ("auc_early", "score_early", calm),
        ("auc_stressor", "score", hot),
    ):
        both = pd.concat([fallen, others]).dropna(subset=[column])
        score, doomed = both[column].to_numpy(float), (both["kind"] == "doomed").to_numpy()
        row[f"{area}_value"] = auc(score, doomed)
        if not math.isnan(row[f"{area}_value"]):
            row[f"{area}_low"], row[f"{area}_high"] = bootstrap(
                both["seed"], lambda rows, s=score, d=doomed: auc(s[rows], d[rows])
            )
    return row


def auc(score: np.ndarray, doomed: np.ndarray) -> float:
    """Chance that a doomed run's score is above another's, ties counting half; NaN without either."""
    n, m = int(doomed.sum()), int((~doomed).sum())
    if not n or not m:
        return math.nan
    ranks = rankdata(score)
    return float((ranks[doomed].sum() - n * (n + 1) / 2) / (n * m))


def roc(scored: pd.DataFrame) -> list[dict[str, Any]]:
    """Rows of ``CONTEST_ROC``: a point at every score, from (0, 0) to (1, 1)."""
    rows = []
    for (monitor, model, optimizer), runs in scored.groupby(["monitor", "model", "optimizer"], sort=False):
        calm = runs.loc[runs["kind"] == "healthy", "score"].to_numpy(float)
        fallen = runs.loc[runs["kind"] == "doomed", "score"].to_numpy(float)
        if not len(calm) or not len(fallen):
            continue
        for limit in [math.inf, *sorted({*calm, *fallen}, reverse=True), -math.inf]:
            rows.append(
                {
                    "monitor": monitor,
                    "model": model,
                    "optimizer": optimizer,
                    "threshold": limit,
                    "false_alarm_rate": float((calm >= limit).mean()) if limit < math.inf else 0.0,
                    "detection_rate": float((fallen >= limit).mean()) if limit < math.inf else 0.0,
                }
            )
    return rows
