"""Which moves first: attention entropy, the logits, sigma(W_Q), the row-sum residual or the loss, on one clock.

A signal has left health at the first look from which it stays, for ``PERSIST`` looks, outside everything that the healthy
runs of the same setting show at that look (entropy: below their smallest; the others: above their largest).
"""

from __future__ import annotations

from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from qkpipe.analysis.frames import SETTING, doomed, healthy, read_frame, study_runs, write_frame
from qkpipe.analysis.signals import by_run
from qkpipe.analysis.statistics import clopper_pearson
from qkpipe.config import Study
from qkpipe.paths import StudyPaths
from qkpipe.store.parquet import read_runs

OUTPUTS = ("onsets", "onset_order", "entropy_heads")

PERSIST = 3
SHOWN_LOOKS = 12
SIGNALS = {
    "residual_r": 1,
    "sigma_q": 1,
    "sigma_qk": 1,
    "max_logit_raw": 1,
    "entropy_min": -1,
    "loss": 1,
}
"""Signal -> the side on which it leaves health."""

ONSETS = pa.schema(
    [
        *((name, pa.string()) for name in ("run_id", "arm", "source", "model", "seed_role", "signal")),
        *((name, pa.int64()) for name in ("seed", "onset_step", "collapse_step", "lead_steps", "n_healthy")),
    ]
)
"""One row a doomed run and signal. ``onset_step``: when it left health, null if never before the end; ``lead_steps``: from
there to the collapse; ``n_healthy``: runs the envelope is made of.
"""

ONSET_ORDER = pa.schema(
    [
        ("first", pa.string()),
        ("second", pa.string()),
        *((name, pa.int64()) for name in ("n", "n_first", "n_together")),
        *((name, pa.float64()) for name in ("share", "low", "high", "median_lag")),
    ]
)
"""Over the doomed runs in which both signals left health: how often ``first`` did so before ``second``, with the exact
interval.
"""

ENTROPY_HEADS = pa.schema(
    [
        *((name, pa.string()) for name in ("run_id", "arm", "role")),
        *((name, pa.int64()) for name in ("seed", "step", "layer", "head")),
        *((name, pa.float64()) for name in ("max_logit", "entropy", "sigma_q")),
    ]
)
"""Heads of doomed runs and their twins at about twelve looks; ``sigma_q`` of the head's layer."""


def build(paths: StudyPaths, study: Study) -> list[Path]:
    """Write ``onsets``, ``onset_order`` and ``entropy_heads``; returns the files."""
    runs = study_runs(paths)
    found = onsets(runs, read_frame(paths, "signals"))
    return [
        write_frame(paths.analysis("onsets"), found, ONSETS),
        write_frame(paths.analysis("onset_order"), order(found), ONSET_ORDER),
        write_frame(paths.analysis("entropy_heads"), _heads(paths, runs), ENTROPY_HEADS),
    ]


def onsets(runs: pd.DataFrame, signals: pd.DataFrame) -> pd.DataFrame:
    """Rows of ``ONSETS``; a setting needs two healthy runs to have an envelope."""
    rows: list[dict[str, Any]] = []
    for _, setting in runs.groupby(list(SETTING), sort=False):
        calm, falling = setting[healthy(setting) & ~setting["collapsed"]], setting[doomed(setting)]
        if len(calm) < 2 or falling.empty:
            continue
        looks = by_run(signals, setting)
        envelope = looks[looks["run_id"].isin(calm["run_id"])].groupby("step")
        for run in falling.itertuples():
            curve = looks[looks["run_id"] == run.run_id].set_index("step")
            for signal, side in SIGNALS.items():
                limit = (envelope[signal].max() if side > 0 else envelope[signal].min()).reindex(curve.index)
                outside = (side * (curve[signal] - limit) > 0).to_numpy()
                onset = first_lasting(outside, curve.index.to_numpy())
                rows.append(
                    {
                        **{
                            k: getattr(run, k)
                            for k in ("run_id", "arm", "source", "model", "seed", "seed_role")
                        },
                        "signal": signal,
                        "onset_step": onset,
                        "collapse_step": run.collapse_step,
                        "lead_steps": None if onset is None else run.collapse_step - onset,
                        "n_healthy": len(calm),
                    }
                )
    return pd.DataFrame(rows, columns=ONSETS.names)


def first_lasting(outside: np.ndarray, steps: np.ndarray) -> int | None:
    """The first step from which ``outside`` holds for ``PERSIST`` looks (or for the rest, where fewer are left)."""
    for i in np.flatnonzero(outside):
        if outside[i : i + PERSIST].all():
            return int(steps[i])
    return None


def order(found: pd.DataFrame) -> list[dict[str, Any]]:
    """Rows of ``ONSET_ORDER``, every ordered pair of signals."""
    wide = found.pivot(index="run_id", columns="signal", values="onset_step").astype(float)
    rows = []
    for first, second in permutations([signal for signal in SIGNALS if signal in wide], 2):
        both = wide[[first, second]].dropna()
        lag = both[second] - both[first]
        k, n = int((lag > 0).sum()), len(lag)
        low, high = clopper_pearson(k, n)
        row = {"first": first, "second": second, "n": n, "n_first": k, "n_together": int((lag == 0).sum())}
        rows.append(
            row | {"share": k / n if n else None, "low": low, "high": high, "median_lag": lag.median()}
        )
    return rows


def _heads(paths: StudyPaths, runs: pd.DataFrame) -> pd.DataFrame:
    falling = runs[doomed(runs)]
    twins = runs.merge(
        falling[["twin", "seed"]].drop_duplicates().rename(columns={"twin": "arm"}), on=["arm", "seed"]
    )
    frames = []
    for role, members in (("doomed", falling), ("twin", twins)):
        for run in members.itertuples():
            folder = [paths.run(run.arm, run.seed)]
            heads = read_runs(folder, "heads", ["run_id", "step", "layer", "head", "max_logit", "entropy"])
            layers = read_runs(folder, "layers", ["step", "layer", "sigma_q_1"]).to_pandas()
            frame = heads.to_pandas().merge(layers, on=["step", "layer"])
            looks = np.unique(frame["step"])
            shown = looks[np.unique(np.linspace(0, len(looks) - 1, SHOWN_LOOKS).astype(int))]
            frame = frame[frame["step"].isin(shown)].rename(columns={"sigma_q_1": "sigma_q"})
            frames.append(frame.assign(arm=run.arm, seed=run.seed, role=role))
    return pd.concat(frames) if frames else pd.DataFrame(columns=ENTROPY_HEADS.names)
