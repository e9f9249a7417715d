"""Everything a monitor could have watched, run by run on one clock: the steps at which telemetry looks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa

from qkpipe.analysis.frames import read_frame, write_frame
from qkpipe.analysis.verdict import smooth
from qkpipe.config import Study
from qkpipe.paths import RunPaths, StudyPaths
from qkpipe.store.parquet import read_runs

OUTPUTS = ("signals",)

GROWTH_LOOKS = 5
Z_DECAY, Z_WARMUP = 0.97, 25

SIGNALS = pa.schema(
    [
        ("run_id", pa.string()),
        ("step", pa.int64()),
        *(
            (name, pa.float64())
            for name in (
                "loss",
                "loss_z",
                "grad_norm",
                "max_logit",
                "max_logit_raw",
                "sigma_q",
                "sigma_growth",
                "sigma_qk",
                "entropy_min",
                "entropy_mean",
                "update_coherence",
                "spectral_alignment",
                "residual_r",
                "residual_r_mean",
                "residual_mean",
                "residual_turns",
                "error_ratio",
                "error_mean",
                "coherence",
            )
        ),
    ]
)
"""One row a look. ``loss``: EMA 0.95. The largest since the previous look: ``loss_z``, (loss - mean) / sd by EMA 0.97 of
the losses before it, from step 25 on; ``grad_norm`` before the clip; ``max_logit`` where the kernel reports it at every
step (else at the look). The largest over layers: ``max_logit_raw``, ``sigma_q`` (of W_Q), ``sigma_qk`` (of W_Q' W_K over
heads), ``update_coherence``, ``spectral_alignment``, ``residual_r``; the smallest: ``entropy_min``. ``sigma_growth``: log
of ``sigma_q`` over its value five looks before. Means over layers: ``entropy_mean``, ``residual_r_mean``,
``residual_mean``; ``residual_turns``: share of layers whose ``residual_mean`` changed its sign since the previous look. Of
the parameters with a known error: ``error_ratio``, its norm over the gradient's as used; ``error_mean``, mean |mean error|
by layer and route; ``coherence``, mean of theirs. A value that is not finite is infinite.
"""


def build(paths: StudyPaths, study: Study) -> list[Path]:
    """Write ``analysis/signals.parquet`` from the telemetry of every run in ``runs``; returns the file."""
    runs = read_frame(paths, "runs")
    frames = [
        run_signals(paths.run(run.arm, run.seed)).assign(run_id=run.run_id) for run in runs.itertuples()
    ]
    joined = pd.concat(frames) if frames else pd.DataFrame()
    return [write_frame(paths.analysis("signals"), joined, SIGNALS)]


def run_signals(run: RunPaths) -> pd.DataFrame:
    """Signals of one run, one row a look (without ``run_id``)."""
    steps = read_runs([run], "steps", ["step", "loss", "grad_norm", "max_logit"])
    layers = read_runs([run], "layers").to_pandas()
    heads = read_runs([run], "heads", ["step", "max_logit", "max_logit_raw"]).to_pandas()
    routes = read_runs([run], "routes").to_pandas()
    looks = np.unique(layers["step"].to_numpy(np.int64))
    frame = pd.DataFrame(index=pd.Index(looks, name="step"))
    by_step = layers.groupby("step")
    largest = by_step[["sigma_q_1", "sigma_qk_max", "update_coherence", "spectral_alignment"]].max()
    frame["sigma_q"], frame["sigma_qk"] = largest["sigma_q_1"], largest["sigma_qk_max"]
    frame["sigma_growth"] = np.log(frame["sigma_q"]).diff(GROWTH_LOOKS)
    frame["update_coherence"] = largest["update_coherence"]
    frame["spectral_alignment"] = largest["spectral_alignment"]
    frame["entropy_min"] = by_step["entropy_min"].min()
    frame["entropy_mean"] = by_step["entropy_mean"].mean()
    frame["residual_r"], frame["residual_r_mean"] = by_step["residual_r"].max(), by_step["residual_r"].mean()
    frame["residual_mean"] = by_step["residual_mean"].mean()
    frame["residual_turns"] = _turns(layers)
    frame = frame.join(heads.groupby("step").max())
    frame = frame.join(_errors(routes))
    ema = smooth(steps["loss"].to_pandas())
    frame["loss"] = pd.Series(ema, index=steps["step"].to_numpy()[: len(ema)])
    z = pd.Series(loss_z(steps["loss"].to_numpy()), index=steps["step"].to_numpy())
    frame["loss_z"] = _since_last_look(z.dropna(), looks)
    for column in ("grad_norm", "max_logit"):
        known = steps.filter(steps[column].is_valid())
        values = pd.Series(known[column].to_numpy(), index=known["step"].to_numpy())
        seen = _since_last_look(values.where(np.isfinite(values), np.inf), looks)
        frame[column] = seen.combine_first(frame[column]) if column in frame else seen
    return frame.reset_index()


def loss_z(loss: np.ndarray) -> np.ndarray:
    """(loss - mean) / sd by exponential moving averages of the losses before it; NaN up to step 25, infinite if not finite."""
    z = np.full(len(loss), np.nan)
    mean, square = float(loss[0]) if len(loss) else 0.0, 0.0
    for t, value in enumerate(np.asarray(loss, float)):
        if not np.isfinite(value):
            z[t:] = np.inf
            break
        if t >= Z_WARMUP and square > 0:
            z[t] = (value - mean) / square**0.5
        step = (1 - Z_DECAY) * (value - mean)
        square = Z_DECAY * (square + step * (value - mean))
        mean += step
    return z


def _since_last_look(values: pd.Series, looks: np.ndarray) -> pd.Series:
    """Largest value after the previous look and up to each look; nothing after the last look is seen."""
    place = np.searchsorted(looks, values.index.to_numpy())
    seen = place < len(looks)
    return values[seen].groupby(looks[place[seen]]).max()


def _turns(layers: pd.DataFrame) -> pd.Series:
    signs = np.sign(layers.pivot(index="step", columns="layer", values="residual_mean").astype(float))
    changed = (signs * signs.shift() < 0).where(signs.notna() & signs.shift().notna())
    return changed.astype(float).mean(axis=1)


def _errors(routes: pd.DataFrame) -> pd.DataFrame:
    known = routes.dropna(subset=["error_norm"])
    squares = known.assign(error=known["error_norm"] ** 2, gradient=known["grad_norm"] ** 2)
    sums = squares.groupby("step")[["error", "gradient"]].sum()
    ratio = np.sqrt(sums["error"] / sums["gradient"].where(sums["gradient"] > 0))
    by_step = known.assign(error_mean=known["error_mean"].abs()).groupby("step")
    return pd.DataFrame({"error_ratio": ratio, **{c: by_step[c].mean() for c in ("error_mean", "coherence")}})


def by_run(signals: pd.DataFrame, runs: pd.DataFrame) -> pd.DataFrame:
    """Signals of ``runs`` with what identifies them: arm, group, seed, role, verdict, settings."""
    shared = ["run_id", "step"]
    return signals.merge(
        runs.drop(columns=[c for c in runs if c in signals and c not in shared]), on="run_id"
    )
