"""Rows of ``runs`` made by hand: a plain healthy run, changed as told."""

import pandas as pd

from qkpipe.telemetry.schema import RUNS

PLAIN = {
    "scale": "tiny", "arm": "plain", "group": "healthy", "source": "none", "route": "none", "intervention": "none",
    "probe": "none", "model": "m", "optimizer": "o", "tokenizer": "bytes", "steps_planned": 600, "steps_done": 600,
    "seed": 10, "seed_role": "confirmatory", "collapsed": False, "censored": False, "correction": "none", "fault": "none",
    "attention": "streaming", "quantities": "none", "repair": "none", "attention_gain": 1.0, "tile": 8, "beta1": 0.9,
    "lr": 1e-3, "warmup": 50, "accumulation": 1, "d_head": 16, "final_sigma_q": 2.0, "peak_logit": 10.0, "final_val_loss": 2.0,
}  # fmt: skip


def make_runs(*rows):
    """A frame with every column of ``runs``; ``run_id`` is ``<arm>/<seed>`` unless given."""
    made = []
    for row in rows:
        full = {**dict.fromkeys(RUNS.names), **PLAIN, **row}
        made.append(full | {"run_id": full["run_id"] or f"{full['arm']}/{full['seed']}"})
    return pd.DataFrame(made, columns=RUNS.names)


def make_signals(runs, last=600, every=10, **curves):
    """Signals of ``runs``; a curve is a function of (run, step) with NaN where nothing is known."""
    rows = []
    for run in runs.itertuples():
        for step in range(0, last, every):
            rows.append({"run_id": run.run_id, "step": step, **{k: f(run, step) for k, f in curves.items()}})
    from qkpipe.analysis.signals import SIGNALS

    frame = pd.DataFrame(rows).reindex(columns=SIGNALS.names)
    return frame.astype({name: float for name in frame if name not in ("run_id", "step")})
