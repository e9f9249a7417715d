"""Linear layers with a weight gradient of their own, unit RMS, and rotary positions."""

import math

import pytest
import torch

from qkpipe.model.linear import Linear
from qkpipe.model.qk_norm import unit_rms
from qkpipe.model.rope import rotate
from tiny_training import equal_bits


def test_own_weight_gradient_leaves_output_and_input_gradient_alone():
    torch.manual_seed(0)
    x = torch.randn(2, 5, 6)
    weight = torch.randn(4, 6)
    results = []
    for own in (None, lambda dy, x: 2 * dy.mT @ x):
        layer, x_own = Linear(6, 4), x.clone().requires_grad_()
        layer.weight.data.copy_(weight)
        layer.weight_gradient = own
        y = layer(x_own)
        y.square().sum().backward()
        results.append((y.detach(), x_own.grad, layer.weight.grad))
    (y, dx, dW), (y_own, dx_own, dW_own) = results
    assert equal_bits(y, y_own)
    assert equal_bits(dx, dx_own)
    torch.testing.assert_close(dW_own, 2 * dW)


def test_own_weight_gradient_sees_flat_tokens():
    seen = []
    layer = Linear(6, 4)
    layer.weight_gradient = lambda dy, x: seen.append((dy.shape, x.shape)) or torch.zeros(4, 6)
    layer(torch.ones(2, 5, 6)).sum().backward()
    assert seen == [((10, 4), (10, 6))]


@pytest.mark.parametrize("size", [1e-15, 1.0, 1e15])
def test_unit_rms(size):
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(0)) * size
    y = unit_rms(x)
    torch.testing.assert_close(y.square().mean(-1), torch.ones(3))
    torch.testing.assert_close(y, (x.double() / x.double().square().mean(-1, keepdim=True).sqrt()).float())


@pytest.mark.parametrize("size", [0.0, 1e-45, 1e-30, 1e30, 3e38])
def test_unit_rms_is_bounded_whatever_comes(size):
    y = unit_rms(torch.full((1, 8), size))
    assert y.isfinite().all()
    assert float(y.square().mean()) <= 1 + 1e-6


def test_unit_rms_keeps_the_type():
    assert unit_rms(torch.ones(2, 4, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_rotation_keeps_norms_and_makes_products_relative():
    torch.manual_seed(0)
    q, k = torch.randn(2, 8).double()
    rows = lambda x: rotate(x.float().expand(1, 1, 12, 8)).double()[0, 0]  # noqa: E731
    q_TK, k_TK = rows(q), rows(k)
    torch.testing.assert_close(q_TK.norm(dim=-1), q.norm().expand(12), rtol=1e-6, atol=0)
    torch.testing.assert_close(q_TK[0], q.float().double())
    products = q_TK @ k_TK.mT
    for distance in range(-8, 9):
        diagonal = products.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-5, atol=1e-5)
    assert not math.isclose(products[0, 0], products[0, 5], rel_tol=1e-2)


def test_rotation_by_hand():
    """Pairs are (i, i + K/2); the slower pair turns by 10000**(-2/4) = 0.01 a position."""
    x = torch.tensor([1.0, 1.0, 0.0, 0.0]).expand(1, 1, 3, 4)
    expected = [[math.cos(t), math.cos(0.01 * t), math.sin(t), math.sin(0.01 * t)] for t in range(3)]
    torch.testing.assert_close(rotate(x)[0, 0], torch.tensor(expected))
