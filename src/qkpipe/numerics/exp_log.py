"""exp and log in fp32 whose bits are the same everywhere.

torch's, numpy's, numba's and CUDA's exp differ in the last bit, so a bit-exact recurrence needs its own.
These are the Cody-Waite reductions and polynomials of Cephes (expf, logf; S. Moshier), written only with
individually rounded fp32 additions and multiplications, comparisons and integer operations on the pattern:
any backend that neither contracts a*b+c nor flushes subnormals reproduces the bits. The error is below 1.1
units in the last place (tested).
"""

from __future__ import annotations

import torch

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


def _pattern(x: float) -> int:
    return int(torch.tensor(x, dtype=torch.float32).view(torch.int32))
