"""Rivals as arms: what they do is tested in tests/rivals; here, that a run sees and records it."""

import json

import pytest

from qkpipe.errors import BadInput
from qkpipe.interventions.qk_clip import QKClip
from qkpipe.interventions.spam import SPAM
from qkpipe.interventions.zclip import ZClip
from tiny_training import equal_bits, tiny_run, tiny_trainer, weights

HOT = {"lr": 5e-2}


def train(tmp_path, *interventions, steps=10, **optimizer):
    trainer = tiny_trainer(
        tmp_path, optimizer={**HOT, **optimizer}, train={"steps": steps}, interventions=list(interventions)
    )
    for _ in range(steps):
        trainer.step()
    return trainer


def events(trainer, kind):
    return [row for row in trainer.writer.tables["events"] if row["kind"] == kind]


@pytest.mark.parametrize(
    "rival",
    [{"kind": "zclip", "warmup": 2, "max_norm": 0.5}, {"kind": "adagc", "warmup": 2, "absolute": 0.5}],
)
def test_the_norm_that_the_optimizer_saw_is_recorded(tmp_path, rival):
    trainer = train(tmp_path, rival, clip=None)
    rows = trainer.writer.tables["steps"]
    assert all(row["clipped_norm"] <= row["grad_norm"] for row in rows)
    assert rows[0]["clipped_norm"] == pytest.approx(0.5)
    assert rows[0]["grad_norm"] > 0.5


@pytest.mark.parametrize("kind", ["zclip", "adagc"])
def test_a_second_clip_before_it_is_refused(kind):
    run = tiny_run(interventions=[{"kind": kind}])
    with pytest.raises(
        BadInput, match=f"'{kind}' replaces the global clip; optimizer.clip must be null, got 1"
    ):
        run.interventions[0].check(run)
    ZClip().check(tiny_run(optimizer={"clip": None}))


def test_qk_clip_s_first_clipping_is_its_firing(tmp_path):
    trainer = train(tmp_path, {"kind": "qk_clip", "threshold": 1.0})
    (event,) = events(trainer, "qk_clip_fired")
    step = trainer.hooks[0].fire_step
    assert event["step"] == step > 0
    assert json.loads(event["detail"])["logit"] > 1.0
    assert [row["guard_active"] for row in trainer.writer.tables["steps"]] == [s > step for s in range(10)]
    dormant = train(tmp_path, {"kind": "qk_clip", "threshold": 1e6})
    plain = train(tmp_path)
    assert all(equal_bits(p, weights(dormant)[name]) for name, p in weights(plain).items())


def test_qk_clip_is_refused_where_queries_are_normalised():
    with pytest.raises(BadInput, match=r"cannot reach logits under model.qk_norm='layernorm'; allowed: none"):
        QKClip().check(tiny_run(model={"qk_norm": "layernorm"}))


def test_spam_s_resets_are_events(tmp_path):
    trainer = train(tmp_path, {"kind": "spam", "reset_every": 4, "rewarm": 2, "settle": 1})
    assert [row["step"] for row in events(trainer, "moments_reset")] == [3, 7]
    rows = trainer.writer.tables["steps"]
    assert rows[3]["lr"] == rows[2]["lr"], "the schedule's"
    assert rows[3]["update_norm"] < 0.1 * rows[2]["update_norm"]


def test_spam_needs_adam():
    with pytest.raises(BadInput, match=r"optimizer.name must be adamw, got 'sgd'"):
        SPAM().check(tiny_run(optimizer={"name": "sgd"}))
