"""Soft-cap of logits against its definition, and in FlexAttention."""

import math

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

from qkpipe.errors import BadInput
from qkpipe.numerics import streaming_attention
from qkpipe.rivals import SoftCap


def test_by_hand():
    scores = torch.tensor([0.0, 25.0, -50.0, 1e6])
    wanted = [0.0, 50 * math.tanh(0.5), -50 * math.tanh(1.0), 50.0]
    assert SoftCap()(scores, *[torch.zeros(())] * 4).tolist() == pytest.approx(wanted)


def test_flex_attention_under_it_is_our_streaming_attention_under_it():
    q, k, v = torch.randn(3, 2, 2, 16, 8, generator=torch.Generator().manual_seed(0)) * 4
    ours = streaming_attention(q, k, v, causal=False, softcap=5.0)
    assert not torch.allclose(ours, streaming_attention(q, k, v, causal=False), atol=1e-2)
    assert torch.allclose(flex_attention(q, k, v, score_mod=SoftCap(5.0)), ours, atol=1e-5)


@pytest.mark.parametrize("cap", [0.0, -1.0, math.inf, math.nan])
def test_out_of_range(cap):
    with pytest.raises(BadInput, match="cap must be a finite number above 0"):
        SoftCap(cap)
