"""Every arm of the study trains, acts and is recorded: at the size of a test, with everything that waits made to come soon."""

import math
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch

from project import ROOT
from qkpipe.config import load_study
from qkpipe.config.models import RunConfig
from qkpipe.data.shards import open_tokens, write_tokens
from qkpipe.telemetry.schema import TABLES
from qkpipe.train.trainer import Trainer
from tiny_training import Rows, equal_bits, weights

STUDY = load_study(ROOT / "workflow" / "config")
STEPS = 8
CONTEXT = 32

SAME_BITS = {
    "sdpa_flash": "torch's default on a CPU is its FlashAttention backend",
    "guard_log": "it only records",
    "only_carries-repair_tied_max": "fp32 scores do not tie",
}
"""Arms that train as the arm they extend, or their twin, does. A longer run begins as the shorter one."""

SOON = {
    "start_step": lambda step: min(step, 2),
    "hold": lambda hold: hold and min(1 + hold // 3, STEPS - 2),
    "warmup": lambda steps: 2,
    "reset_every": lambda steps: 3,
    "rewarm": lambda steps: 2,
    "settle": lambda steps: 0,
}
"""Numbers of steps that a mechanism waits for."""

SMALL_LOGITS = 1e-4
"""Before training the logits are some 0.01."""


def shrunk(mechanism):
    """The mechanism's own settings, within ``STEPS`` steps and at these logits."""
    found = {key: SOON[key](value) if key in SOON else value for key, value in mechanism.items()}
    return found | ({"threshold": found["threshold"] * SMALL_LOGITS} if "threshold" in found else {})


def small(arm):
    """The arm's config with every size a quarter, so that two arms that differ still do."""
    body = STUDY.resolve(arm, 0).model_dump()
    model, attention, train = body["model"], body["attention"], body["train"]
    model |= {
        "d_model": model["d_model"] // 4,
        "d_ff": model["d_ff"] and model["d_ff"] // 4,
        "context": CONTEXT,
    }
    attention |= {"tile": math.ceil(attention["tile"] / 4)}
    if "softcap" in attention:
        attention["softcap"] *= SMALL_LOGITS
    train |= {"steps": STEPS, "batch_size": math.ceil(train["batch_size"] / 4)}
    train |= {"telemetry_every": 3, "val_every": 4, "val_batches": 1}
    body["optimizer"] |= {"warmup": 2}
    for family in ("faults", "interventions"):
        body[family] = [shrunk(mechanism) for mechanism in body[family]]
    body["probe"] = body["probe"] and shrunk(body["probe"])
    return RunConfig.model_validate(body)


@cache
def tokens(vocab_size):
    """The same tokens whatever the vocabulary."""
    generator = np.random.default_rng(0)
    draw = {"train": 3000, "validation": 300}
    splits = {name: generator.integers(0, 64, size).astype(np.uint16) for name, size in draw.items()}
    with TemporaryDirectory() as folder:
        return open_tokens(write_tokens(Path(folder), splits, vocab_size=vocab_size), CONTEXT)


@cache
def trained(arm):
    """(trainer, its weights after the last step)."""
    torch.set_num_threads(1)
    run = small(arm)
    trainer = Trainer(run, tokens(run.tokenizer.vocab_size), Rows())
    for _ in range(STEPS):
        assert trainer.step().finite
    return trainer, weights(trainer)


def same_weights(one, other):
    ours, theirs = trained(one)[1], trained(other)[1]
    return ours.keys() == theirs.keys() and all(equal_bits(ours[name], theirs[name]) for name in theirs)


@pytest.mark.slow
@pytest.mark.parametrize("arm", STUDY.runnable)
def test_an_arm_trains_acts_and_is_recorded(arm):
    trainer, _ = trained(arm)
    others = {STUDY.arms[arm].twin, STUDY.arms[arm].extends} - {None}
    for other in others:
        if STUDY.arms[other].abstract:
            continue
        longer = STUDY.resolve(arm, 0).train.steps > STUDY.resolve(other, 0).train.steps
        alike = longer and small(arm).config_hash == small(other).config_hash
        declared = arm in SAME_BITS and other == (STUDY.arms[arm].extends or STUDY.arms[arm].twin)
        expected = alike or declared
        assert same_weights(arm, other) == expected, f"{arm} and {other}"
    assert_recorded(trainer)


def assert_recorded(trainer):
    run, tables = trainer.run, trainer.writer.tables
    streaming = run.attention.kind == "streaming"
    for name, rows in tables.items():
        assert all(set(row) < set(TABLES[name].names) for row in rows)
    assert [row["step"] for row in tables["steps"]] == list(range(STEPS))
    for row in tables["steps"]:
        unknown = {"val_loss"} | (set() if streaming else {"max_logit"})
        assert_known(row, "steps", unknown)
    sensed = sorted({row["step"] for row in tables["layers"]})
    assert sensed == [0, 3, 6, 7]
    for row in tables["layers"]:
        assert_known(row, "layers", {"update_coherence"} if row["step"] < 2 else set())
    for row in tables["heads"]:
        assert_known(row, "heads", set())
    layers, heads = run.model.n_layers, run.model.n_heads
    assert (
        len(tables["layers"]) == len(sensed) * layers and len(tables["heads"]) == len(sensed) * layers * heads
    )
    errors = {"error_norm", "error_mean", "coherence"}
    for row in tables["routes"]:
        assert_known(row, "routes", errors)
    hit = {row["route"] for row in tables["routes"] if row.get("error_norm")}
    for fault in run.faults:
        assert not hasattr(fault, "format") or hit, "the fault's own size is not known"
    assert bool(tables["probe"]) == (run.probe is not None)
    fired = [event for event in tables["events"] if event["kind"].endswith("_fired")]
    assert bool(fired) == any(hasattr(action, "threshold") for action in run.interventions)


def assert_known(row, table, may_be_null):
    known = {key for key, value in row.items() if value is not None}
    assert set(TABLES[table].names) - known - {"run_id"} <= may_be_null, f"{table}, step {row['step']}"
    assert not [key for key in known if isinstance(row[key], float) and not math.isfinite(row[key])]


def test_learning_rates_and_the_long_horizon_are_multiples_of_the_scales():
    scale = STUDY.scale_config
    for prefix, factor in (("half_lr-", 0.5), ("double_lr-", 2.0)):
        rates = [STUDY.resolve(arm, 0).optimizer.lr for arm in STUDY.runnable if arm.startswith(prefix)]
        assert rates == pytest.approx([factor * scale.optimizer.lr] * 7)
    steps = {STUDY.resolve(arm, 0).train.steps for arm in STUDY.runnable if arm.startswith("long-")}
    assert steps == {10 * scale.train.steps}
