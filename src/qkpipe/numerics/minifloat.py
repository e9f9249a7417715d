"""Emulated precision: fp32 values rounded to m explicit mantissa bits, the exponent range untouched.

The integer trick, on the fp32 pattern i with s = 23 - m low bits to drop:

    even          i + ((2^(s-1) - 1) + bit s of i), then clear the low s bits
    stochastic    i + (u mod 2^s), u a uniform u32, then clear: up with probability (dropped part) / 2^s
    toward zero   clear

Adding to the pattern adds to the magnitude (fp32 is sign-magnitude), and a carry out of the mantissa moves on
to the exponent, as it should. What follows from it at the edges:

- inf stays inf; a NaN stays a NaN, made quiet (so that clearing its payload cannot turn it into inf).
- Past the largest value of m bits, `even` gives inf from the midpoint to 2^128 on, as IEEE 754 does, and
  `stochastic` gives inf with the probability of any other step up; `toward_zero` stays finite.
- fp32 subnormals lose the same low s bits of their pattern: the step is 2^(s-149), fixed point, as in bf16.
- m = 23 is the identity. m = 7, even, is bfloat16.

The `*_nb` functions are the same on scalars, for compiled loops, which inline them; all take s = 23 - m in
0..22 as int32, are the identity at s = 0 (but for quieting a NaN), and have no branch:

    round_even_bits_nb(i: int32, s: int32) -> int32
    round_stochastic_bits_nb(i: int32, s: int32, u: uint32) -> int32
    round_toward_zero_bits_nb(i: int32, s: int32) -> int32
    round_bits_nb(i: int32, s: int32, rounding: EVEN | STOCHASTIC | TOWARD_ZERO, u: uint32) -> int32
    to_bits_nb(x: float32) -> int32
    to_float_nb(i: int32) -> float32
    round_even_nb(x: float32, s: int32) -> float32
    round_nb(x: float32, s: int32, rounding, u: uint32) -> float32
"""

import numpy as np
import torch

from qkpipe.errors import BadInput
from qkpipe.numerics._numba import HAVE_NUMBA, compiled, helper
from qkpipe.numerics.counter_rng import draw_nb, hash_u32, stream_keys, stream_keys_nb

EVEN, STOCHASTIC, TOWARD_ZERO = 0, 1, 2
ROUNDINGS = {"even": EVEN, "stochastic": STOCHASTIC, "toward_zero": TOWARD_ZERO}

_ABS = 0x7FFFFFFF
_INF = 0x7F800000
_QUIET = 0x00400000


def round_minifloat(
    x: torch.Tensor, mantissa_bits: int, rounding: str = "even", *, seed: int = 0, stream: int = 0
) -> torch.Tensor:
    """Round an fp32 tensor to `mantissa_bits` explicit mantissa bits.

    Args:
        x: float32 tensor of any shape, strides and device.
        mantissa_bits: 1 to 23; 23 is fp32 itself, 10 tf32, 7 bf16.
        rounding: "even" (to nearest, ties to even), "stochastic" (unbiased) or "toward_zero".
        seed, stream: of the stochastic draw, integers in [0, 2^32); element number n in row-major order takes
            the draw of counter n (see counter_rng), so a call is a pure function of its arguments.

    Returns:
        A new contiguous float32 tensor of x's shape, outside of autograd. The plain and the compiled path
        (numba, on a CPU) give equal bits.

    Raises:
        BadInput: mantissa_bits, rounding, seed or stream out of range, or x not float32.
    """
    if isinstance(mantissa_bits, bool) or not isinstance(mantissa_bits, int) or not 1 <= mantissa_bits <= 23:
        raise BadInput(f"mantissa_bits={mantissa_bits!r}: allowed are the integers 1 to 23")
    if rounding not in ROUNDINGS:
        raise BadInput(f"rounding={rounding!r}: allowed are {', '.join(ROUNDINGS)}")
    if x.dtype != torch.float32:
        raise BadInput(f"x.dtype={x.dtype}: round_minifloat takes torch.float32")
    stream_keys(seed, stream)  # refuses what is out of range, on every path

    x = x.detach().contiguous()
    if mantissa_bits == 23:
        return x.clone()
    if HAVE_NUMBA and x.device.type == "cpu":
        out = torch.empty_like(x)
        s = np.int32(23 - mantissa_bits)
        _round_kernel(_bits(x), _bits(out), s, ROUNDINGS[rounding], np.uint32(seed), np.uint32(stream))
        return out
    return _round_plain(x, mantissa_bits, rounding, seed, stream)


def _round_plain(x: torch.Tensor, mantissa_bits: int, rounding: str, seed: int, stream: int) -> torch.Tensor:
    """The reference: PyTorch operations on the patterns, any device."""
    s = 23 - mantissa_bits
    low = (1 << s) - 1
    i = x.view(torch.int32)
    if rounding == "even":
        i = i + ((((1 << s) >> 1) - 1 + ((i >> s) & 1)) & low)
    elif rounding == "stochastic":
        counter = torch.arange(x.numel(), device=x.device).view(x.shape)
        i = i + (hash_u32(seed, stream, counter) & low).to(torch.int32)
    i = torch.where(x.isnan(), x.view(torch.int32) | _QUIET, i)
    return (i & ~low).view(torch.float32)


def _bits(x: torch.Tensor) -> np.ndarray:
    """The fp32 patterns of a contiguous CPU tensor as a flat int32 array, without a copy."""
    return x.view(-1).numpy().view(np.int32)


@helper
def to_bits_nb(x):
    """The pattern of a float32."""
    return np.float32(x).view(np.int32)


@helper
def to_float_nb(i):
    """The float32 of a pattern."""
    return np.int32(i).view(np.float32)


@helper
def finish_bits_nb(i, rounded, low):
    """Clear the low bits of a pattern that has had its increment; i, the original, decides what is a NaN."""
    rounded = np.int32(i | np.int32(_QUIET)) if np.int32(i & np.int32(_ABS)) > np.int32(_INF) else rounded
    return np.int32(rounded & np.int32(~low))


@helper
def round_even_bits_nb(i, s):
    """To nearest, ties to even."""
    low = np.int32((np.int32(1) << s) - np.int32(1))
    up = np.int32(np.int32(np.int32(1) << s) >> np.int32(1)) - np.int32(1) + ((i >> s) & np.int32(1))
    return finish_bits_nb(i, np.int32(i + (up & low)), low)


@helper
def round_stochastic_bits_nb(i, s, u):
    """Up with probability (dropped part) / 2^s: unbiased over draws."""
    low = np.int32((np.int32(1) << s) - np.int32(1))
    return finish_bits_nb(i, np.int32(i + (np.int32(u) & low)), low)


@helper
def round_toward_zero_bits_nb(i, s):
    """Truncated."""
    low = np.int32((np.int32(1) << s) - np.int32(1))
    return finish_bits_nb(i, i, low)


@helper
def round_bits_nb(i, s, rounding, u):
    """Any mode; u is looked at under STOCHASTIC only."""
    if rounding == EVEN:
        return round_even_bits_nb(i, s)
    if rounding == STOCHASTIC:
        return round_stochastic_bits_nb(i, s, u)
    return round_toward_zero_bits_nb(i, s)


@helper
def round_even_nb(x, s):
    """`round_even_bits_nb` on the value."""
    return to_float_nb(round_even_bits_nb(to_bits_nb(x), s))


@helper
def round_nb(x, s, rounding, u):
    """`round_bits_nb` on the value."""
    return to_float_nb(round_bits_nb(to_bits_nb(x), s, rounding, u))


@compiled
def _round_kernel(i_N, out_N, s, rounding, seed, stream):
    if rounding == EVEN:
        for n in range(i_N.size):
            out_N[n] = round_even_bits_nb(i_N[n], s)
    elif rounding == STOCHASTIC:
        k1, k2 = stream_keys_nb(seed, stream)
        for n in range(i_N.size):
            out_N[n] = round_stochastic_bits_nb(i_N[n], s, draw_nb(k1, k2, np.uint32(n)))
    else:
        for n in range(i_N.size):
            out_N[n] = round_toward_zero_bits_nb(i_N[n], s)
