"""Learning-rate schedule and optimizer groups."""

import itertools
import math

import pytest
import torch

from qkpipe.config.models import OptimizerConfig
from qkpipe.train.optimizer import learning_rate, make_optimizer
from tiny_training import tiny_trainer, weights


def schedule(steps, **changes):
    config = OptimizerConfig(**{"lr": 1.0, "warmup": 4, **changes})
    return [learning_rate(step, steps, config) for step in range(steps)]


def test_constant_after_linear_warm_up():
    assert schedule(7) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0]


def test_no_warm_up():
    assert schedule(3, warmup=0) == [1.0, 1.0, 1.0]


def test_cosine_ends_at_its_fraction_of_the_peak():
    rates = schedule(11, warmup=2, schedule="cosine", final_lr_fraction=0.1)
    assert rates[:3] == [0.5, 1.0, 1.0]
    assert rates[6] == pytest.approx(0.1 + 0.9 * 0.5, rel=1e-12), "half-way down at half time"
    assert rates[-1] == pytest.approx(0.1)
    assert all(a > b for a, b in itertools.pairwise(rates[2:]))


@pytest.mark.parametrize("steps", [1, 2, 4, 5])
def test_short_runs_stay_in_range(steps):
    assert all(0 < rate <= 1 for rate in schedule(steps, schedule="cosine"))


def test_rate_reaches_the_optimizer(tmp_path):
    """Plain SGD: the update is the rate times the clipped gradient."""
    optimizer = {"name": "sgd", "momentum": 0.0, "lr": 0.5, "warmup": 4, "clip": 0.01}
    trainer = tiny_trainer(tmp_path, optimizer=optimizer)
    for _ in range(6):
        trainer.step()
    rows = trainer.writer.tables["steps"]
    assert [row["lr"] for row in rows] == [0.125, 0.25, 0.375, 0.5, 0.5, 0.5]
    for row in rows:
        assert row["update_norm"] == pytest.approx(row["lr"] * 0.01, rel=1e-3)


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_weight_decay_is_for_matrices_alone(tmp_path, name):
    """With no gradient at all, only decay moves a weight."""
    trainer = tiny_trainer(tmp_path, optimizer={"name": name, "lr": 0.1, "weight_decay": 0.5, "warmup": 0})
    before = weights(trainer)
    for parameter in trainer.parameters:
        parameter.grad = torch.zeros_like(parameter)
    trainer.optimizer.step()
    for key, after in weights(trainer).items():
        factor = 1 - 0.1 * 0.5 if after.dim() == 2 else 1.0
        torch.testing.assert_close(after, before[key] * factor)


def test_momentum(tmp_path):
    trainer = tiny_trainer(tmp_path, optimizer={"name": "sgd", "momentum": 0.9, "lr": 1.0, "warmup": 0})
    parameter = trainer.parameters[0]
    start = parameter.detach().clone()
    for _ in range(3):
        for p in trainer.parameters:
            p.grad = torch.full_like(p, 1e-3)
        trainer.optimizer.step()
    moved = 1e-3 * (1 + 1.9 + 2.71)
    torch.testing.assert_close(start - parameter.detach(), torch.full_like(start, moved), rtol=1e-4, atol=0)
    assert math.isfinite(moved)


@pytest.mark.parametrize(("name", "theirs"), [("adamw", torch.optim.AdamW), ("sgd", torch.optim.SGD)])
def test_updates_and_state_are_those_of_torchs_own(name, theirs):
    torch.manual_seed(0)
    ours, copy = torch.nn.Linear(4, 3), torch.nn.Linear(4, 3)
    copy.load_state_dict(ours.state_dict())
    optimizer = make_optimizer(ours, OptimizerConfig(name=name, lr=1e-2))
    keep = {key: value for key, value in optimizer.defaults.items() if key != "decoupled_weight_decay"}
    groups = [{"params": [copy.weight]}, {"params": [copy.bias]}]
    other = theirs(groups, **keep | {"weight_decay": optimizer.param_groups[0]["weight_decay"]})
    for _ in range(3):
        x = torch.randn(5, 4)
        for model, own in ((ours, optimizer), (copy, other)):
            own.zero_grad()
            model(x).square().sum().backward()
            own.step()
    assert torch.equal(ours.weight, copy.weight) and torch.equal(ours.bias, copy.bias)
    assert str(optimizer.state_dict()["state"]) == str(other.state_dict()["state"])
