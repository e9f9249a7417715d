"""Rounding to m mantissa bits: known vectors, independent oracles, the edges of the format."""

import gfloat
import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit

from qkpipe.errors import BadInput
from qkpipe.numerics import minifloat
from qkpipe.numerics.counter_rng import hash_u32
from qkpipe.numerics.minifloat import ROUNDINGS, _round_plain, round_minifloat, round_nb

FP32_MAX = torch.finfo(torch.float32).max


def bits(x):
    return x.view(torch.int32)


def assert_same_bits(a, b):
    """Equal patterns; two NaNs are equal whatever their payload."""
    same = (bits(a) == bits(b)) | (a.isnan() & b.isnan())
    assert same.all(), f"{(~same).sum()} differ, first {a[~same][0]} and {b[~same][0]}"


def patterns():
    """Every sign, exponent and upper mantissa, low halves around every tie of bf16: 2^16 x 7."""
    upper = torch.arange(1 << 16, dtype=torch.int64) << 16
    low = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFE, 0xFFFF])
    return (upper[:, None] | low).flatten().to(torch.int32).view(torch.float32)


def random_patterns(n=1 << 16, seed=0):
    i = torch.randint(-(2**31), 2**31, (n,), generator=torch.Generator().manual_seed(seed))
    return i.to(torch.int32).view(torch.float32)


def test_bf16_vector_of_the_predecessor():
    # arXiv 2510.04212: the rounding at which its accumulator goes wrong.
    assert round_minifloat(torch.tensor([-4.703990459442139]), 7).item() == -4.71875


def test_seven_bits_even_is_bfloat16():
    x = patterns()
    assert_same_bits(round_minifloat(x, 7), x.bfloat16().float())


def test_seven_bits_even_is_ml_dtypes_bfloat16():
    x = patterns()
    with np.errstate(invalid="ignore"):
        expected = x.numpy().astype(ml_dtypes.bfloat16).astype(np.float32)
    assert_same_bits(round_minifloat(x, 7), torch.from_numpy(expected))


def test_ten_bits_even_is_float16_on_its_normal_range():
    x = torch.empty(1 << 16).uniform_(-14, 15, generator=torch.Generator().manual_seed(0)).exp2()
    assert_same_bits(round_minifloat(x, 10), x.half().float())


@pytest.mark.parametrize("mantissa_bits", [1, 2, 3, 7, 10, 15, 22])
@pytest.mark.parametrize(
    "rounding, mode", [("even", gfloat.RoundMode.TiesToEven), ("toward_zero", gfloat.RoundMode.TowardZero)]
)
def test_gfloat_agrees(mantissa_bits, rounding, mode):
    fmt = gfloat.FormatInfo(
        name=f"e8m{mantissa_bits}",
        k=9 + mantissa_bits,
        precision=mantissa_bits + 1,
        bias=127,
        is_signed=True,
        domain=gfloat.Domain.Extended,
        has_nz=True,
        num_high_nans=2**mantissa_bits - 1,
        has_subnormals=True,
        is_twos_complement=False,
    )
    x = random_patterns(1 << 14)
    expected = gfloat.round_ndarray(fmt, x.double().numpy(), mode).astype(np.float32)
    assert_same_bits(round_minifloat(x, mantissa_bits, rounding), torch.from_numpy(expected))


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("mantissa_bits", range(1, 24))
def test_compiled_path_equals_the_reference(rounding, mantissa_bits):
    x = random_patterns(1 << 13, seed=mantissa_bits)
    assert torch.equal(
        bits(round_minifloat(x, mantissa_bits, rounding, seed=3, stream=4)),
        bits(_round_plain(x, mantissa_bits, rounding, 3, 4) if mantissa_bits < 23 else x),
    )


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=40),
    st.integers(1, 22),
    st.sampled_from(sorted(ROUNDINGS)),
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**32 - 1),
)
def test_compiled_path_equals_the_reference_anywhere(pattern, mantissa_bits, rounding, seed, stream):
    x = torch.tensor(pattern, dtype=torch.int32).view(torch.float32)
    got = round_minifloat(x, mantissa_bits, rounding, seed=seed, stream=stream)
    assert torch.equal(bits(got), bits(_round_plain(x, mantissa_bits, rounding, seed, stream)))


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_without_numba_the_result_is_the_same(monkeypatch, rounding):
    x = random_patterns(1 << 12)
    compiled = round_minifloat(x, 3, rounding)
    monkeypatch.setattr(minifloat, "HAVE_NUMBA", False)
    assert torch.equal(bits(round_minifloat(x, 3, rounding)), bits(compiled))


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("mantissa_bits", [1, 7, 22])
def test_nan_and_inf_survive(rounding, mantissa_bits):
    nan_patterns = torch.tensor([0x7F800001, 0x7FC00000, 0x7FFFFFFF, -1, -0x7FFFFF], dtype=torch.int32)
    out = round_minifloat(nan_patterns.view(torch.float32), mantissa_bits, rounding)
    assert out.isnan().all()
    assert (bits(out) & 0x00400000).bool().all(), "a NaN is made quiet"
    inf = torch.tensor([float("inf"), -float("inf")])
    assert torch.equal(round_minifloat(inf, mantissa_bits, rounding), inf)


@pytest.mark.parametrize("mantissa_bits", [1, 2, 7, 22])
def test_overflow_is_inf_under_even_and_finite_toward_zero(mantissa_bits):
    x = torch.tensor([FP32_MAX, -FP32_MAX])
    assert torch.equal(round_minifloat(x, mantissa_bits), x * 2)
    largest = (2 - 2.0**-mantissa_bits) * 2.0**127
    truncated = round_minifloat(x, mantissa_bits, "toward_zero")
    assert truncated.tolist() == [largest, -largest]
    below_midpoint = torch.tensor([largest + 2.0 ** (126 - mantissa_bits)]).nextafter(torch.zeros(1))
    assert round_minifloat(below_midpoint, mantissa_bits).item() == largest


def test_subnormals_round_in_fixed_point():
    tiny = 2.0**-149
    x = torch.tensor([1, 3, 4, 5, 6, 12], dtype=torch.float64).mul(tiny).float()
    even = round_minifloat(x, 20)  # step 8 tiny
    assert (even.double() / tiny).tolist() == [0, 0, 0, 8, 8, 16]
    assert (round_minifloat(x, 20, "toward_zero").double() / tiny).tolist() == [0, 0, 0, 0, 0, 8]


def test_signed_zero_is_kept():
    for rounding in ROUNDINGS:
        assert bits(round_minifloat(torch.tensor([0.0, -0.0]), 2, rounding)).tolist() == [0, -(2**31)]


def test_ties_go_to_even():
    x = torch.tensor([1.125, 1.375, -1.125, -1.375])  # halfway at m=2
    assert round_minifloat(x, 2).tolist() == [1.0, 1.5, -1.0, -1.5]


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("mantissa_bits", [1, 4, 7])
def test_rounding_twice_changes_nothing(rounding, mantissa_bits):
    once = round_minifloat(random_patterns(1 << 12), mantissa_bits, rounding, seed=1)
    assert torch.equal(bits(round_minifloat(once, mantissa_bits, rounding, seed=2)), bits(once))


def test_stochastic_is_unbiased_and_reaches_both_neighbours():
    n = 1 << 18
    for value in (1.0625, 1.4, 1.999, -1.3):
        out = round_minifloat(torch.full((n,), value), 2, "stochastic", seed=11)
        neighbours = out.unique()
        assert neighbours.numel() == 2 and neighbours[0] < value < neighbours[1]
        step = (neighbours[1] - neighbours[0]).item()
        assert abs(out.double().mean().item() - value) < 5 * 0.5 * step / n**0.5


def test_stochastic_draws_are_set_by_seed_stream_and_place_alone():
    x = torch.full((64, 32), 1.4)
    first = round_minifloat(x, 2, "stochastic", seed=1, stream=2)
    assert torch.equal(first, round_minifloat(x, 2, "stochastic", seed=1, stream=2))
    assert torch.equal(first.T, round_minifloat(x.T.contiguous().T, 2, "stochastic", seed=1, stream=2).T)
    assert not torch.equal(first, round_minifloat(x, 2, "stochastic", seed=1, stream=3))
    assert not torch.equal(first, round_minifloat(x, 2, "stochastic", seed=2, stream=2))


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_twenty_three_bits_is_the_identity(rounding):
    x = random_patterns(1 << 12)
    out = round_minifloat(x, 23, rounding)
    assert torch.equal(bits(out), bits(x)) and out.data_ptr() != x.data_ptr()


@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (1,), (3, 5, 7)])
def test_any_shape(shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    out = round_minifloat(x, 7)
    assert out.shape == x.shape and torch.equal(out, x.bfloat16().float())


def test_strided_input_and_the_input_is_left_alone():
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(0), requires_grad=True)
    before = x.detach().clone()
    out = round_minifloat(x.T[::2], 3)
    assert torch.equal(out, round_minifloat(before.T[::2].contiguous(), 3))
    assert torch.equal(x, before) and not out.requires_grad


@njit
def round_scalars(x, s, rounding, u):
    out = np.empty_like(x)
    for n in range(x.size):
        out[n] = round_nb(x[n], s, rounding, u[n])
    return out


@pytest.mark.parametrize("mantissa_bits", [1, 7, 23])
@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_scalar_helpers_equal_the_reference(rounding, mantissa_bits):
    x = random_patterns(1 << 10)
    x = torch.where(x.isnan(), torch.tensor(float("nan")), x)
    u = hash_u32(5, 6, torch.arange(x.numel())).numpy().astype(np.uint32)
    out = round_scalars(x.numpy(), np.int32(23 - mantissa_bits), ROUNDINGS[rounding], u)
    assert torch.equal(bits(torch.from_numpy(out)), bits(_round_plain(x, mantissa_bits, rounding, 5, 6)))


@pytest.mark.parametrize("mantissa_bits", [0, 24, -1, 7.0, True, None])
def test_bad_mantissa_bits(mantissa_bits):
    with pytest.raises(BadInput, match="1 to 23"):
        round_minifloat(torch.ones(3), mantissa_bits)


def test_bad_rounding():
    with pytest.raises(BadInput, match="even, stochastic, toward_zero"):
        round_minifloat(torch.ones(3), 7, "up")


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int32])
def test_bad_dtype(dtype):
    with pytest.raises(BadInput, match="float32"):
        round_minifloat(torch.ones(3, dtype=dtype), 7)


def test_bad_seed():
    with pytest.raises(BadInput, match="seed=-1"):
        round_minifloat(torch.ones(3), 7, "stochastic", seed=-1)
