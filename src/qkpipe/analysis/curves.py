"""The three curves every figure and contrast looks at, on one step axis: smoothed loss, spectral norm, largest logit."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pyarrow as pa

from qkpipe.analysis.verdict import smooth
from qkpipe.paths import RunPaths
from qkpipe.store.parquet import read_table

CURVES = pa.schema(
    [
        ("run_id", pa.string()),
        ("arm", pa.string()),
        ("group", pa.string()),
        ("seed", pa.int64()),
        ("seed_role", pa.string()),
        ("step", pa.int64()),
        ("loss", pa.float64()),
        ("sigma_q", pa.float64()),
        ("max_logit", pa.float64()),
        ("max_logit_raw", pa.float64()),
    ]
)
"""``loss``: EMA 0.95 of the training loss, null from the first non-finite loss on; ``sigma_q``: maximum of sigma_q_1 over
layers; ``max_logit`` (as applied) and ``max_logit_raw`` (without QK normalisation): maximum over layers and heads.
"""


def run_curves(run: RunPaths) -> pd.DataFrame:
    """Curves of one run at its telemetry steps and at its last step: columns ``step``, ``loss``, ``sigma_q``, the logits."""
    steps = read_table(run.table("steps"), ["step", "loss"]).to_pandas()
    layers = read_table(run.table("layers"), ["step", "sigma_q_1"]).to_pandas()
    heads = read_table(run.table("heads"), ["step", "max_logit", "max_logit_raw"]).to_pandas()
    ema = smooth(steps["loss"])
    loss = pd.Series(ema, index=steps["step"].to_numpy()[: len(ema)], name="loss")
    observed = layers.groupby("step").max().join(heads.groupby("step").max(), how="outer")
    axis = np.union1d(observed.index, steps["step"].tail(1)).astype(np.int64)
    frame = observed.reindex(axis).join(loss).rename_axis("step").reset_index()
    return frame.rename(columns={"sigma_q_1": "sigma_q"})


def last_finite(values: pd.Series) -> float | None:
    """The last finite value, carried forward to the end; None where there is none."""
    finite = values[np.isfinite(values.astype(float))]
    return float(finite.iloc[-1]) if len(finite) else None


def peak_finite(values: pd.Series) -> float | None:
    """The largest finite value; None where there is none."""
    finite = values[np.isfinite(values.astype(float))]
    return float(finite.max()) if len(finite) else None


def logit_is_bounded(curves: pd.DataFrame) -> bool:
    """Whether a run ends with logits that a normalisation holds down: what is applied is not what the weights give."""
    seen = curves.dropna(subset=["max_logit", "max_logit_raw"])
    if seen.empty:
        return False
    end = seen.iloc[-1]
    return not np.isclose(end["max_logit"], end["max_logit_raw"], rtol=1e-5, atol=1e-6)
