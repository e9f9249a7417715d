"""MX quantizers and the MXFP4 product against `qkpipe.numerics.mx`, bit for bit."""

import pytest
import torch

pytest.importorskip(
    "triton", reason="triton is not installed: make kernels-test runs these under 3.6 and 3.9"
)

from qkpipe_kernels.mx import pack_mxfp4, quantize_into_gradient, quantize_mx
from qkpipe_kernels.mxfp4_gemm import mxfp4_gemm, weight_gradient

from qkpipe.errors import BadInput
from qkpipe.numerics import dispatch
from qkpipe.numerics import mx as reference
from qkpipe.numerics.mx import FORMATS, ROUNDINGS, SCALE_RULES

CASES = [(fmt, rule) for fmt in FORMATS for rule in (SCALE_RULES if fmt != "nvfp4" else ("floor",))]


def bits(x):
    return x.view(torch.int32) if x.dtype == torch.float32 else x


def patterns(shape, seed):
    """Every exponent equally likely, and some blocks with an inf or a NaN."""
    i = torch.randint(-(2**31), 2**31, shape, generator=torch.Generator().manual_seed(seed)).to(torch.int32)
    x = torch.where((i & 0x7F800000) == 0x7F800000, i & ~0x7F800000, i).view(torch.float32)
    x[0, 0], x[-1, -1] = torch.inf, torch.nan
    return x


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("fmt, scale_rule", CASES)
def test_bits_of_the_reference(fmt, scale_rule, rounding):
    for seed, (shape, axis) in enumerate((((5, 100), -1), ((70, 5), 0), ((2, 64), -1))):
        for x in (patterns(shape, seed), torch.randn(shape) * 2.0**-120, torch.randn(shape)):
            options = {"axis": axis, "scale_rule": scale_rule, "rounding": rounding, "seed": 5, "stream": 9}
            expected = reference.quantize_plain(x, fmt, **options)
            actual = quantize_mx(x, fmt, return_codes=True, **options)
            for name, a, b in zip(("values", "codes", "scales"), actual, expected):
                nan = (
                    a.isnan() & b.isnan() if a.is_floating_point() else torch.zeros_like(a, dtype=torch.bool)
                )
                assert ((bits(a) == bits(b)) | nan).all(), name


@pytest.mark.parametrize("gain", [1.0, 3.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_into_gradient(gain, dtype):
    gradient = torch.randn(7, 70, generator=torch.Generator().manual_seed(0)).to(dtype)
    quantized = reference.quantize_mx(gradient)
    expected_error = (quantized.float() - gradient.float()) * gain
    expected = quantized if gain == 1.0 else (gradient.float() + expected_error).to(dtype)
    error = torch.empty(gradient.shape)
    quantize_into_gradient(gradient, gain=gain, error=error)
    assert torch.equal(gradient, expected)
    assert torch.equal(error, expected_error)


def test_packed_operands_multiply_as_the_dequantized_ones():
    generator = torch.Generator().manual_seed(0)
    dy, x = torch.randn(150, 40, generator=generator), torch.randn(150, 70, generator=generator)
    expected = reference.quantize_mx(dy, axis=0).double().mT @ reference.quantize_mx(x, axis=0).double()
    actual = weight_gradient(dy, x)
    # Every product has 4 significant bits; only the fp32 sums round.
    assert (actual - expected).abs().max() <= 150 * 2**-24 * expected.abs().max()
    codes, scales = pack_mxfp4(dy, axis=0)
    assert codes.shape == (40, 128) and scales.shape == (40, 8)
    by_rows = pack_mxfp4(dy.mT.contiguous())
    assert torch.equal(codes, by_rows[0]) and torch.equal(scales, by_rows[1])


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda x: quantize_mx(x, "fp4"), "fmt = 'fp4'"),
        (lambda x: quantize_mx(x, "nvfp4", scale_rule="even"), "scale_rule = 'even'"),
        (lambda x: quantize_mx(x, scale_rule="ceil"), "scale_rule = 'ceil'"),
        (lambda x: quantize_mx(x.double()), "x.dtype"),
        (lambda x: quantize_mx(x, axis=2), "axis = 2"),
        (lambda x: quantize_into_gradient(x.mT), "gradient: strides"),
        (lambda x: mxfp4_gemm(*pack_mxfp4(x), *pack_mxfp4(x, multiple=256)), "256 columns"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(BadInput, match=message):
        call(torch.randn(4, 33))


@pytest.mark.parametrize(
    "fmt, block, by_kernels", [("mxfp4", 32, True), ("nvfp4", 16, True), ("mxfp4", 16, False)]
)
def test_dispatch_takes_blocks_of_the_formats_own_size(fmt, block, by_kernels):
    x = torch.randn(3, 70, generator=torch.Generator().manual_seed(0))
    found = dispatch.quantize(x, fmt, 1, block, "floor", "stochastic", 5, 9, True)
    assert (found is not None) == by_kernels
    if by_kernels:
        expected = reference.quantize_plain(x, fmt, rounding="stochastic", seed=5, stream=9)
        assert all(torch.equal(a, b) for a, b in zip(found, expected))
