from types import SimpleNamespace

import pandas as pd
import pytest

from analysis.made import make_runs, make_signals
from qkpipe.analysis import sweep
from qkpipe.analysis.frames import write_frame
from qkpipe.analysis.runs import RUNS
from qkpipe.analysis.signals import SIGNALS
from qkpipe.paths import StudyPaths
from qkpipe.store.parquet import read_table


@pytest.fixture
def data():
    """Healthy logits end at 20 + seed; the doomed ones pass t at step 5 t."""
    fault = {"arm": "faulty", "source": "s", "collapsed": True, "collapse_step": 300}
    guarded = {"arm": "guard", "source": "s", "correction": "guard", "threshold": 30.0}
    runs = make_runs(
        *({"arm": "clean", "seed": seed} for seed in (1, 2, 3)),
        *({**fault, "seed": seed} for seed in (1, 2)),
        {**guarded, "seed": 1},
        {**guarded, "seed": 2, "collapsed": True},
    )
    signals = make_signals(
        runs, max_logit=lambda run, step: step / 5 if run.arm != "clean" else min(step, 20 + run.seed)
    )
    return runs, signals


def test_rates_of_a_threshold(data):
    rows = {row["threshold"]: row for row in sweep.sweep(*data, tau=22.0)}
    at = rows[22.0]
    assert (at["healthy_fired"], at["healthy_n"], at["doomed_fired"], at["doomed_n"]) == (1, 3, 2, 2)
    assert at["lead_median"] == 300 - 120 and at["guarded_n"] == 0
    assert (rows[30.0]["guarded_n"], rows[30.0]["guarded_contained"]) == (2, 1)
    late = rows[min(t for t in rows if t > 60)]
    assert late["doomed_fired"] == 0 and late["lead_median"] is None


def test_transfer_is_the_largest_healthy_logit_of_the_others(data):
    runs, signals = data
    assert sweep.transfer(runs, signals) == []
    other = make_runs({"arm": "rope", "model": "rope", "seed": 9})
    more = make_signals(other, max_logit=lambda run, step: 40.0)
    rows = {r["model"]: r for r in sweep.transfer(pd.concat([runs, other]), pd.concat([signals, more]))}
    assert (rows["rope"]["threshold"], rows["rope"]["healthy_fired"]) == (23.0, 1)
    assert (rows["m"]["threshold"], rows["m"]["healthy_fired"], rows["m"]["doomed_fired"]) == (40.0, 0, 2)


def test_other_horizons_tokenizers_and_optimizers_make_no_threshold(tmp_path, data):
    runs, signals = data
    others = make_runs(
        {"arm": "rope", "model": "rope", "seed": 9},
        {"arm": "hot", "model": "rope", "optimizer": "hot", "seed": 9},
        {"arm": "long", "model": "rope", "steps_planned": 6000, "seed": 9},
        {"arm": "bpe", "model": "rope", "tokenizer": "bpe", "seed": 9},
    )
    peaks = {"rope": 40.0, "hot": 400.0, "long": 500.0, "bpe": 600.0}
    more = make_signals(others, max_logit=lambda run, step: peaks[run.arm])
    paths = StudyPaths("tiny", tmp_path)
    write_frame(paths.analysis("runs"), pd.concat([runs, others]), RUNS)
    write_frame(paths.analysis("signals"), pd.concat([signals, more]), SIGNALS)
    _, transfer = sweep.build(paths, SimpleNamespace(tau=30.0))
    rows = {row["model"]: row for row in read_table(transfer).to_pylist()}
    assert (rows["m"]["threshold"], rows["m"]["calibration_runs"]) == (40.0, 1)
    assert rows["rope"]["healthy_n"] == 1
