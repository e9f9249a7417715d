"""Streaming attention by its public call (on a CPU with numba, the compiled path) against float64."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

from qkpipe.errors import BadInput
from qkpipe.numerics import Rounding, StreamPrecision, StreamRepair, attention_stats, streaming_attention

torch.set_num_threads(1)


def tensors(B=2, H=2, H_kv=None, Tq=37, Tk=None, D=8, seed=0, amplitude=1.0):
    g = torch.Generator().manual_seed(seed)
    shapes = [(B, H, Tq, D), (B, H_kv or H, Tk or Tq, D), (B, H_kv or H, Tk or Tq, D), (B, H, Tq, D)]
    q, k, v, do = (torch.randn(shape, generator=g) for shape in shapes)
    return q * amplitude, k, v, do


def with_gradients(function, q, k, v, do):
    q, k, v = (x.detach().clone().requires_grad_() for x in (q, k, v))
    out = function(q, k, v)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), do)]


def truth(q, k, v, do, causal=True, scale=None):
    q, k, v, do = (x.double() for x in (q, k, v, do))
    return with_gradients(
        lambda q, k, v: F.scaled_dot_product_attention(
            q, k, v, is_causal=causal, scale=scale, enable_gqa=True
        ),
        q,
        k,
        v,
        do,
    )


def probabilities(q, k, causal, scale):
    """Logits and softmax in float64, straightforwardly: (B, H, Tq, Tk)."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    logits = q.double() @ k.double().mT * scale
    if causal:
        logits = logits.masked_fill(~torch.ones(logits.shape[-2:], dtype=torch.bool).tril(), -torch.inf)
    return logits, logits.softmax(-1)


SHAPES = [
    {},
    {"B": 1, "H": 4, "H_kv": 2, "Tq": 20, "Tk": 33, "D": 16, "causal": False},
    {"B": 2, "H": 3, "H_kv": 1, "Tq": 65, "D": 5},
    {"B": 1, "H": 1, "Tq": 1, "D": 1},
]


@pytest.mark.parametrize("tile", [1, 7, 16, 100])
@pytest.mark.parametrize("shape", SHAPES)
def test_in_fp32_it_is_attention(shape, tile):
    shape = dict(shape)
    causal = shape.pop("causal", True)
    q, k, v, do = tensors(**shape)
    found = with_gradients(lambda *x: streaming_attention(*x, causal=causal, tile=tile), q, k, v, do)
    for got, expected in zip(found, truth(q, k, v, do, causal)):
        assert (got - expected).abs().max() <= 2e-6 * max(1, expected.abs().max())


def test_bf16_error_is_at_most_twice_that_of_plain_bf16():
    q, k, v, do = (x.bfloat16().float() for x in tensors(Tq=64, D=32))
    mask = ~torch.ones(64, 64, dtype=torch.bool).tril()

    def plain(q, k, v):
        q, k, v = (x.bfloat16() for x in (q, k, v))
        s = (q @ k.mT * 32**-0.5).masked_fill(mask, -torch.inf)
        return (s.softmax(-1) @ v).float()

    found = with_gradients(
        lambda *x: streaming_attention(*x, tile=64, precision=StreamPrecision.uniform(7)), q, k, v, do
    )
    for got, low, exact in zip(found, with_gradients(plain, q, k, v, do), truth(q, k, v, do)):
        bound = 2 * (low - exact).abs().max() + 2.0**-8 * exact.abs().max()
        assert (got - exact).abs().max() <= bound


@pytest.mark.parametrize("sign", [-1, 1])
def test_tied_maxima_bias_bf16_and_not_fp32_carries(sign):
    """The predecessor's mechanism: where P is exactly 1 at two keys, P V is always rounded the same way."""
    g = torch.Generator().manual_seed(0)
    rows = 4000
    q = torch.ones(1, rows, 1, 1)
    k = torch.cat([torch.full((1, rows, 2, 1), 3.0), -5 - torch.rand(1, rows, 6, 1, generator=g)], dim=2)
    v = (sign * (1.5 + torch.rand(1, rows, 8, 1, generator=g))).bfloat16().float()
    k = k.bfloat16().float()
    true = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), scale=1.0)

    def bias(precision):
        out = streaming_attention(q, k, v, causal=False, scale=1.0, tile=8, precision=precision)
        return (out - true).mean().item()

    low = StreamPrecision.uniform(7)
    carried = dict.fromkeys(("acc", "l", "m", "pv", "block_sum", "o", "io"), Rounding())
    assert 0.002 < sign * bias(low) < 0.01
    assert abs(bias(replace(low, **carried))) < 5e-5


@pytest.mark.parametrize("delta", ["o", "o_fp32"])
def test_residual_of_low_precision(delta):
    q, k, v, do = tensors(Tq=128, D=16)

    def residual(precision, repair):
        q_ = q.clone().requires_grad_()
        out, stats = streaming_attention(
            q_, k, v, tile=16, precision=precision, repair=repair, return_stats=True
        )
        assert stats.residual_r.isnan().all() and stats.residual_mean.isnan().all()
        out.backward(do)
        return stats.residual_r.mean().item()

    by_bits = [
        residual(StreamPrecision(acc=m, l=m, o=m, io=23), StreamRepair(delta=delta)) for m in range(2, 8)
    ]
    assert all(1.5 < wide / narrow < 2.7 for wide, narrow in pairwise(by_bits))
    from_p = residual(StreamPrecision(acc=2, l=2, o=2, io=23), StreamRepair(delta="p"))
    assert from_p < 1e-6 < by_bits[-1]


def test_delta_gain_scales_the_residual():
    q, k, v, do = tensors(Tq=64, D=16)
    residuals = {}
    for gain in (1.0, 8.0):
        q_ = q.clone().requires_grad_()
        out, stats = streaming_attention(
            q_, k, v, tile=16, precision=StreamPrecision(acc=7, l=7, io=23), repair=StreamRepair(delta_gain=gain),
            return_stats=True,
        )  # fmt: skip
        out.backward(do)
        residuals[gain] = stats.residual_mean
    torch.testing.assert_close(residuals[8.0], 8 * residuals[1.0], rtol=1e-2, atol=1e-6)


def test_out_gain_amplifies_the_output_error():
    q, k, v, do = tensors(Tq=64, D=16)
    exact = truth(q, k, v, do)[0]
    precision = StreamPrecision(acc=7, l=7, io=23)
    error = streaming_attention(q, k, v, tile=16, precision=precision) - exact
    amplified = (
        streaming_attention(q, k, v, tile=16, precision=precision, repair=StreamRepair(out_gain=16)) - exact
    )
    torch.testing.assert_close(amplified, 16 * error, rtol=1e-2, atol=1e-5)
    none = streaming_attention(q, k, v, tile=16, precision=precision, repair=StreamRepair(out_gain=0)) - exact
    assert none.abs().max() < 2e-6


def test_gain_of_a_rounding_amplifies_its_error_alone():
    """One rounding, of the output: the error is gain times that of the plain rounding, exactly where both are powers of two."""
    q, k, v, _ = tensors(Tq=64, D=16)
    plain = streaming_attention(q, k, v, tile=16)
    error = streaming_attention(q, k, v, tile=16, precision=StreamPrecision(o=7)) - plain
    gained = StreamPrecision(o=Rounding(7, gain=32))
    amplified = streaming_attention(q, k, v, tile=16, precision=gained) - plain
    torch.testing.assert_close(amplified, 32 * error, rtol=1e-6, atol=1e-7)
    none = streaming_attention(q, k, v, tile=16, precision=StreamPrecision.uniform(2, io=23, mode="even"))
    assert (none - plain).abs().max() > 1e-2
    for bad in (-1.0, torch.inf, "2"):
        with pytest.raises(BadInput, match="gain"):
            Rounding(7, gain=bad)


@pytest.mark.parametrize("block", [4, 12, 1000])
@pytest.mark.parametrize("shape", SHAPES)
def test_merged_blocks_are_attention(shape, block):
    shape = dict(shape)
    causal = shape.pop("causal", True)
    q, k, v, do = tensors(**shape)
    found = with_gradients(
        lambda *x: streaming_attention(*x, causal=causal, tile=4, block=block), q, k, v, do
    )
    for got, expected in zip(found, truth(q, k, v, do, causal)):
        assert (got - expected).abs().max() <= 3e-6 * max(1, expected.abs().max())


def test_only_block_outputs_rounded_is_a_weighted_sum_of_rounded_outputs():
    """Ring attention by hand, in float64, from the outputs and log-sum-exps of the blocks."""
    q, k, v, _ = tensors(B=1, H=1, Tq=5, Tk=24, D=4)
    scale, block = 0.5, 8
    parts, lses = [], []
    for start in range(0, 24, block):
        keys = slice(start, start + block)
        s = q.double() @ k[:, :, keys].double().mT * scale
        parts.append((s.softmax(-1) @ v[:, :, keys].double()).float().bfloat16().double())
        lses.append(s.logsumexp(-1))
    weights = torch.stack(lses).softmax(0)
    expected = (weights[..., None] * torch.stack(parts)).sum(0)
    found = streaming_attention(
        q, k, v, causal=False, scale=scale, tile=4, block=block, precision=StreamPrecision(o=7)
    )
    torch.testing.assert_close(found.double(), expected, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("block", [0, 6, True, 2.0])
def test_a_block_is_a_whole_number_of_tiles(block):
    q, k, v, _ = tensors()
    with pytest.raises(BadInput, match=r"block = .*; allowed: none, or a multiple of tile = 4"):
        streaming_attention(q, k, v, tile=4, block=block)


def test_compensation_recovers_most_of_the_carries_error():
    q, k, v, do = tensors(Tq=128, D=16)
    exact = truth(q, k, v, do)[0]

    def error(compensated):
        repair = StreamRepair(compensated=compensated)
        out = streaming_attention(q, k, v, tile=4, precision=StreamPrecision(acc=5, l=5), repair=repair)
        return (out - exact).abs().mean()

    assert error(True) < error(False) / 8


def test_exact_lse_is_that_of_the_unrounded_scores():
    q, k, v, do = tensors(Tq=32, D=16)
    low = StreamPrecision(lse=2)
    exact = truth(q, k, v, do)
    rounded = with_gradients(lambda *x: streaming_attention(*x, precision=low), q, k, v, do)
    repaired = with_gradients(
        lambda *x: streaming_attention(*x, precision=low, repair=StreamRepair(lse="exact")), q, k, v, do
    )
    assert (rounded[3] - exact[3]).abs().max() > 1e-2
    assert (repaired[3] - exact[3]).abs().max() < 2e-6


def test_tied_maximum_shift_keeps_the_softmax_and_counts_fallbacks():
    q, k, v, do = tensors(B=1, H=1, Tq=12, D=4)
    k[:, :, 1::2] = k[:, :, ::2]  # every key twice: ties in every tile of 4
    exact = truth(q, k, v, do, scale=1.0)[0]
    shift = StreamRepair(tied_max_beta=4.0)
    out, stats = streaming_attention(q, k, v, scale=1.0, tile=4, repair=shift, return_stats=True)
    assert (out - exact).abs().max() < 2e-6
    assert stats.tied_fallbacks.sum() == 0
    out, stats = streaming_attention(q * 100, k, v, scale=1.0, tile=4, repair=shift, return_stats=True)
    assert out.isfinite().all()
    assert stats.tied_fallbacks.sum() > 0


@pytest.mark.parametrize("amplitude", [1.0, 1000.0])
@pytest.mark.parametrize("shape", SHAPES)
def test_statistics_against_float64(shape, amplitude):
    shape = dict(shape)
    causal = shape.pop("causal", True)
    q, k, v, _ = tensors(**shape, amplitude=amplitude)
    scale = q.shape[-1] ** -0.5
    logits, p = probabilities(q, k, causal, scale)
    low = StreamPrecision.uniform(2, io=23)  # sensed before any rounding: the fault must not show
    for found in (
        streaming_attention(q, k, v, causal=causal, tile=16, precision=low, return_stats=True)[1],
        attention_stats(q, k, v, causal=causal),
    ):
        top = logits.amax((-2, -1))
        torch.testing.assert_close(found.max_logit.double(), top, rtol=1e-6, atol=1e-6)
        entropy = -torch.special.xlogy(p, p).sum(-1).mean(-1)
        torch.testing.assert_close(found.entropy.double(), entropy, rtol=1e-4, atol=2e-5)
        assert found.residual_r.isnan().all()


def test_all_negative_logits_have_a_maximum_and_nan_is_seen():
    q, k, v, _ = tensors(Tq=9)
    stats = attention_stats(q.abs(), -k.abs() - 0.1, v)
    assert (stats.max_logit < 0).all()
    q[0, 0, 4, 0] = torch.nan
    stats = attention_stats(q, k, v)
    assert stats.max_logit[0, 0].isnan()
    assert stats.max_logit.isnan().sum() == 1


def test_sensor_of_an_opaque_attention():
    """The residual of SDPA's own output, rounded to bf16 or not, against float64."""
    q, k, v, do = tensors(Tq=64, D=32, H=4, H_kv=2)
    scale = 32**-0.5
    _, p = probabilities(q, k, True, scale)
    v_H = v.repeat_interleave(2, dim=1).double()
    o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    dp = do.double() @ v_H.mT
    assert attention_stats(q, k, v, o, do).residual_r.max() < 1e-6
    o = o.bfloat16().float()
    ds = p * (dp - (do.double() * o).sum(-1, keepdim=True))
    r = ds.sum(-1).abs().mean(-1) / ds.abs().sum(-1).mean(-1)
    found = attention_stats(q, k, v, o, do)
    torch.testing.assert_close(found.residual_r.double(), r, rtol=1e-3, atol=1e-7)
    torch.testing.assert_close(found.residual_mean.double(), ds.sum(-1).mean(-1), rtol=1e-3, atol=1e-7)
    assert (found.residual_r > 1e-4).all()


def test_how_queries_are_tiled_does_not_matter():
    q, k, v, _ = tensors(Tq=40, Tk=40, D=8)
    low = StreamPrecision.uniform(3)
    whole = streaming_attention(q, k, v, causal=False, tile=16, precision=low)
    part = streaming_attention(q[:, :, 13:30], k, v, causal=False, tile=16, precision=low)
    assert torch.equal(whole[:, :, 13:30], part)


def test_what_is_masked_contributes_nothing():
    q, k, v, _ = tensors(Tq=40, D=8)
    low = StreamPrecision.uniform(3)
    clean = streaming_attention(q, k, v, tile=16, precision=low)
    for poison in (torch.nan, torch.inf, 3e38):
        k_, v_ = k.clone(), v.clone()
        k_[:, :, 30:], v_[:, :, 30:] = poison, poison
        out = streaming_attention(q, k_, v_, tile=16, precision=low)
        assert torch.equal(out[:, :, :30], clean[:, :, :30])
        assert not torch.equal(out[:, :, 30:], clean[:, :, 30:])


def test_stochastic_rounding_is_a_function_of_the_seed():
    q, k, v, _ = tensors()
    low = StreamPrecision.uniform(2, mode="stochastic")
    one, again, other = (streaming_attention(q, k, v, precision=low, seed=s) for s in (1, 1, 2))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)


def test_strided_inputs_and_twice_differentiation():
    q, k, v, do = tensors()
    strided = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    assert torch.equal(streaming_attention(*strided), streaming_attention(q, k, v))
    q.requires_grad_()
    (dq,) = torch.autograd.grad(streaming_attention(q, k, v), q, do, create_graph=True)
    with pytest.raises(RuntimeError):
        dq.sum().backward()


def test_bad_input():
    q, k, v, _ = tensors(H=4)
    for tile in (0, -1, 2.0, True):
        with pytest.raises(BadInput, match="tile = "):
            streaming_attention(q, k, v, tile=tile)
    with pytest.raises(BadInput, match="3 heads; allowed: a divisor of q's 4"):
        streaming_attention(q, k[:, :3], v[:, :3])
    with pytest.raises(BadInput, match=r"q: dtype torch.bfloat16; allowed: torch.float32"):
        streaming_attention(q.bfloat16(), k, v)
    with pytest.raises(BadInput, match="k: shape"):
        streaming_attention(q, k[0], v)
    with pytest.raises(BadInput, match="k, v: shapes"):
        streaming_attention(q, k, v[:, :, :-1])
    with pytest.raises(BadInput, match="36 keys for 37 queries"):
        streaming_attention(q, k[:, :, 1:], v[:, :, 1:])
    with pytest.raises(BadInput, match="scale = "):
        streaming_attention(q, k, v, scale=math.nan)
    with pytest.raises(BadInput, match="seed"):
        streaming_attention(q, k, v, seed=2**32)
    with pytest.raises(BadInput, match="o, do: give both"):
        attention_stats(q, k, v, q)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_soft_cap_in_fp32_is_attention_over_capped_logits(shape):
    shape = dict(shape)
    causal = shape.pop("causal", True)
    q, k, v, do = tensors(**shape, amplitude=5.0)
    scale, cap = q.shape[-1] ** -0.5, 3.0

    def capped(q, k, v):
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        logits = cap * torch.tanh(q @ k.mT * scale / cap)
        if causal:
            logits = logits.masked_fill(~torch.ones(logits.shape[-2:], dtype=torch.bool).tril(), -torch.inf)
        return logits.softmax(-1) @ v

    seen = []

    def ours(q, k, v):
        out, stats = streaming_attention(q, k, v, causal=causal, tile=7, softcap=cap, return_stats=True)
        seen.append(stats)
        return out

    found = with_gradients(ours, q, k, v, do)
    exact = with_gradients(capped, *(x.double() for x in (q, k, v, do)))
    for got, expected in zip(found, exact):
        assert (got - expected).abs().max() <= 4e-6 * max(1, expected.abs().max())
    logits, _ = probabilities(q, k, causal, scale)
    assert torch.allclose(
        seen[0].max_logit, (cap * torch.tanh(logits / cap)).amax((-2, -1)).float(), rtol=1e-6
    )
    assert (seen[0].residual_r < 1e-5).all(), "of dS before the cap's slope: its rows sum to zero"


@pytest.mark.parametrize("softcap", [0, -1.0, math.inf, "50"])
def test_a_soft_cap_out_of_range(softcap):
    with pytest.raises(BadInput, match=r"softcap = .*; allowed: none, or a finite number above 0"):
        streaming_attention(*tensors()[:3], softcap=softcap)
