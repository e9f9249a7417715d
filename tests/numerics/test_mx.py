"""Block-scaled formats against gfloat and ml_dtypes, the known corner cases, and the compiled path bit for bit."""

from fractions import Fraction

import gfloat
import ml_dtypes
import numpy as np
import pytest
import torch
from gfloat import formats as gf
from hypothesis import given, settings
from hypothesis import strategies as st

from qkpipe.errors import BadInput
from qkpipe.numerics import mx
from qkpipe.numerics.mx import FORMATS, ROUNDINGS, SCALE_RULES, nvfp4_tensor_scale, quantize_mx

FP32_MAX = torch.finfo(torch.float32).max
MX = [fmt for fmt in FORMATS if fmt != "nvfp4"]
GFLOAT_ELEMENT = {
    "mxfp4": gf.format_info_ocp_e2m1,
    "mxfp6_e2m3": gf.format_info_ocp_e2m3,
    "mxfp6_e3m2": gf.format_info_ocp_e3m2,
    "mxfp8_e4m3": gf.format_info_ocp_e4m3,
    "mxfp8_e5m2": gf.format_info_ocp_e5m2,
    "nvfp4": gf.format_info_ocp_e2m1,
}
GFLOAT_BLOCK = {
    "mxfp4": gf.format_info_mxfp4_e2m1,
    "mxfp6_e2m3": gf.format_info_mxfp6_e2m3,
    "mxfp6_e3m2": gf.format_info_mxfp6_e3m2,
    "mxfp8_e4m3": gf.format_info_mxfp8_e4m3,
    "mxfp8_e5m2": gf.format_info_mxfp8_e5m2,
}
ML_DTYPE = {
    "mxfp4": ml_dtypes.float4_e2m1fn,
    "mxfp6_e2m3": ml_dtypes.float6_e2m3fn,
    "mxfp6_e3m2": ml_dtypes.float6_e3m2fn,
    "mxfp8_e4m3": ml_dtypes.float8_e4m3fn,
    "mxfp8_e5m2": ml_dtypes.float8_e5m2,
}


def bits(x):
    return x.view(torch.int32) if x.dtype == torch.float32 else x.view(torch.int16)


def assert_same_bits(a, b):
    assert a.dtype == b.dtype and a.shape == b.shape
    differ = bits(a) != bits(b)
    assert not differ.any(), f"{differ.sum()} differ, first {a[differ][0].item()} and {b[differ][0].item()}"


def finite_patterns(shape, seed):
    """Every exponent equally likely."""
    i = torch.randint(-(2**31), 2**31, shape, generator=torch.Generator().manual_seed(seed)).to(torch.int32)
    return torch.where((i & 0x7F800000) == 0x7F800000, i & ~0x7F800000, i).view(torch.float32)


def blocks_of_one_size(n, length, seed):
    """Normal draws, each block at a scale of its own, over the whole fp32 range."""
    g = torch.Generator().manual_seed(seed)
    e = torch.randint(-150, 128, (n, 1), generator=g)
    x = torch.randn(n, length, generator=g, dtype=torch.float64) * 2.0**e
    return x.clamp(-FP32_MAX, FP32_MAX).float()


def near_ties(n, length, seed):
    """Elements at and one ulp beside multiples of 1/64, each block at a scale of its own."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randint(-512, 513, (n, length), generator=g) / 64.0
    x = (x.view(torch.int32) + torch.randint(-1, 2, x.shape, generator=g, dtype=torch.int32)).view(
        torch.float32
    )
    x = torch.where(x.isfinite(), x, 0.0)  # one below +0 is a NaN
    return x * 2.0 ** torch.randint(-120, 120, (n, 1), generator=g).float()


def gfloat_mx(x, fmt):
    """The oracle on rows of one block each, fp32 in and out: its scale, its element rounding, saturating."""
    element = GFLOAT_ELEMENT[fmt]
    x64 = x.double().numpy()
    scale = np.array([gfloat.compute_scale_amax(element.emax, row) for row in x64])[:, None]
    rounded = gfloat.round_ndarray(element, x64 / scale, gfloat.RoundMode.TiesToEven, sat=True)
    return torch.from_numpy((rounded * scale).astype(np.float32)), torch.from_numpy(np.log2(scale) + 127)


# --- against gfloat and ml_dtypes ----------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", MX)
def test_every_code_under_every_scale_byte(fmt):
    element = GFLOAT_ELEMENT[fmt]
    all_codes = np.arange(2 ** FORMATS[fmt].bits)
    decoded = gfloat.decode_ndarray(element, all_codes)
    finite = np.isfinite(decoded)
    all_codes, decoded = torch.from_numpy(all_codes[finite]), torch.from_numpy(decoded[finite])
    bytes_B = torch.arange(255 - FORMATS[fmt].emax)  # above, the largest element overflows fp32
    x = (decoded * 2.0 ** (bytes_B[:, None].double() - 127)).float()
    values, codes, scales = quantize_mx(x, fmt, block=x.shape[1], return_codes=True)
    assert_same_bits(values, x)
    assert torch.equal(scales, bytes_B[:, None].to(torch.uint8))
    assert torch.equal(codes, all_codes.to(torch.uint8).expand_as(codes))
    assert_same_bits(quantize_mx(x, fmt, block=x.shape[1]), x)


@pytest.mark.parametrize("fmt", MX)
@pytest.mark.parametrize("make", [finite_patterns, blocks_of_one_size, near_ties])
def test_random_blocks_equal_gfloat(fmt, make):
    x = make((400, 32), 1) if make is finite_patterns else make(400, 32, 1)
    expected, scale_bytes = gfloat_mx(x, fmt)
    values, _, scales = quantize_mx(x, fmt, return_codes=True)
    assert_same_bits(values, expected)
    assert torch.equal(scales.double(), scale_bytes)
    assert_same_bits(quantize_mx(x, fmt), expected)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=32),
    st.sampled_from(MX),
    st.booleans(),
)
def test_any_block_equals_gfloat_quantize_block(values, fmt, half):
    x = torch.tensor(values, dtype=torch.float32)
    if half:
        x = x.bfloat16()
        x = torch.where(x.isfinite(), x, 0.0)  # rounding to bf16 may overflow
    expected = gfloat.quantize_block(GFLOAT_BLOCK[fmt], x.double().numpy(), gfloat.compute_scale_amax)
    assert_same_bits(quantize_mx(x, fmt), torch.from_numpy(expected).float().to(x.dtype))


@pytest.mark.parametrize("fmt", MX)
def test_every_bfloat16_as_a_block_maximum_equals_gfloat(fmt):
    amax = torch.arange(0x7F80, dtype=torch.int16).view(torch.bfloat16)[:: 1 if fmt == "mxfp4" else 7]
    x = torch.stack([amax, -amax / 3, amax / 5, amax * 0.7], dim=1)
    expected, _ = gfloat_mx(x.float(), fmt)
    assert_same_bits(quantize_mx(x, fmt), expected.bfloat16())
    assert torch.equal(expected.bfloat16().float(), expected), "a bfloat16 result is exact"


@pytest.mark.parametrize("fmt", MX)
def test_ml_dtypes_agrees_on_elements(fmt):
    x = blocks_of_one_size(500, 32, 2)
    values, _, scales = quantize_mx(x, fmt, return_codes=True)
    scale = 2.0 ** (scales.double() - 127)
    largest = FORMATS[fmt].largest
    elements = (x.double() / scale).clamp(-largest, largest).float().numpy().astype(ML_DTYPE[fmt])
    expected = torch.from_numpy(elements.astype(np.float64)) * scale
    assert_same_bits(values, expected.float())


@pytest.mark.parametrize("fmt", FORMATS)
def test_codes_and_scales_decode_to_the_values(fmt):
    x = blocks_of_one_size(100, 70, 3)
    block = 16 if fmt == "nvfp4" else 32
    values, codes, scales = quantize_mx(x, fmt, return_codes=True)
    assert codes.dtype == scales.dtype == torch.uint8
    assert codes.shape == x.shape and scales.shape == (100, -(-70 // block))
    if fmt == "nvfp4":
        scale = torch.from_numpy(gfloat.decode_ndarray(gf.format_info_ocp_e4m3, scales.numpy()))
        scale = scale * nvfp4_tensor_scale(x).double()
    else:
        scale = 2.0 ** (scales.double() - 127)
    elements = torch.from_numpy(gfloat.decode_ndarray(GFLOAT_ELEMENT[fmt], codes.numpy()))
    assert_same_bits(values, (elements * scale.repeat_interleave(block, 1)[:, :70]).float())


# --- scale rules ---------------------------------------------------------------------------------------------


def scale_byte(amax, fmt, rule, stochastic=False):
    """The rules in exact arithmetic, from their definitions."""
    element = FORMATS[fmt]
    amax, largest = Fraction(amax), Fraction(element.largest)
    if amax == 0:
        return 0

    def floor_log2(v):
        e = v.numerator.bit_length() - v.denominator.bit_length()
        return e if Fraction(2) ** e <= v else e - 1

    def to_grid(v, up):
        step = Fraction(2) ** (floor_log2(v) - element.mantissa)
        return -(-v // step) * step if up else round(v / step) * step  # round() is to even

    if rule == "rceil":
        e = floor_log2(amax / largest)
        e += Fraction(2) ** e < amax / largest
    else:
        e = floor_log2(to_grid(amax, False) if rule == "even" else amax) - element.emax
    e = max(e, -127)
    dequantized = min(to_grid(amax, stochastic), largest * Fraction(2) ** e)
    return e + 127 - (dequantized >= Fraction(2) ** 128)


@pytest.mark.parametrize("rule", SCALE_RULES)
@pytest.mark.parametrize("fmt", MX)
def test_scale_bytes_equal_exact_arithmetic(fmt, rule):
    largest = FORMATS[fmt].largest
    marks = torch.tensor(
        [1, largest, 2 - 2.0 ** -(FORMATS[fmt].mantissa + 1), 2 - 2.0 ** -FORMATS[fmt].mantissa]
    )
    exponents = torch.arange(-149, 128, 3).float()
    amax = (marks.double()[:, None] * 2.0**exponents).clamp(max=FP32_MAX).float().flatten()
    amax = torch.cat([amax, amax.nextafter(torch.tensor(0.0)), amax.nextafter(torch.tensor(FP32_MAX))])
    amax = torch.cat([amax, finite_patterns((300,), 5).abs(), 2.0 ** torch.linspace(127.0, 127.9999, 200)])
    for rounding in ROUNDINGS:
        _, _, scales = quantize_mx(amax[:, None], fmt, scale_rule=rule, rounding=rounding, return_codes=True)
        expected = [scale_byte(a, fmt, rule, rounding == "stochastic") for a in amax.tolist()]
        assert scales.flatten().tolist() == expected


def test_the_three_rules_differ_where_they_should():
    x = torch.tensor([7.0, 1.0])
    assert quantize_mx(x, scale_rule="floor").tolist() == [6, 1]
    assert quantize_mx(x, scale_rule="even").tolist() == [8, 1]  # 7 rounds to 8 at one mantissa bit
    assert quantize_mx(x, scale_rule="rceil").tolist() == [8, 1]
    x = torch.tensor([6.5, 0.75])
    assert quantize_mx(x, scale_rule="even").tolist() == [6, 1]  # 0.75 is a tie
    assert quantize_mx(x, scale_rule="rceil").tolist() == [6, 1]
    assert quantize_mx(x, scale_rule="rceil", return_codes=True)[2].item() == 128


# --- corner table --------------------------------------------------------------------------------------------


def both_paths(x, fmt="mxfp4", **options):
    """The compiled result, after the plain one was found equal."""
    compiled = quantize_mx(x, fmt, **options)
    plain, _, _ = quantize_mx(x, fmt, return_codes=True, **options)
    assert_same_bits(compiled, plain)
    return compiled


def test_amax_just_below_a_power_of_two():
    below = torch.tensor(256.0).nextafter(torch.tensor(0.0))
    # 10 / 32 = 0.3125 of the block's scale 2^5 rounds to 0.5, which is 16.
    assert both_paths(torch.stack([below, torch.tensor(10.0)])).tolist() == [192, 16]


@pytest.mark.parametrize("amax", [254.0, 255.0])
def test_bf16_block_with_amax_254_or_255(amax):
    x = torch.tensor([amax, 10.0], dtype=torch.bfloat16)
    assert both_paths(x).tolist() == [192, 16]
    assert quantize_mx(x, return_codes=True)[2].item() == 127 + 5


def test_ties_go_to_even():
    x = torch.tensor([4.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.25, -0.75])
    assert both_paths(x).tolist() == [4, 0, 1, 1, 2, 2, 4, 4, 0, -1]


def test_a_value_just_above_a_tie():
    x = torch.tensor([4.0, 0.25000006, 0.24999999])
    assert both_paths(x).tolist() == [4, 0.5, 0]


@pytest.mark.parametrize("fmt", MX)
@pytest.mark.parametrize("rule", SCALE_RULES)
def test_block_maximum_2_to_the_minus_126(fmt, rule):
    x = torch.tensor([2.0**-126, 2.0**-127, 0.0])
    assert both_paths(x, fmt, scale_rule=rule).tolist() == x.tolist()


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("rule", SCALE_RULES)
@pytest.mark.parametrize("value", [FP32_MAX, 1.9 * 2.0**127, 1.6 * 2.0**127, 2.0**127])
def test_fp32_max_stays_finite(fmt, rounding, rule, value):
    options = {"rounding": rounding} | ({} if fmt == "nvfp4" else {"scale_rule": rule})
    x = torch.tensor([value, -value, 1.0]).repeat(20)
    out = both_paths(x, fmt, **options)
    assert out.isfinite().all()
    assert (out[:2].abs() >= 0.7 * value).all()


def test_fp32_max_under_even_lowers_the_exponent():
    out, _, scales = quantize_mx(torch.tensor([FP32_MAX]), scale_rule="even", return_codes=True)
    assert out.item() == 6 * 2.0**125 and scales.item() == 127 + 125


def test_rceil_keeps_the_exponent_where_nothing_overflows():
    out, _, scales = quantize_mx(torch.tensor([1.6 * 2.0**127]), scale_rule="rceil", return_codes=True)
    assert out.item() == 3 * 2.0**126 and scales.item() == 127 + 126


@pytest.mark.parametrize("fmt", FORMATS)
def test_bfloat16_max_stays_finite(fmt):
    x = torch.tensor([torch.finfo(torch.bfloat16).max, 1.0], dtype=torch.bfloat16)
    for rule in SCALE_RULES if fmt != "nvfp4" else ["floor"]:
        assert both_paths(x, fmt, scale_rule=rule).isfinite().all()


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_zeros_keep_their_sign(fmt, rounding):
    x = torch.tensor([0.0, -0.0] * 20)
    assert_same_bits(both_paths(x, fmt, rounding=rounding), x)
    x[39] = 100.0  # and beside a large value, as do negative values that round to zero
    x[38] = -1e-20
    out = both_paths(x, fmt, block=40)
    assert_same_bits(out[:38], x[:38])
    assert bits(out[38]).item() == -(2**31)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("axis", [0, 1])
def test_one_inf_or_nan_makes_its_block_nan_and_no_other(fmt, bad, rounding, axis):
    clean = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    x = clean.clone()
    x[3, 40] = bad
    out = both_paths(x, fmt, axis=axis, block=16, rounding=rounding)
    hit = torch.zeros_like(x, dtype=torch.bool)
    hit[(slice(0, 16), 40) if axis == 0 else (3, slice(32, 48))] = True
    assert out[hit].isnan().all()
    clean[3, 40] = 0.0  # so that NVFP4's tensor scale is that of the finite elements
    assert torch.equal(out[~hit], quantize_mx(clean, fmt, axis=axis, block=16, rounding=rounding)[~hit])
    _, codes, scales = quantize_mx(x, fmt, axis=axis, block=16, return_codes=True)
    assert (codes[hit] == 0).all()
    assert scales[(0, 40) if axis == 0 else (3, 2)].item() == (127 if fmt == "nvfp4" else 255)
    assert (scales == scales.max()).sum() == 1 or fmt == "nvfp4"


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("length", [1, 31, 33, 70])
def test_the_last_block_is_ragged_and_blocks_stay_inside_a_row(fmt, length):
    x = blocks_of_one_size(9, length, 7).clamp(-1e30, 1e30)
    x[0, 0] = 1e30  # every row's NVFP4 tensor scale comes from here
    whole = both_paths(x, fmt)
    block = 16 if fmt == "nvfp4" else 32
    for start in range(0, length, block):
        piece = torch.zeros_like(x)
        piece[:, start : start + block] = x[:, start : start + block]
        piece[0, 0] = 1e30
        alone = quantize_mx(piece, fmt)
        assert torch.equal(alone[1:, start : start + block], whole[1:, start : start + block])


@pytest.mark.parametrize("fmt", MX)
@pytest.mark.parametrize(
    "rule, rounding", [("floor", "even"), ("even", "even"), ("rceil", "even"), ("floor", "stochastic")]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_quantizing_twice_changes_nothing(fmt, rule, rounding, dtype):
    for seed in range(4):
        x = blocks_of_one_size(40, 80, seed).to(dtype)
        x = torch.where(x.isfinite(), x, 0.0)
        once = quantize_mx(x, fmt, scale_rule=rule, rounding=rounding, seed=1)
        assert_same_bits(quantize_mx(once, fmt, scale_rule=rule, rounding=rounding, seed=2), once)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_quantizing_to_nvfp4_twice_changes_nothing(dtype):
    for seed in range(20):
        x = torch.randn(40, 80, generator=torch.Generator().manual_seed(seed)) * 10.0 ** (seed - 10)
        x = (x * 2.0 ** -torch.arange(40)[:, None]).to(dtype)
        once = quantize_mx(x, "nvfp4")
        assert_same_bits(quantize_mx(once, "nvfp4"), once)


# --- NVFP4 ---------------------------------------------------------------------------------------------------


def nvfp4_reference(x, block=16):
    """Scales from float64 rounded to E4M3 by gfloat, elements by gfloat; rows of whole blocks."""
    tensor_scale = np.float64(np.float32(np.float32(x.abs().max().item()) / np.float32(448 * 6)))
    x_b = x.double().numpy().reshape(-1, block)
    ratio = np.clip(np.abs(x_b).max(1, keepdims=True) / 6 / tensor_scale, 2.0**-6, 448)
    scale = gfloat.round_ndarray(gf.format_info_ocp_e4m3, ratio, gfloat.RoundMode.TiesToEven, sat=True)
    rounded = gfloat.round_ndarray(
        gf.format_info_ocp_e2m1, x_b / (scale * tensor_scale), gfloat.RoundMode.TiesToEven, sat=True
    )
    values = torch.from_numpy((rounded * (scale * tensor_scale)).astype(np.float32)).view(x.shape)
    return values, torch.from_numpy(gfloat.encode_ndarray(gf.format_info_ocp_e4m3, scale)).view(
        x.shape[0], -1
    )


@pytest.mark.parametrize("seed", range(4))
def test_nvfp4_equals_gfloat_given_float64_scales(seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(200, 64, generator=g) * 2.0 ** torch.randint(-16, 5, (200, 1), generator=g).float()
    x = torch.where(torch.rand(x.shape, generator=g) < 0.5, (x * 8).round() / 8, x)  # exact ties among them
    expected, scale_codes = nvfp4_reference(x)
    values, _, scales = quantize_mx(x, "nvfp4", return_codes=True)
    assert torch.equal(scales.long(), scale_codes.long())
    assert_same_bits(values, expected)
    assert_same_bits(quantize_mx(x, "nvfp4"), expected)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=32, max_size=32))
def test_any_nvfp4_tensor_equals_gfloat(values):
    x = torch.tensor(values, dtype=torch.float32).view(1, 32)
    if x.abs().max() > 2.0**-100 and x.abs().max() < 2.0**127:
        assert_same_bits(quantize_mx(x, "nvfp4"), nvfp4_reference(x)[0])


def test_nvfp4_ties_at_a_scale_of_one():
    x = torch.tensor([6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    x = torch.cat([x, torch.zeros(8), torch.full((16,), 448 * 6.0)])  # the tensor scale is 1
    assert nvfp4_tensor_scale(x).item() == 1
    assert both_paths(x, "nvfp4")[:8].tolist() == [6, 0, 1, 1, 2, 2, 4, 4]


def test_nvfp4_of_zeros_and_of_the_least_subnormal():
    assert both_paths(torch.zeros(40), "nvfp4").tolist() == [0] * 40
    assert both_paths(torch.full((16,), 2.0**-149), "nvfp4").isfinite().all()


# --- the compiled path ---------------------------------------------------------------------------------------


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_compiled_path_equals_the_reference_anywhere(data):
    shape = data.draw(
        st.lists(st.integers(1, 40), min_size=1, max_size=3).filter(lambda s: np.prod(s) <= 2000)
    )
    fmt = data.draw(st.sampled_from(sorted(FORMATS)))
    rule = data.draw(st.sampled_from(SCALE_RULES)) if fmt != "nvfp4" else "floor"
    options = {
        "axis": data.draw(st.integers(0, len(shape) - 1)),
        "block": data.draw(st.sampled_from([1, 2, 7, 16, 32, 64])),
        "scale_rule": rule,
        "rounding": data.draw(st.sampled_from(ROUNDINGS)),
        "seed": data.draw(st.integers(0, 2**32 - 1)),
        "stream": data.draw(st.integers(0, 2**32 - 1)),
    }
    g = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    pattern = torch.randint(-(2**31), 2**31, shape, generator=g).to(torch.int32)
    spread = data.draw(
        st.sampled_from([0xFFFFFFFF, 0x83FFFFFF, 0x80FFFFFF, 0x80F00000])
    )  # fewer exponents, ties
    offset = data.draw(st.integers(0, 0x7F)) << 24 if spread != 0xFFFFFFFF else 0
    spread = spread - 2**32 if spread >= 2**31 else spread
    x = ((pattern & spread) + offset).view(torch.float32)
    assert_same_bits(quantize_mx(x, fmt, **options), quantize_mx(x, fmt, return_codes=True, **options)[0])


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_without_numba_the_result_is_the_same(monkeypatch, fmt, rounding):
    x = blocks_of_one_size(10, 70, 11)
    compiled = quantize_mx(x, fmt, rounding=rounding)
    monkeypatch.setattr(mx, "HAVE_NUMBA", False)
    assert_same_bits(quantize_mx(x, fmt, rounding=rounding), compiled)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("axis", [0, 1, 2, -1, -3])
def test_an_axis_is_the_last_axis_of_the_transposed(fmt, axis):
    x = torch.randn(40, 33, 35, generator=torch.Generator().manual_seed(0))
    expected = quantize_mx(x.movedim(axis, -1), fmt).movedim(-1, axis)
    assert_same_bits(quantize_mx(x, fmt, axis=axis), expected.contiguous())
    _, codes, scales = quantize_mx(x, fmt, axis=axis, return_codes=True)
    _, codes_last, scales_last = quantize_mx(x.movedim(axis, -1), fmt, return_codes=True)
    assert torch.equal(codes, codes_last.movedim(-1, axis))
    assert torch.equal(scales, scales_last.movedim(-1, axis))


# --- stochastic rounding -------------------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("value", [0.1, 0.3, 1.3, 2.7, -3.1, -0.01])
def test_stochastic_is_unbiased_and_takes_neighbours_only(fmt, value):
    n = 1 << 15
    x = torch.full((n, 2), value)
    x[:, 1] = 6.0  # holds the scale
    out = quantize_mx(x, fmt, rounding="stochastic", seed=7)[:, 0].double()
    neighbours = out.unique()
    value = x[0, 0].item()
    if neighbours.numel() == 1:
        assert fmt != "mxfp4" and abs(neighbours.item() - value) < 1e-6
        return
    low, high = neighbours.tolist()
    assert low < value < high
    probability = (value - low) / (high - low)
    deviation = (high - low) * (probability * (1 - probability) / n) ** 0.5
    assert abs(out.mean().item() - value) < 5 * deviation


def test_stochastic_leaves_what_is_on_the_grid():
    x = torch.tensor([6.0, 4.0, 3.0, 2.0, 1.5, 1.0, 0.5, 0.0]).repeat(64, 1)
    assert torch.equal(quantize_mx(x, rounding="stochastic"), x)


def test_stochastic_draws_follow_the_element_not_the_block():
    x = torch.full((64, 64), 1.3)
    x[0] = x[:, 0] = 6.0
    along_rows = quantize_mx(x, block=64, rounding="stochastic", seed=3)
    along_columns = quantize_mx(x, axis=0, block=64, rounding="stochastic", seed=3)
    assert torch.equal(along_rows, along_columns)
    assert not torch.equal(along_rows, quantize_mx(x, block=64, rounding="stochastic", seed=4))
    assert not torch.equal(along_rows, quantize_mx(x, block=64, rounding="stochastic", seed=3, stream=1))


# --- interface -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", FORMATS)
def test_dtype_shape_and_input_are_kept(fmt):
    x = torch.randn(6, 4, 40, generator=torch.Generator().manual_seed(0), requires_grad=True)
    before = x.detach().clone()
    out = quantize_mx(x.transpose(0, 2), fmt)
    assert out.shape == (40, 4, 6) and out.dtype == torch.float32 and not out.requires_grad
    assert torch.equal(x, before)
    half = quantize_mx(before.bfloat16(), fmt)
    assert half.dtype == torch.bfloat16
    assert torch.equal(half, quantize_mx(before.bfloat16().float(), fmt).bfloat16())


@pytest.mark.parametrize("shape", [(0,), (0, 32), (3, 0), (3, 0, 5)])
@pytest.mark.parametrize("fmt", ["mxfp4", "nvfp4"])
def test_empty_tensors(shape, fmt):
    x = torch.empty(shape)
    assert quantize_mx(x, fmt).shape == shape
    values, codes, _ = quantize_mx(x, fmt, return_codes=True)
    assert values.shape == codes.shape == shape


def test_default_blocks():
    x = torch.ones(64)
    x[0] = 1024.0
    assert (quantize_mx(x, "mxfp4") == 0).sum() == 31
    assert (quantize_mx(x, "nvfp4") == 0).sum() == 15


@pytest.mark.parametrize(
    "options, message",
    [
        ({"fmt": "mxfp5"}, "fmt='mxfp5': allowed are mxfp4, "),
        ({"scale_rule": "ceil"}, "allowed for mxfp4 are floor, even, rceil"),
        ({"fmt": "nvfp4", "scale_rule": "even"}, "allowed for nvfp4 are floor"),
        ({"rounding": "toward_zero"}, "allowed are even, stochastic"),
        ({"axis": 2}, "axis=2: x has 2 dimensions"),
        ({"block": 0}, "block=0"),
        ({"block": 16.0}, "block=16.0"),
        ({"rounding": "stochastic", "seed": -1}, "seed=-1"),
    ],
)
def test_bad_input(options, message):
    with pytest.raises(BadInput, match=message.replace("[", r"\[")):
        quantize_mx(torch.ones(2, 32), **options)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.int32])
def test_bad_dtype(dtype):
    with pytest.raises(BadInput, match="float32 or"):
        quantize_mx(torch.ones(32, dtype=dtype))
