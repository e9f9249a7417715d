"""exp, log and tanh in fp32 whose bits are the same everywhere.

torch's, numpy's, numba's and CUDA's exp differ in the last bit, so a bit-exact recurrence needs its own.
These are the Cody-Waite reductions and polynomials of Cephes (expf, logf, tanhf; S. Moshier), written only with
individually rounded fp32 additions and multiplications, comparisons and integer operations on the pattern:
any backend that neither contracts a*b+c nor flushes subnormals reproduces the bits. The error is below 1.1
units in the last place (tested).
"""

from __future__ import annotations

import numpy as np
import torch

from qkpipe.numerics._numba import helper
from qkpipe.numerics.minifloat import to_bits_nb, to_float_nb

LOG2_E = 1.44269504088896341
LN2_HIGH = 0.693359375  # 9 significant bits: n * LN2_HIGH is exact for |n| < 2^15
LN2_LOW = -2.12194440e-4
ROUND_TO_INT = 12582912.0  # 1.5 * 2^23: adding it leaves the nearest integer in the low bits of the pattern
EXP_MAX = 89.0  # beyond it exp is inf
EXP_MIN = -105.0  # below it exp is 0, subnormals included
EXP_POLY = (
    1.9875691500e-4,
    1.3981999507e-3,
    8.3334519073e-3,
    4.1665795894e-2,
    1.6666665459e-1,
    5.0000001201e-1,
)
SQRT_HALF = 0.707106781186547524
TWO_23 = 8388608.0
SMALLEST_NORMAL = 2.0**-126
LOG_POLY = (
    7.0376836292e-2,
    -1.1514610310e-1,
    1.1676998740e-1,
    -1.2420140846e-1,
    1.4249322787e-1,
    -1.6668057665e-1,
    2.0000714765e-1,
    -2.4999993993e-1,
    3.3333331174e-1,
)
TANH_SMALL = 0.625  # below it a polynomial, above it exp
TANH_POLY = (
    -5.70498872745e-3,
    2.06390887954e-2,
    -5.37397155531e-2,
    1.33314422036e-1,
    -3.33332819422e-1,
)


def _power_of_two(n: torch.Tensor) -> torch.Tensor:
    return ((n + 127) << 23).view(torch.float32)


def exp_f32(x: torch.Tensor) -> torch.Tensor:
    """e^x elementwise, fp32 in and out, any shape. exp(-inf) = 0, exp(0) = 1; NaN and subnormals are kept."""
    x = torch.where(x > EXP_MAX, EXP_MAX, x)
    x = torch.where(x < EXP_MIN, EXP_MIN, x)
    shifted = x * LOG2_E + ROUND_TO_INT
    n_float = shifted - ROUND_TO_INT
    r = (x - n_float * LN2_HIGH) - n_float * LN2_LOW
    poly = torch.full_like(r, EXP_POLY[0])
    for coefficient in EXP_POLY[1:]:
        poly = poly * r + coefficient
    y = (poly * (r * r) + r) + 1.0
    # Two factors, since 2^n itself may be subnormal or infinite; only the last product rounds.
    n = shifted.view(torch.int32) - _pattern(ROUND_TO_INT)
    half = n >> 1
    return (y * _power_of_two(half)) * _power_of_two(n - half)


def log_f32(x: torch.Tensor) -> torch.Tensor:
    """Natural logarithm elementwise, fp32 in and out, any shape. log(0) = -inf, log of a negative is NaN."""
    subnormal = x < SMALLEST_NORMAL
    bits = torch.where(subnormal, x * TWO_23, x).view(torch.int32)
    exponent = (bits >> 23) - 126 - torch.where(subnormal, 23, 0).to(torch.int32)
    fraction = ((bits & 0x007FFFFF) | 0x3F000000).view(torch.float32)  # in [0.5, 1)
    low = fraction < SQRT_HALF
    e = (exponent - low.to(torch.int32)).to(torch.float32)
    f = torch.where(low, fraction + fraction, fraction) - 1.0
    z = f * f
    poly = torch.full_like(f, LOG_POLY[0])
    for coefficient in LOG_POLY[1:]:
        poly = poly * f + coefficient
    y = (poly * f) * z + e * LN2_LOW
    y = y - z * 0.5
    result = (f + y) + e * LN2_HIGH
    result = torch.where(x == 0, -torch.inf, result)
    result = torch.where(x == torch.inf, x, result)
    return torch.where((x < 0) | (x != x), torch.nan, result)


def tanh_f32(x: torch.Tensor) -> torch.Tensor:
    """tanh x elementwise, fp32 in and out, any shape. tanh(+-inf) = +-1; NaN is kept."""
    size = torch.where(x < 0, -x, x)
    large = 1.0 - 2.0 / (exp_f32(size + size) + 1.0)
    square = x * x
    poly = torch.full_like(x, TANH_POLY[0])
    for coefficient in TANH_POLY[1:]:
        poly = poly * square + coefficient
    small = (poly * square) * x + x
    return torch.where(size < TANH_SMALL, small, torch.where(x < 0, -large, large))


def _pattern(x: float) -> int:
    return int(torch.tensor(x, dtype=torch.float32).view(torch.int32))


# The same on float32 scalars, for compiled loops. Constants are typed, or numba would compute in float64.
_F = np.float32
_LOG2_E, _LN2_HIGH, _LN2_LOW = _F(LOG2_E), _F(LN2_HIGH), _F(LN2_LOW)
_ROUND_TO_INT, _EXP_MAX, _EXP_MIN = _F(ROUND_TO_INT), _F(EXP_MAX), _F(EXP_MIN)
_E0, _E1, _E2, _E3, _E4, _E5 = (_F(c) for c in EXP_POLY)
_L0, _L1, _L2, _L3, _L4, _L5, _L6, _L7, _L8 = (_F(c) for c in LOG_POLY)
_ROUND_PATTERN = np.int32(_pattern(ROUND_TO_INT))
_ONE, _HALF, _ZERO, _INF, _NAN = _F(1), _F(0.5), _F(0), _F(np.inf), _F(np.nan)
_SQRT_HALF, _TWO_23, _SMALLEST_NORMAL = _F(SQRT_HALF), _F(TWO_23), _F(SMALLEST_NORMAL)


@helper
def exp_nb(x):
    """`exp_f32` of a float32: the same bits, no branch."""
    x = _EXP_MAX if x > _EXP_MAX else x
    x = _EXP_MIN if x < _EXP_MIN else x
    shifted = x * _LOG2_E + _ROUND_TO_INT
    n_float = shifted - _ROUND_TO_INT
    r = (x - n_float * _LN2_HIGH) - n_float * _LN2_LOW
    poly = ((((_E0 * r + _E1) * r + _E2) * r + _E3) * r + _E4) * r + _E5
    y = (poly * (r * r) + r) + _ONE
    n = np.int32(to_bits_nb(shifted) - _ROUND_PATTERN)
    half = np.int32(n >> np.int32(1))
    low = to_float_nb(np.int32(np.int32(half + np.int32(127)) << np.int32(23)))
    high = to_float_nb(np.int32(np.int32(np.int32(n - half) + np.int32(127)) << np.int32(23)))
    return (y * low) * high


@helper
def log_nb(x):
    """`log_f32` of a float32: the same bits."""
    if x != x or x < _ZERO:
        return _NAN
    if x == _ZERO:
        return -_INF
    if x == _INF:
        return x
    subnormal = x < _SMALLEST_NORMAL
    bits = to_bits_nb(x * _TWO_23 if subnormal else x)
    exponent = (bits >> 23) - 126 - (23 if subnormal else 0)
    fraction = to_float_nb(np.int32((bits & 0x007FFFFF) | 0x3F000000))
    if fraction < _SQRT_HALF:
        exponent -= 1
        fraction = fraction + fraction
    e = _F(exponent)
    f = fraction - _ONE
    z = f * f
    poly = _L0 * f + _L1
    poly = poly * f + _L2
    poly = poly * f + _L3
    poly = poly * f + _L4
    poly = poly * f + _L5
    poly = poly * f + _L6
    poly = poly * f + _L7
    poly = poly * f + _L8
    y = (poly * f) * z + e * _LN2_LOW
    y = y - z * _HALF
    return (f + y) + e * _LN2_HIGH
