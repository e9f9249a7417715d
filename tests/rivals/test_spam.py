"""SPAM against its definition, computed by hand."""

import math

import pytest
import torch

from qkpipe.errors import BadInput
from qkpipe.rivals import SPAM


@pytest.fixture
def parameter():
    return torch.nn.Parameter(torch.zeros(3))


def make(parameter, **options):
    optimizer = torch.optim.AdamW([parameter], lr=0.1, betas=(0.9, 0.5), weight_decay=0.0)
    return optimizer, SPAM(optimizer, **{"spike": 4.0, "reset_every": 5, "rewarm": 3, "settle": 1, **options})


def step(optimizer, parameter, *gradient):
    parameter.grad = torch.tensor(gradient)
    optimizer.step()
    return parameter.grad.tolist()


def test_a_spike_is_cut_to_the_root_of_theta_v_with_its_sign(parameter):
    optimizer, _ = make(parameter)
    step(optimizer, parameter, 1.0, 1.0, 1.0)
    v = optimizer.state[parameter]["exp_avg_sq"].clone()
    assert v.tolist() == pytest.approx([0.5, 0.5, 0.5])
    # theta v = 2: elements with g^2 > 2 become sign(g) sqrt(2).
    assert step(optimizer, parameter, 1.4, -9.0, 9.0) == pytest.approx([1.4, -math.sqrt(2), math.sqrt(2)])
    after = optimizer.state[parameter]["exp_avg_sq"].tolist()
    assert after == pytest.approx([0.25 + 0.98, 0.25 + 1.0, 0.25 + 1.0]), "the moments see what was cut"


def test_the_moments_start_anew_every_few_steps_and_bias_correction_counts_on(parameter):
    resets = []
    optimizer, spam = make(parameter, on_reset=lambda: resets.append(spam.since_reset))
    for _ in range(4):
        step(optimizer, parameter, 1.0, 1.0, 1.0)
    assert not resets
    step(optimizer, parameter, 2.0, 2.0, 2.0)
    state = optimizer.state[parameter]
    assert resets == [0]
    assert state["exp_avg"].tolist() == pytest.approx([0.2] * 3)
    assert state["exp_avg_sq"].tolist() == pytest.approx([2.0] * 3)
    assert float(state["step"]) == 5


def test_the_learning_rate_is_re_warmed_and_given_back(parameter):
    optimizer, _ = make(parameter)
    used = []
    optimizer.register_step_pre_hook(lambda *_: used.append(optimizer.param_groups[0]["lr"]))
    for _ in range(9):
        step(optimizer, parameter, 1.0, 1.0, 1.0)
        assert optimizer.param_groups[0]["lr"] == 0.1
    warm = [1 - 0.99 * (1 + math.cos(math.pi * c / 4)) / 2 for c in range(3)]
    assert used == pytest.approx([0.1] * 4 + [0.1 * w for w in warm] + [0.1] * 2)
    assert warm[0] == pytest.approx(0.01)


def test_nothing_is_cut_while_the_second_moment_settles(parameter):
    optimizer, _ = make(parameter, settle=2, reset_every=4)
    used = [step(optimizer, parameter, *[10.0**n] * 3)[0] for n in range(6)]
    # Steps 1, 4 and 5 are the first after a start; step 2 and 3 are judged.
    v = 0.5
    cut = math.sqrt(4 * v)
    assert used[:2] == pytest.approx([1.0, cut])
    assert used[2] == pytest.approx(math.sqrt(4 * (0.5 * v + 0.5 * cut**2)))
    assert used[3:5] == pytest.approx([1e3, 1e4])
    assert used[5] < 1e5


def test_state_and_detach(parameter):
    optimizer, spam = make(parameter)
    for _ in range(4):
        step(optimizer, parameter, 1.0, 1.0, 1.0)
    spam.detach()
    resumed = SPAM(optimizer, reset_every=5)
    resumed.load_state_dict(spam.state_dict())
    step(optimizer, parameter, 2.0, 2.0, 2.0)
    assert optimizer.state[parameter]["exp_avg"].tolist() == pytest.approx([0.2] * 3)
    resumed.detach()
    assert step(optimizer, parameter, 1e6, 1.0, 1.0)[0] == 1e6


def test_needs_adams_moments(parameter):
    with pytest.raises(BadInput, match="SPAM: SGD has no Adam moments; allowed: Adam, AdamW"):
        SPAM(torch.optim.SGD([parameter], lr=0.1))
