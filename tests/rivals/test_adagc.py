"""AdaGC against its definition, computed by hand."""

import math

import pytest
import torch

from qkpipe.errors import BadInput
from qkpipe.rivals import AdaGC


@pytest.fixture
def pair():
    return [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]


def step(optimizer, pair, *gradients):
    """Offer one gradient a tensor; returns what the optimizer used."""
    before = [float(p.detach()) for p in pair]
    for p, gradient in zip(pair, gradients, strict=True):
        p.grad = torch.tensor([gradient])
    optimizer.step()
    return [b - float(p.detach()) for b, p in zip(before, pair, strict=True)]


def make(pair, **options):
    optimizer = torch.optim.SGD(pair, lr=1.0)
    return optimizer, AdaGC(optimizer, **{"warmup": 2, **options})


def test_the_warm_up_clips_globally_and_keeps_the_smallest_norms(pair):
    optimizer, clip = make(pair)
    assert step(optimizer, pair, 3.0, 4.0) == pytest.approx([0.6, 0.8])
    assert clip.clipped_norm == pytest.approx(1.0)
    assert step(optimizer, pair, 0.7, 0.1) == pytest.approx([0.7, 0.1])
    assert clip.state_dict()["gamma"] == pytest.approx({0: 0.6, 1: 0.1})


def test_then_each_tensor_is_clipped_by_its_own_history(pair):
    optimizer, clip = make(pair)
    step(optimizer, pair, 3.0, 4.0)
    step(optimizer, pair, 0.7, 0.1)
    # gamma is (0.6, 0.1): the limits are 0.63 and 0.105.
    assert step(optimizer, pair, -5.0, 0.05) == pytest.approx([-0.63, 0.05])
    expected = {0: 0.98 * 0.6 + 0.02 * 0.63, 1: 0.98 * 0.1 + 0.02 * 0.05}
    assert clip.state_dict()["gamma"] == pytest.approx(expected)
    assert clip.clipped_norm == pytest.approx(math.hypot(0.63, 0.05))


@pytest.mark.parametrize("useless", [0.0, math.inf, math.nan])
def test_a_useless_gradient_is_not_learnt(pair, useless):
    optimizer, clip = make(pair, warmup=1)
    step(optimizer, pair, 0.5, 0.5)
    step(optimizer, pair, useless, 0.5)
    assert clip.state_dict()["gamma"][0] == 0.5
    assert math.isfinite(clip.state_dict()["gamma"][1])


def test_a_tensor_met_late_starts_its_history_then(pair):
    optimizer, clip = make(pair, warmup=1)
    pair[0].grad = torch.tensor([0.5])
    optimizer.step()
    assert step(optimizer, pair, 0.5, 9.0)[1] == pytest.approx(9.0)
    assert clip.state_dict()["gamma"][1] == 9.0


def test_state_and_detach(pair):
    optimizer, clip = make(pair)
    step(optimizer, pair, 3.0, 4.0)
    step(optimizer, pair, 0.7, 0.1)
    other_optimizer, other = make(pair)
    other.load_state_dict(clip.state_dict())
    clip.detach()
    assert step(other_optimizer, pair, -5.0, 0.05) == pytest.approx([-0.63, 0.05])
    assert step(optimizer, pair, -5.0, 0.05) == pytest.approx([-5.0, 0.05])


def test_options_out_of_range(pair):
    with pytest.raises(BadInput, match=r"AdaGC: relative=1.05, decay=1.0"):
        make(pair, decay=1.0)
