"""Attention that no guard can see, found in the graph of the first forward and refused."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from qkpipe.errors import BadInput
from qkpipe.guard import QKGuard
from qkpipe.guard.search import Search

PAST = torch.ones(6, 6, dtype=torch.bool).tril()


def own_softmax(q, k, v):
    return torch.softmax((q @ k.mT / 3).masked_fill(~PAST, -math.inf), -1) @ v


def einsum(q, k, v):
    """With a soft-cap, a cast and dropout between."""
    scores = 20 * torch.tanh(torch.einsum("bhqd,bhkd->bhqk", q, k) / 20)
    weights = F.dropout(scores.float().softmax(-1).to(q.dtype), 0.1)
    return torch.einsum("bhqk,bhkd->bqhd", weights, v).transpose(1, 2)


def weights_wanted(q, k, v):
    layer = nn.MultiheadAttention(8, 2, batch_first=True)
    return layer(q[0], k[0], v[0], need_weights=True)[0]


class FlashAttnFunc(torch.autograd.Function):
    """Stands for a kernel of someone else's."""

    @staticmethod
    def forward(ctx, q, k, v):
        return q + k + v

    @staticmethod
    def backward(ctx, grad):
        return grad, grad, grad


def router(q, k, v):
    """Of a mixture of experts: a softmax, but of no product of queries and keys."""
    best = nn.Linear(8, 6)(q).softmax(-1).topk(2, -1).values
    return best.sum(-1, keepdim=True) * v


def linear_attention(q, k, v):
    return q.softmax(-1) @ (k.softmax(-2).mT @ v)


def log_softmax(q, k, v):
    return torch.log_softmax(q @ k.mT, -1) @ v


def inputs():
    return [
        torch.randn(2, 2, 6, 8, generator=torch.Generator().manual_seed(s)).requires_grad_() for s in range(3)
    ]


@pytest.mark.parametrize(
    "attend", [own_softmax, einsum, weights_wanted, FlashAttnFunc.apply, F.scaled_dot_product_attention]
)
def test_attention_is_recognised(attend):
    search = Search()
    search.look("here", {"output": (attend(*inputs()), None)})
    assert search.found == ["here"]


@pytest.mark.parametrize("other", [router, linear_attention, log_softmax])
def test_what_has_no_logits_is_not(other):
    search = Search()
    search.look("here", other(*inputs()))
    assert search.graphs and not search.found


class Sub(nn.Module):
    def __init__(self, attend):
        super().__init__()
        self.qkv, self.attend = nn.Linear(8, 24), attend

    def forward(self, x):
        q, k, v = (y.unflatten(-1, (2, 4)).transpose(1, 2) for y in self.qkv(x).split(8, -1))
        return self.attend(q, k, v).transpose(1, 2).flatten(2)


class Mixed(nn.Module):
    """A guarded layer, one with its own softmax, and a guarded one."""

    def __init__(self, recompute=False):
        super().__init__()
        self.first, self.middle, self.last = Sub(F.scaled_dot_product_attention), Sub(own_softmax), Sub(sdpa)
        self.recompute = recompute

    def forward(self, x):
        x = x + self.first(x)
        x = x + (checkpoint(self.middle, x, use_reentrant=False) if self.recompute else self.middle(x))
        return {"hidden": self.last(x)}


def sdpa(q, k, v):
    """torch's fallback writes out the very pattern that an own softmax does."""
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, k, v)


def x():
    return torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("recompute", [False, True])
def test_a_layer_beside_guarded_ones_is_refused_by_name(recompute):
    model = Mixed(recompute)
    guard = QKGuard(model)
    with torch.no_grad():
        model(x())  # without a graph nothing is known yet
    assert guard.unguarded is None
    with pytest.raises(BadInput, match=r"attention in middle cannot be intercepted"):
        model(x())
    assert not model._forward_hooks and "qk_guard" not in model.state_dict()
    model(x())


def test_allowed_it_is_named_and_the_rest_is_guarded():
    model = Mixed()
    guard = QKGuard(model, threshold=1e-6, allow_unguarded=True)
    for _ in range(2):
        model(x())
    assert guard.unguarded == ["middle"] and guard.layers == ["first", "last"] and guard.active
    guard.detach()
