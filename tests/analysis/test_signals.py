import numpy as np
import pandas as pd
import pytest

from qkpipe.analysis import signals
from qkpipe.store.parquet import read_table


def test_a_jump_of_the_loss_is_its_z_score():
    draws = np.random.default_rng(0).standard_normal(400)
    loss = 3 + 0.1 * draws
    loss[300] = 4.0
    z = signals.loss_z(loss)
    assert np.isnan(z[:25]).all() and np.abs(z[25:300]).max() < 6
    assert z[300] == pytest.approx(10, rel=0.35)
    loss[350] = np.nan
    assert np.isinf(signals.loss_z(loss)[350:]).all()


def test_the_largest_value_since_the_previous_look():
    values = pd.Series([5.0, 1.0, 7.0, 2.0, 9.0], index=[0, 1, 10, 11, 25])
    assert signals._since_last_look(values, np.array([0, 10, 20])).to_dict() == {0: 5.0, 10: 7.0, 20: 2.0}


def test_turns_of_the_residuals_sign():
    layers = pd.DataFrame(
        {"step": [0, 0, 10, 10, 20, 20], "layer": [0, 1] * 3, "residual_mean": [1, 1, -1, 1, 1, 1.0]}
    )
    turns = signals._turns(layers)
    assert np.isnan(turns[0]) and turns[10] == turns[20] == 0.5


def test_signals_of_a_run_on_disk(synthetic):
    paths, study = synthetic
    signals.build(paths, study)
    table = read_table(paths.analysis("signals"))
    assert table.schema.equals(signals.SIGNALS)
    frame = table.to_pandas()
    own = frame[frame["run_id"] == study.resolve("fp32", 0).run_id].set_index("step")
    assert list(own.index) == list(range(0, 400, 10))
    assert own.loc[100, "sigma_q"] == pytest.approx(1 + 100 / 300 + 0.1)
    assert own.loc[100, "sigma_growth"] == pytest.approx(
        np.log(own.loc[100, "sigma_q"] / own.loc[50, "sigma_q"])
    )
    assert own.loc[100, "error_ratio"] == pytest.approx(0.1)
    assert own.loc[100, "residual_r_mean"] == pytest.approx(0.01)
    assert own.loc[100, "max_logit"] == pytest.approx(4 * own.loc[100, "sigma_q"])
