"""Cells that are named and not run: each trains as the arm it names, bit for bit, and no run is ever asked of it."""

from pathlib import Path

import pytest

from qkpipe.config import load_study
from qkpipe.config.effective import effective_config
from qkpipe.config.models import RunConfig
from qkpipe.errors import BadInput
from qkpipe.train.trainer import Trainer
from tiny_training import Rows, equal_bits, tiny_run, tiny_tokens, weights

STUDY = load_study(Path(__file__).parents[2] / "workflow" / "config")
SIZES = {"d_model": 16, "n_layers": 2, "n_heads": 2, "context": 16}
SHORT = {"steps": 3, "batch_size": 2, "val_batches": 2, "telemetry_every": 1}


def small(arm):
    """The arm's own faults, corrections and attention at the size of a test."""
    body, noise = STUDY.resolve(arm, 0).model_dump(), tiny_run().model_dump()
    body["model"] |= SIZES
    body["attention"] |= {"tile": 4}
    body["train"] |= SHORT
    return RunConfig.model_validate(body | {key: noise[key] for key in ("corpus", "tokenizer")})


@pytest.mark.parametrize("cell", STUDY.not_applicable)
def test_the_cell_trains_as_the_arm_it_names(cell, tmp_path):
    tokens = tiny_tokens(tmp_path)
    trainers = [Trainer(small(arm), tokens, Rows()) for arm in (cell, STUDY.not_applicable[cell])]
    for _ in range(3):
        for trainer in trainers:
            trainer.step()
    ours, theirs = map(weights, trainers)
    assert all(equal_bits(ours[name], theirs[name]) for name in theirs)
    assert trainers[0].writer.tables["heads"] == trainers[1].writer.tables["heads"]


def test_nothing_asks_to_run_one():
    assert STUDY.not_applicable
    assert not set(STUDY.not_applicable) & set(STUDY.runnable)
    for target in STUDY.config.targets:
        assert not set(STUDY.not_applicable) & {key.arm for key in STUDY.requested(target)}


def test_the_effective_config_names_them():
    assert effective_config(STUDY)["not_applicable"] == STUDY.not_applicable


def test_the_arm_it_names_must_be_there(tmp_path):
    folder = Path(__file__).parents[1] / "tiny"
    for name in ("study.yaml", "arms.yaml"):
        (tmp_path / name).write_text((folder / name).read_text())
    with (tmp_path / "arms.yaml").open("a") as arms:
        arms.write("cell: { extends: fp32, same_as: fp64 }\n")
    with pytest.raises(BadInput, match=r"cell\.same_as: unknown name 'fp64'"):
        load_study(tmp_path)
