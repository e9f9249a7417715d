"""What a run's identity covers and what it leaves out; precisions and labels."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from qkpipe.config import load_study
from qkpipe.config.models import AttentionConfig, PrecisionConfig, RepairConfig
from qkpipe.numerics.precision import Rounding, StreamPrecision

TINY = load_study(Path(__file__).parents[1] / "tiny")


def changed(run, **sections):
    body = run.model_dump()
    for section, values in sections.items():
        body[section] = {**body[section], **values} if isinstance(values, dict) else values
    return type(run).model_validate(body)


def test_names_prose_and_checkpoints_are_no_part_of_the_identity():
    run = TINY.resolve("faulty", 0)
    for change in (
        {"arm": "other"},
        {"seed": 1},
        {"description": "words"},
        {"group": "g"},
        {"twin": None},
        {"train": {"checkpoint_every": 7}},
    ):
        assert changed(run, **change).config_hash == run.config_hash, change


@pytest.mark.parametrize(
    "change",
    [
        {"train": {"steps": 21}},
        {"train": {"threads": 2}},
        {"optimizer": {"lr": 0.02}},
        {"model": {"d_model": 32}},
        {"attention": {"tile": 4}},
        {"corpus": {"sha256": "0" * 64}},
        {"train_version": 10_000},
        {"interventions": [{"kind": "guard", "threshold": 9}]},
    ],
)
def test_whatever_changes_the_bits_changes_the_hash(change):
    run = TINY.resolve("faulty", 0)
    assert changed(run, **change).config_hash != run.config_hash


def test_run_ids_tell_arms_and_seeds_apart():
    ids = {TINY.resolve(arm, seed).run_id for arm in TINY.runnable for seed in range(3)}
    assert len(ids) == 3 * len(TINY.runnable)


def test_precisions_resolve_to_the_numerics_own():
    assert PrecisionConfig(uniform=2, io=7).resolve() == StreamPrecision.uniform(2, io=7)
    assert PrecisionConfig(carries=3, io=7).resolve() == StreamPrecision.carries(3, io=7)
    assert PrecisionConfig().resolve() == StreamPrecision()
    mixed = PrecisionConfig(uniform=2, io=7, only={"l": 23}).resolve()
    assert (mixed.l.bits, mixed.acc.bits) == (23, 2)
    with pytest.raises(ValidationError, match="not both"):
        PrecisionConfig(uniform=2, carries=2)


def test_named_quantities_alone_are_rounded_at_the_dose():
    assert PrecisionConfig(uniform=2, io=7, quantities=("acc", "l")).resolve() == StreamPrecision(
        acc=2, l=2, io=7
    )
    assert PrecisionConfig(uniform=2, io=7, quantities=()).resolve() == StreamPrecision(io=7)
    gained = PrecisionConfig(uniform=7, gain=32, mode="stochastic", quantities=("o",)).resolve()
    assert gained == StreamPrecision(o=Rounding(7, "stochastic", 32))
    mixed = PrecisionConfig(uniform=2, only={"l": {"bits": 3, "gain": 2}}).resolve()
    assert (mixed.l, mixed.acc) == (Rounding(3, "even", 2), Rounding(2))
    for bad in (
        {"quantities": ("acc",)},
        {"uniform": 2, "quantities": ("acd",)},
        {"uniform": 2, "quantities": ("io",)},
    ):
        with pytest.raises(ValidationError, match="quantit"):
            PrecisionConfig(**bad)


def test_an_option_that_came_later_is_in_the_identity_only_where_it_is_used():
    plain = {"quantities", "gain"} & set(PrecisionConfig(uniform=2).model_dump())
    assert not plain
    assert PrecisionConfig(uniform=2, gain=3.0).model_dump()["gain"] == 3.0
    ring = AttentionConfig(kind="streaming", block_tiles=2)
    assert "block_tiles" not in AttentionConfig(kind="streaming").model_dump()
    assert AttentionConfig.model_validate(ring.model_dump()) == ring
    with pytest.raises(ValidationError, match="need kind: streaming"):
        AttentionConfig(block_tiles=2)


def test_clean_attention_keeps_the_structure_and_drops_the_fault():
    faulty = AttentionConfig(
        kind="streaming", tile=4, precision=PrecisionConfig(uniform=2), repair=RepairConfig(delta="p")
    )
    assert faulty.clean() == AttentionConfig(kind="streaming", tile=4)


def test_precisions_that_differ_have_labels_that_differ():
    """Else a table by source would pool a repair with the fault it repairs."""
    study = load_study()
    by_label = {}
    for arm in study.runnable:
        precision = study.resolve(arm, 0).attention.precision
        by_label.setdefault((precision.label(), precision.io), set()).add(precision.resolve())
    assert len(by_label) > 20
    assert [label for label, found in by_label.items() if len(found) > 1] == []


def test_arms_that_train_to_other_bits_are_told_apart_by_their_labels_and_settings():
    """Else a table by source and correction would count one fault as another: tiles, heads, how often a guard looks, ..."""
    study = load_study()
    shared = {}
    for arm in study.runnable:
        run = study.resolve(arm, 0)
        labels = run.labels()
        if labels["source"] != "none":
            settings = (run.tokenizer_name, run.train.accumulation, run.train.steps)
            shared.setdefault((*labels.values(), *settings), []).append(arm)
    assert len(shared) > 200
    assert [arms for arms in shared.values() if len(arms) > 1] == []


def test_labels_say_what_a_run_is():
    labels = {arm: TINY.resolve(arm, 0).labels() for arm in TINY.runnable}
    assert labels["fp32"]["source"] == "none"
    assert labels["faulty"]["source"] == "streaming-tile8-uniform(2)"
    assert labels["guard"]["intervention"] == "guard(0.01)"
    assert labels["probe_on"]["probe"] != "none"
