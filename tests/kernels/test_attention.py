"""Attention kernels against the plain reference, bit for bit where sums are exact, and against float64."""

import math

import pytest
import torch

pytest.importorskip(
    "triton", reason="triton is not installed: make kernels-test runs these under 3.6 and 3.9"
)

from qkpipe_kernels.attention import attention

from qkpipe.errors import BadInput
from qkpipe.model.qk_norm import unit_rms
from qkpipe.numerics import streaming as reference
from qkpipe.numerics.precision import StreamPrecision, StreamRepair

uniform, carries = StreamPrecision.uniform, StreamPrecision.carries
HEALTHY = StreamPrecision(io=7)


def tensors(B, H, H_kv, Tq, Tk, D, integers=False, seed=0, size=1.0):
    """q, k, v, do."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((B, H, Tq, D), (B, H_kv, Tk, D), (B, H_kv, Tk, D), (B, H, Tq, D))
    if integers:
        return [torch.randint(-2, 3, shape, generator=generator).float() for shape in shapes]
    q, k, v, do = (torch.randn(shape, generator=generator) for shape in shapes)
    return [q * size, k, v, do]


def by_reference(q, k, v, do, *, causal, scale, tile, precision, repair, seed):
    call = reference.Call(causal, scale, tile, precision, repair, seed, True)
    stats = reference._empty_stats(q)
    out, o_delta, lse = reference.forward_reference(q, k, v, call, stats)
    return (out, *reference.backward_reference(q, k, v, o_delta, lse, do, call, stats)), stats


def by_kernels(q, k, v, do, **options):
    q, k, v = (x.clone().requires_grad_() for x in (q, k, v))
    out, stats = attention(q, k, v, sense=True, entropy=True, residual=True, **options)
    out.backward(do)
    return (out.detach(), q.grad, k.grad, v.grad), stats


def by_float64(q, k, v, do, *, causal, scale, normalised=False):
    q, k, v = (x.double().requires_grad_() for x in (q, k, v))
    q_n, k_n = (torch.nn.functional.rms_norm(x, x.shape[-1:]) if normalised else x for x in (q, k))
    group = q.shape[1] // k.shape[1]
    logits = q_n @ k_n.repeat_interleave(group, 1).mT * scale
    if causal:
        seen = torch.ones(logits.shape[-2:], dtype=torch.bool).tril()
        logits = logits.masked_fill(~seen, -math.inf)
    p = logits.softmax(-1)
    out = p @ v.repeat_interleave(group, 1)
    out.backward(do.double())
    entropy = -torch.special.xlogy(p, p).sum(-1).mean(-1)
    return (out.detach(), q.grad, k.grad, v.grad), logits.amax((-1, -2)).detach(), entropy.detach()


EXACT = [
    # B, H, H_kv, Tq, Tk, D, tile, causal, precision, repair
    (1, 2, 1, 37, 37, 16, 16, True, uniform(2), {}),
    (2, 2, 2, 21, 40, 32, 16, False, uniform(2), {}),
    (1, 1, 1, 70, 70, 64, 64, True, uniform(2), {}),
    (1, 1, 1, 19, 19, 128, 32, True, uniform(2), {}),
    (1, 3, 1, 33, 33, 16, 48, True, uniform(3), {}),
    (1, 1, 1, 40, 40, 16, 1000, True, uniform(3, io=23), {}),
    (1, 2, 1, 33, 33, 16, 16, True, uniform(2, mode="stochastic"), {}),
    (1, 1, 1, 33, 33, 16, 48, True, uniform(2, mode="stochastic"), {}),
    (1, 1, 1, 33, 33, 16, 16, True, uniform(2, mode="toward_zero"), {}),
    (1, 1, 1, 37, 37, 16, 16, True, uniform(2), {"delta": "p"}),
    (1, 1, 1, 37, 37, 16, 16, True, uniform(2), {"delta": "o_fp32", "delta_gain": 4.0}),
    (1, 1, 1, 37, 37, 16, 16, True, uniform(2), {"compensated": True, "lse": "exact"}),
    (1, 2, 1, 37, 37, 16, 8, True, uniform(2), {}),
    (1, 1, 1, 45, 45, 16, 20, True, uniform(2, mode="stochastic"), {}),
    (1, 1, 1, 100, 100, 16, 72, True, uniform(2), {"tied_max_beta": 4.0}),
    (1, 2, 1, 21, 40, 32, 24, False, uniform(2), {"tied_max_beta": 2.0}),
]


@pytest.mark.parametrize("B, H, H_kv, Tq, Tk, D, tile, causal, precision, repair", EXACT)
def test_bits_of_the_reference_where_sums_are_exact(B, H, H_kv, Tq, Tk, D, tile, causal, precision, repair):
    inputs = tensors(B, H, H_kv, Tq, Tk, D, integers=True)
    options = {
        "causal": causal,
        "scale": 4 / D,  # logits of a few units, so that fp32 holds sums of P exactly
        "tile": tile,
        "precision": precision,
        "repair": StreamRepair(**repair),
        "seed": 2**32 - 5,
    }
    expected, expected_stats = by_reference(*inputs, **options)
    actual, stats = by_kernels(*inputs, operands="exact", shared_exp=True, **options)
    for name, a, b in zip(("out", "dq", "dk", "dv"), actual, expected):
        if precision.io.bits == 23 and name != "out":
            # Not rounded at the end: a sum of many P in fp32 is no longer exact.
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
        else:
            assert torch.equal(a, b), f"{name}: {(a != b).sum()} of {a.numel()} differ"
    assert torch.equal(stats.max_logit, expected_stats.max_logit)
    assert torch.equal(stats.tied_fallbacks, expected_stats.tied_fallbacks)
    torch.testing.assert_close(stats.entropy, expected_stats.entropy, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(stats.residual_r, expected_stats.residual_r, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(stats.residual_mean, expected_stats.residual_mean, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "precision, operands, tile",
    [
        (HEALTHY, "bf16", 64),
        (HEALTHY, "exact", 64),
        (carries(7), "bf16", 16),
        (carries(7), "exact", 48),
        (uniform(7), "exact", 32),
        (StreamPrecision(), "exact", 64),
    ],
    ids=["healthy", "healthy-exact", "carries", "carries-exact-48", "uniform", "fp32"],
)
@pytest.mark.parametrize("D, size", [(16, 1.0), (64, 6.0)])
def test_within_twice_the_error_of_the_plain_reference(precision, operands, tile, D, size, record_property):
    """Against float64; the reference differs in the order of its sums, and rounds P once more if operands do."""
    q, k, v, do = tensors(1, 2, 1, 53, 53, D, size=size)
    if precision.io.bits == 7:
        q, k, v, do = (x.bfloat16().float() for x in (q, k, v, do))
    common = {"causal": True, "scale": D**-0.5}
    ours, stats = by_kernels(q, k, v, do, tile=tile, precision=precision, operands=operands, **common)
    plain_precision = precision
    if operands == "bf16":
        plain_precision = StreamPrecision(
            **{name: getattr(precision, name) for name in ("acc", "l", "m", "io")},
            p_operand=7,
            bwd_p=7,
            ds=7,
        )
    plain, _ = by_reference(
        q, k, v, do, tile=tile, precision=plain_precision, repair=StreamRepair(), seed=0, **common
    )
    exact, max_logit, entropy = by_float64(q, k, v, do, **common)
    for name, a, b, c in zip(("out", "dq", "dk", "dv"), ours, plain, exact):
        ulp = 2.0 ** -(precision.io.bits + 1) * c.abs().max()
        # fp32 sums: sqrt(T + D) roundings of the largest intermediate result (measured in units of the result).
        accumulation = 2.0**-23 * math.sqrt(53 + D) * c.abs().max() * max(1.0, size)
        error, allowed = (a - c).abs().max(), 2 * (b - c).abs().max() + ulp + accumulation
        assert error <= allowed, f"{name}: error {error:.3g}, allowed {allowed:.3g}"
        record_property(f"{name}_differs", ((a - b).abs() > 0).double().mean().item())
    torch.testing.assert_close(stats.max_logit.double(), max_logit, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(stats.entropy.double(), entropy, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("precision", [HEALTHY, uniform(7)], ids=["healthy", "uniform"])
def test_qk_normalisation_behind_the_switch(dtype, precision):
    q, k, v, do = (x.to(dtype) for x in tensors(1, 4, 2, 37, 37, 16, size=5.0))
    options = {"precision": precision, "tile": 32}
    switch = torch.zeros(1, dtype=torch.int32)
    dormant, _ = by_kernels(q, k, v, do, norm_switch=switch, **options)
    without, _ = by_kernels(q, k, v, do, **options)
    for a, b in zip(dormant, without):
        assert torch.equal(a, b)

    active, stats = by_kernels(q, k, v, do, norm_switch=switch.fill_(1), **options)
    exact, max_logit, _ = by_float64(q, k, v, do, causal=True, scale=0.25, normalised=True)
    leaves = [x.float().requires_grad_() for x in (q, k, v)]
    plain = reference.streaming_attention(
        unit_rms(leaves[0]), unit_rms(leaves[1]), leaves[2], precision=precision, tile=32
    )
    plain.backward(do.float())
    for a, b, c in zip(active, (plain.detach(), *(x.grad for x in leaves)), exact):
        assert (a - c).abs().max() <= 2 * (b - c).abs().max() + 2**-7 * c.abs().max()
    assert (stats.max_logit <= (1 + 2**-7) * 0.25 * 16).all()
    assert ((stats.max_logit - max_logit).abs() <= 2**-7 * max_logit.abs() + 1e-3).all()


def test_tied_maxima_fall_back_where_the_shift_would_underflow():
    q, k, v, do = tensors(1, 2, 2, 40, 40, 16, integers=True)
    options = {"causal": True, "scale": 2.0, "tile": 24, "precision": uniform(2), "seed": 0}
    repair = StreamRepair(tied_max_beta=8.0)
    _, expected_stats = by_reference(q, k, v, do, repair=repair, **options)
    _, stats = by_kernels(q, k, v, do, repair=repair, operands="exact", shared_exp=True, **options)
    assert expected_stats.tied_fallbacks.min() > 0
    assert torch.equal(stats.tied_fallbacks, expected_stats.tied_fallbacks)


@pytest.mark.parametrize("tile, gain", [(16, 4.0), (24, 0.0), (1000, 4.0)])
def test_gain_of_the_outputs_error(tile, gain):
    """At most twice the reference's distance from the same, with exact attention taken in float64."""
    q, k, v, do = (x.bfloat16().float() for x in tensors(1, 2, 1, 53, 53, 16))
    options = {"causal": True, "scale": 0.25, "tile": tile, "precision": uniform(3), "seed": 0}
    repair = StreamRepair(out_gain=gain)
    plain, _ = by_reference(q, k, v, do, repair=repair, **options)
    ours, _ = by_kernels(q, k, v, do, repair=repair, operands="exact", shared_exp=True, **options)
    exact, _, _ = by_float64(q, k, v, do, causal=True, scale=0.25)
    for a, b, c in zip(ours, plain, exact):
        assert (a - c).abs().max() <= 2 * (b - c).abs().max() + 2**-7 * c.abs().max()
    if gain == 0.0:
        torch.testing.assert_close(ours[0], exact[0].float(), rtol=2**-7, atol=1e-6)
    else:
        without, _ = by_kernels(q, k, v, do, operands="exact", shared_exp=True, **options)
        ratio = (ours[0] - exact[0]).norm() / (without[0] - exact[0]).norm()
        assert 0.9 * gain < ratio < 1.1 * gain


def test_delta_from_p_leaves_no_residual():
    inputs = tensors(1, 2, 2, 45, 45, 32)
    faulty = {"precision": uniform(3), "tile": 16}
    _, with_o = by_kernels(*inputs, **faulty)
    _, with_p = by_kernels(
        *inputs, repair=StreamRepair(delta="p"), precision=HEALTHY, tile=16, operands="exact"
    )
    assert (with_o.residual_r > 1e-2).all()
    assert (with_p.residual_r < 1e-5).all()


def test_maximum_sees_nan_infinity_and_negative_heads():
    q, k, v, _ = tensors(1, 3, 3, 20, 20, 16, integers=True)
    q[0, 0], k[0, 0] = -1.0, 1.0
    q[0, 1, 7, 3] = math.nan
    for precision in (HEALTHY, uniform(2)):
        _, stats = attention(q, k, v, precision=precision, sense=True, tile=16)
        assert stats.max_logit[0, 0] == -4.0
        assert stats.max_logit[0, 1].isnan()
        assert stats.max_logit[0, 2].isfinite()


def test_strided_views_and_ragged_lengths():
    B, T, H, D = 2, 29, 3, 16
    x = torch.randn(B, T, 3, H, D, generator=torch.Generator().manual_seed(0)).bfloat16()
    q, k, v = (x[:, :, i].transpose(1, 2) for i in range(3))
    out, _ = attention(q, k, v)
    packed, _ = attention(q.contiguous(), k.contiguous(), v.contiguous())
    assert torch.equal(out, packed) and not out.isnan().any()


@pytest.mark.parametrize(
    "change, message",
    [
        ({"q": torch.zeros(1, 2, 8, 24)}, "k, v: shapes"),
        ({"k": torch.zeros(1, 2, 9, 16), "v": torch.zeros(1, 2, 9, 16)}, "9 keys for 8 queries"),
        ({"v": torch.zeros(1, 2, 8, 16, dtype=torch.bfloat16)}, "v: dtype"),
        ({"tile": 0}, "tile = 0"),
        ({"operands": "fp8"}, "operands = 'fp8'"),
        ({"norm_switch": torch.zeros(2, dtype=torch.int32)}, "norm_switch"),
    ],
)
def test_bad_input(change, message):
    given = {name: torch.zeros(1, 2, 8, 16) for name in "qkv"} | change
    with pytest.raises(BadInput, match=message):
        attention(**given)
