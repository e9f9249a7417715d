import numpy as np

from qkpipe.analysis import dissociation
from qkpipe.store.parquet import read_table


def test_one_row_an_arm_with_counts_and_medians(synthetic):
    paths, study = synthetic
    (path,) = dissociation.build(paths, study)
    table = read_table(path)
    assert table.schema.equals(dissociation.DISSOCIATION)
    rows = {row["arm"]: row for row in table.to_pylist()}
    assert list(rows) == study.runnable
    assert {arm for arm, row in rows.items() if row["headline"]} == study.headline
    assert (rows["faulty"]["n"], rows["faulty"]["collapsed"], rows["faulty"]["fired"]) == (2, 2, 0)
    assert (rows["splice_mlp"]["collapsed"], rows["guard"]["collapsed"], rows["guard"]["fired"]) == (2, 0, 2)
    assert rows["guard"]["median_fire_step"] == 122.5
    assert rows["fp32"]["median_fire_step"] is None
    runs = read_table(paths.analysis("runs")).to_pandas()
    sigma = runs.loc[runs["arm"] == "faulty", "final_sigma_q"]
    assert rows["faulty"]["final_sigma_q_median"] == np.median(sigma)
    assert rows["faulty"]["final_sigma_q_max"] == sigma.max()
    assert rows["guard"]["description"] == "QK-Guard"
