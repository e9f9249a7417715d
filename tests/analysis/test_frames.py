import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from analysis.made import make_runs
from qkpipe.analysis import frames
from qkpipe.store.parquet import read_table


def test_frames_become_tables_with_nulls_for_what_is_not_known(tmp_path):
    schema = pa.schema([("a", pa.int64()), ("b", pa.float64()), ("c", pa.string()), ("d", pa.bool_())])
    frame = pd.DataFrame({"a": [1.0, np.nan], "b": [np.inf, np.nan], "c": ["x", None], "e": [0, 0]})
    rows = read_table(frames.write_frame(tmp_path / "t.parquet", frame, schema)).to_pylist()
    assert rows == [
        {"a": 1, "b": np.inf, "c": "x", "d": None},
        {"a": None, "b": None, "c": None, "d": None},
    ]
    assert read_table(frames.write_frame(tmp_path / "t.parquet", [], schema)).num_rows == 0


def test_who_is_healthy_uncorrected_doomed():
    runs = make_runs(
        {"arm": "healthy"},
        {"arm": "stressed", "source": "lr_x2", "fault": "learning_rate", "collapsed": True},
        {"arm": "faulty", "source": "s", "collapsed": True},
        {"arm": "held", "source": "s"},
        {"arm": "guarded", "source": "s", "correction": "guard", "collapsed": True},
        {"arm": "probed", "source": "s", "probe_action": "on_target", "collapsed": True},
        {"arm": "observed", "source": "s", "probe_action": "observe", "collapsed": True},
        {"arm": "logged", "source": "s", "intervention": "guard-log(30)", "collapsed": True},
    )

    def named(mask):
        return list(runs.loc[mask, "arm"])

    assert named(frames.healthy(runs)) == ["healthy"]
    assert named(frames.stressed(runs)) == ["stressed"]
    assert named(frames.watched(runs)) == ["observed", "logged"]
    assert named(frames.doomed(runs)) == ["faulty"]
    assert named(frames.uncorrected(runs)) == ["healthy", "stressed", "faulty", "held"]


def test_bootstrap_resamples_seeds_not_runs():
    """Two runs a seed that agree: the interval is that of three seeds, and two seeds give none."""
    frame = pd.DataFrame({"seed": [1, 1, 2, 2, 3, 3], "x": [0.0, 0.0, 1.0, 1.0, 2.0, 2.0]})
    means = set()

    def mean(rows):
        means.add(round(float(frame["x"].iloc[rows].mean()), 9))
        return float(frame["x"].iloc[rows].mean())

    low, high = frames.bootstrap(frame["seed"], mean)
    assert low < 0.34 and high > 1.66
    assert means <= {round(k / 3, 9) for k in range(7)}
    assert np.isnan(frames.bootstrap(frame.loc[frame["seed"] < 3, "seed"], mean)).all()


def test_log_ratio_pairs_by_seed_and_knows_no_other():
    runs = make_runs(
        {"arm": "a", "seed": 1, "final_sigma_q": 6.0},
        {"arm": "a", "seed": 2, "final_sigma_q": 6.0},
        {"arm": "b", "seed": 1, "final_sigma_q": 3.0},
    )
    ratio = frames.paired_log_ratio(runs, runs, "final_sigma_q", {"a": "b"}.get)
    assert ratio[0] == pytest.approx(np.log(2)) and ratio[1:].isna().all()
