"""ZClip against its definition, computed by hand."""

import math

import pytest
import torch

from qkpipe.errors import BadInput
from qkpipe.rivals import ZClip


@pytest.fixture
def parameter():
    return torch.nn.Parameter(torch.zeros(2))


def step(optimizer, parameter, size):
    """Offer a gradient of this norm; returns the norm that the optimizer used."""
    parameter.grad = torch.tensor([0.6, 0.8]) * size
    before = parameter.detach().clone()
    optimizer.step()
    return float((parameter.detach() - before).norm())


def make(parameter, **options):
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    return optimizer, ZClip(optimizer, **{"warmup": 2, "max_norm": None, **options})


def test_an_outlier_is_clipped_to_mu_plus_z_star_sd_over_z_by_z_star(parameter):
    optimizer, clip = make(parameter)
    assert [step(optimizer, parameter, n) for n in (1.0, 3.0)] == pytest.approx([1.0, 3.0])
    # mean 2, variance 1. A norm of 7 has z = 5 > 2.5: clipped to 2 + 2.5 * 1 / (5 / 2.5) = 3.25.
    assert step(optimizer, parameter, 7.0) == pytest.approx(3.25)
    assert clip.clipped_norm == pytest.approx(3.25)
    # What was let through is learnt: mean 0.97 * 2 + 0.03 * 3.25 = 2.0375, variance 0.97 + 0.03 * (3.25 - 2.0375)^2.
    state = clip.state_dict()
    assert state["mean"] == pytest.approx(2.0375)
    assert state["variance"] == pytest.approx(0.97 + 0.03 * 1.2125**2)


def test_a_norm_within_z_star_passes(parameter):
    optimizer, clip = make(parameter)
    for n in (1.0, 3.0):
        step(optimizer, parameter, n)
    assert step(optimizer, parameter, 4.5) == pytest.approx(4.5), "z is 2.5, not above it"
    assert clip.state_dict()["mean"] == pytest.approx(0.97 * 2 + 0.03 * 4.5)


def test_the_warm_up_judges_nothing_and_the_constant_clip_holds_throughout(parameter):
    optimizer, clip = make(parameter, max_norm=1.5)
    assert [step(optimizer, parameter, n) for n in (1.0, 3.0, 2.0)] == pytest.approx([1.0, 1.5, 1.5])
    # The mean and the variance are those of the norms before the constant clip.
    assert clip.state_dict()["mean"] == pytest.approx(0.97 * 2 + 0.03 * 2)


def test_equal_norms_have_no_spread_and_a_larger_one_is_clipped_to_the_mean(parameter):
    optimizer, _ = make(parameter)
    for n in (2.0, 2.0):
        step(optimizer, parameter, n)
    assert step(optimizer, parameter, 5.0) == pytest.approx(2.0)


@pytest.mark.parametrize("size", [0.0, math.inf, math.nan])
def test_a_useless_norm_is_left_alone_and_not_learnt(parameter, size):
    optimizer, clip = make(parameter)
    for n in (1.0, 3.0):
        step(optimizer, parameter, n)
    before = clip.state_dict()
    given = torch.tensor([0.6, 0.8]) * size
    parameter.grad = given.clone()
    optimizer.step()
    assert torch.equal(parameter.grad, given) or not given.isfinite().all()
    assert clip.state_dict() == before


def test_the_norm_is_over_all_parameters():
    pair = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    optimizer = torch.optim.SGD(pair, lr=1.0)
    clip = ZClip(optimizer, max_norm=None)
    pair[0].grad, pair[1].grad = torch.tensor([3.0]), torch.tensor([4.0])
    optimizer.step()
    assert clip.clipped_norm == pytest.approx(5.0)


def test_state_and_detach(parameter):
    optimizer, clip = make(parameter)
    for n in (1.0, 3.0):
        step(optimizer, parameter, n)
    other_optimizer, other = make(parameter)
    other.load_state_dict(clip.state_dict())
    clip.detach()
    assert step(other_optimizer, parameter, 7.0) == pytest.approx(3.25)
    assert step(optimizer, parameter, 7.0) == pytest.approx(7.0)


def test_options_out_of_range(parameter):
    with pytest.raises(BadInput, match="ZClip: z_threshold=0"):
        make(parameter, z_threshold=0)
