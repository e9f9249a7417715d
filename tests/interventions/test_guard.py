"""QK-Guard as an arm: dormant training is unguarded training, and every mode fires at the same step."""

import json

import pytest

from tiny_training import FAULTY, STREAM, equal_bits, tiny_trainer, weights

HOT = {"optimizer": {"lr": 5e-2}, "train": {"steps": 12}}


def guard(threshold, **changes):
    return {"kind": "guard", "threshold": threshold, **changes}


def train(tmp_path, *interventions, attention=FAULTY, **changes):
    trainer = tiny_trainer(
        tmp_path, attention=attention, interventions=list(interventions), **{**HOT, **changes}
    )
    for _ in range(trainer.run.train.steps):
        trainer.step()
    return trainer


def events(trainer, kind="guard_fired"):
    return [row for row in trainer.writer.tables["events"] if row["kind"] == kind]


def same(a, b):
    ours, theirs = weights(a), weights(b)
    rows = a.writer.tables["steps"] == b.writer.tables["steps"]
    return rows and all(equal_bits(ours[name], theirs[name]) for name in ours)


@pytest.fixture(scope="module", params=[{"kind": "sdpa"}, STREAM, FAULTY], ids=["sdpa", "stream", "faulty"])
def unguarded(request, tmp_path_factory):
    return request.param, train(tmp_path_factory.mktemp("unguarded"), attention=request.param)


def test_a_dormant_guard_is_not_there(unguarded, tmp_path):
    attention, plain = unguarded
    guarded = train(tmp_path, guard(1e6), attention=attention)
    assert same(plain, guarded)
    assert not events(guarded)
    assert guarded.hooks[0].fire_step is None


def test_log_mode_changes_nothing(unguarded, tmp_path):
    attention, plain = unguarded
    logging = train(tmp_path, guard(1.0, mode="log"), attention=attention)
    assert logging.hooks[0].fire_step is not None
    assert same(plain, logging)


def crossing(trainer):
    """(step, layer, head, largest logit) of the first row whose logit passes 1."""
    rows = sorted(trainer.writer.tables["heads"], key=lambda row: (row["step"], -row["max_logit"]))
    return next((r["step"], r["layer"], r["head"], r["max_logit"]) for r in rows if r["max_logit"] > 1.0)


@pytest.mark.parametrize("mode", ["act", "log"])
def test_fires_at_the_step_whose_logit_crosses(tmp_path, mode):
    """Telemetry of every step, unguarded, says which; acting and logging arms agree."""
    everything = {"train": {"steps": 12, "telemetry_every": 1}}
    step, layer, head, logit = crossing(train(tmp_path, **everything))
    assert 0 < step < 11, "else nothing is tested"
    trainer = train(tmp_path, guard(1.0, mode=mode), **everything)
    (event,) = events(trainer)
    assert event["step"] == trainer.hooks[0].fire_step == step
    detail = json.loads(event["detail"])
    assert (detail["layer"], detail["head"]) == (layer, head)
    assert detail["logit"] == pytest.approx(logit, rel=1e-6)
    assert (detail["threshold"], detail["mode"]) == (1.0, mode)
    active = [row["guard_active"] for row in trainer.writer.tables["steps"]]
    assert active == [mode == "act" and s > step for s in range(12)], "from the next forward on"


def test_acting_contains_the_logits(tmp_path):
    trainer = train(tmp_path, guard(1.0), train={"steps": 12, "telemetry_every": 1})
    fired = trainer.hooks[0].fire_step
    bound = 8**0.5 * (1 + 2**-8) ** 2  # q and k are bf16 in this attention
    after = [row for row in trainer.writer.tables["heads"] if row["step"] > fired]
    assert after
    assert all(row["max_logit"] <= bound for row in after)
    assert any(row["max_logit_raw"] != row["max_logit"] for row in after)


def test_accumulation_is_sensed_over_its_micro_batches(tmp_path):
    """The maximum over all sequences of a step: the same whether they come at once or one by one."""
    fired = []
    for accumulation in (1, 4):
        train_config = {"steps": 12, "accumulation": accumulation, "batch_size": 4 // accumulation}
        trainer = train(tmp_path, guard(1.0), attention=STREAM, train=train_config)
        fired.append(trainer.hooks[0].guard.firing)
    assert fired[0].logit == pytest.approx(fired[1].logit, rel=1e-3)
    assert (fired[0].step, fired[0].layer, fired[0].head) == (fired[1].step, fired[1].layer, fired[1].head)


def test_sensing_every_few_steps(tmp_path):
    every_step = train(tmp_path, guard(1.0)).hooks[0].fire_step
    sparse = train(tmp_path, guard(1.0, every=5)).hooks[0].fire_step
    assert sparse % 5 == 0
    assert sparse >= every_step
