import math

import numpy as np
import pytest

from qkpipe.analysis import contrasts
from qkpipe.analysis.references import parent, references
from qkpipe.store.parquet import read_table


@pytest.fixture(scope="module")
def rows(synthetic):
    paths, study = synthetic
    contrasts.build(paths, study)
    table = read_table(paths.table("contrasts"))
    assert table.schema.equals(contrasts.CONTRASTS)
    return {(row["arm"], row["relation"]): row for row in table.to_pylist()}


def test_references_come_from_the_config(synthetic):
    _, study = synthetic
    assert references(study, "fp32") == {}
    assert references(study, "fp32_stream") == {"twin": "fp32"}
    assert references(study, "faulty") == {"twin": "fp32_stream"}  # what it extends cannot be run
    assert references(study, "guard") == {"twin": "fp32_stream", "parent": "faulty"}
    assert parent(study, "faulty") is None


def test_every_arm_meets_its_twin_and_its_parent_on_the_same_seeds(rows):
    assert ("fp32", "twin") not in rows and ("faulty", "parent") not in rows
    row = rows["faulty", "twin"]
    assert (row["reference"], row["seeds"], row["n_pairs"]) == ("fp32_stream", "0, 1", 2)
    assert (row["collapsed_arm"], row["collapsed_reference"]) == (2, 0)
    assert (row["label"], row["seed_role"]) == ("exploratory", "tuning")
    assert not [name for name in row if "p_value" in name]


def test_ratios_are_logs_of_arm_over_reference(synthetic, rows):
    paths, _ = synthetic
    runs = read_table(paths.analysis("runs")).to_pandas().set_index(["arm", "seed"])
    row = rows["faulty", "twin"]
    ratios = [
        math.log(
            runs.loc[("faulty", seed), "final_sigma_q"] / runs.loc[("fp32_stream", seed), "final_sigma_q"]
        )
        for seed in (0, 1)
    ]
    assert row["log_sigma_ratio_mean"] == pytest.approx(np.mean(ratios))
    assert (row["log_sigma_ratio_min"], row["log_sigma_ratio_max"]) == pytest.approx(
        (min(ratios), max(ratios))
    )
    assert row["log_logit_ratio_mean"] > 0 and row["final_loss_diff_min"] > 1


def test_logits_bounded_by_construction_are_not_compared(rows):
    for arm in ("guard", "qk_norm"):
        row = rows[arm, "parent"]
        assert row["logit_bounded"] and row["log_logit_ratio_mean"] is None
        assert row["log_sigma_ratio_mean"] is not None
    assert not rows["probe_on", "parent"]["logit_bounded"]


def test_roles_are_not_mixed_and_unpaired_seeds_are_left_out(synthetic):
    paths, study = synthetic
    runs = read_table(paths.analysis("runs")).to_pandas()
    curves = read_table(paths.analysis("curves")).to_pandas()
    runs.loc[runs["seed"] == 1, "seed_role"] = "confirmatory"
    found = [row for row in contrasts.contrasts(runs, curves, study) if row["arm"] == "faulty"]
    assert [(row["seed_role"], row["seeds"]) for row in found] == [("confirmatory", "1"), ("tuning", "0")]
    alone = runs[~((runs["arm"] == "fp32_stream") & (runs["seed"] == 1))]
    found = [row for row in contrasts.contrasts(alone, curves, study) if row["arm"] == "faulty"]
    assert [row["seeds"] for row in found] == ["0"]


def test_non_finite_ends_leave_the_other_pairs(synthetic):
    paths, study = synthetic
    runs = read_table(paths.analysis("runs")).to_pandas()
    curves = read_table(paths.analysis("curves")).to_pandas()
    runs.loc[(runs["arm"] == "faulty") & (runs["seed"] == 0), "final_sigma_q"] = np.nan
    row = next(row for row in contrasts.contrasts(runs, curves, study) if row["arm"] == "faulty")
    assert row["n_pairs"] == 2 and row["log_sigma_ratio_min"] == row["log_sigma_ratio_max"]


def test_csv_is_the_same_table(synthetic, rows):
    paths, _ = synthetic
    lines = paths.table("contrasts", "csv").read_text().splitlines()
    assert len(lines) == len(rows) + 1 and lines[0].split(",")[0] == '"arm"'
