"""Device functions: emulated precision, its random draws, and the exp and log whose bits are defined.

They mirror `qkpipe.numerics.minifloat`, `counter_rng` and `exp_log`, which hold the definitions, operation by
operation; compiled without floating-point fusion they give the same bits. A rounding is one compile-time
integer, its code: 4 * (explicit mantissa bits) + mode.
"""

import triton
import triton.language as tl

from qkpipe.errors import BadInput
from qkpipe.numerics.precision import MODES, Rounding

INTERPRETED = bool(triton.knobs.runtime.interpret)
"""The kernels run on the CPU, under Triton's interpreter (decided when they are imported)."""

# The interpreter truncates when it casts to bfloat16, and multiplies bfloat16 matrices wrongly.
HARDWARE_BF16 = tl.constexpr(not INTERPRETED)

EVEN = tl.constexpr(MODES.index("even"))
STOCHASTIC = tl.constexpr(MODES.index("stochastic"))
FP32 = tl.constexpr(4 * 23)
BF16 = tl.constexpr(4 * 7)


def rounding_code(rounding: Rounding) -> int:
    """The compile-time integer of a rounding; fp32 is 92 in every mode."""
    if rounding.gain != 1:
        raise BadInput(f"gain = {rounding.gain}; allowed in the kernels: 1 (the CPU path has others)")
    return 4 * rounding.bits + (0 if rounding.bits == 23 else MODES.index(rounding.mode))


def bf16_parts(bits: int) -> int:
    """How many bfloat16 numbers hold one of `bits` explicit mantissa bits: the PARTS of `matmul`."""
    return -(-(bits + 1) // 8)


def signed(u32: int) -> int:
    """The int32 with the bits of a u32, which is how kernels take seeds."""
    return u32 - (1 << 32) if u32 >= 1 << 31 else u32


@triton.jit
def _mix(h):
    """lowbias32: uint32 -> uint32."""
    h = h ^ (h >> 16)
    h = h * 0x7FEB352D
    h = h ^ (h >> 15)
    h = h * 0x846CA68B
    return h ^ (h >> 16)


@triton.jit
def hash_u32(seed, stream, counter):
    """The draw of (seed, stream) at `counter`: uint32. seed, stream: uint32 scalars; counter: uint32."""
    k1 = _mix(_mix(seed + 0x9E3779B9) ^ stream)
    k2 = _mix(_mix(seed ^ 0x85EBCA6B) + stream)
    return _mix(_mix(counter ^ k1) + k2)


@triton.jit
def draw_u32(seed, POINT: tl.constexpr, tile, counter):
    """The draw at `counter` (int32, taken modulo 2^32) of the stream fold_in(POINT, tile): uint32."""
    point = tl.full([], POINT, tl.uint32)
    # Added to a tensor, since a loop index is a bare int to the interpreter.
    stream = _mix(_mix(point + 0x9E3779B9) ^ (tl.full([], 0, tl.uint32) + tile))
    return hash_u32(seed.to(tl.uint32, bitcast=True), stream, counter.to(tl.uint32, bitcast=True))


@triton.jit
def round_to(x, CODE: tl.constexpr, seed, POINT: tl.constexpr, tile, counter):
    """fp32 x rounded as CODE says. seed, tile: int32 scalars; counter: int32 of x's shape; read if stochastic."""
    if CODE == FP32:
        return x
    elif CODE == BF16 and HARDWARE_BF16:
        return x.to(tl.bfloat16).to(tl.float32)
    else:
        S: tl.constexpr = 23 - CODE // 4
        LOW: tl.constexpr = (1 << S) - 1
        MODE: tl.constexpr = CODE % 4
        i = x.to(tl.int32, bitcast=True)
        up = i
        if MODE == EVEN:
            up = i + (((1 << S) >> 1) - 1 + ((i >> S) & 1))
        elif MODE == STOCHASTIC:
            up = i + (draw_u32(seed, POINT, tile, counter) & LOW).to(tl.int32)
        up = tl.where(x != x, i | 0x00400000, up)
        return (up & ~LOW).to(tl.float32, bitcast=True)


@triton.jit
def cast_to(x, dtype: tl.constexpr):
    """fp32 x as fp32 or, rounded to nearest even, as bfloat16."""
    if dtype == tl.bfloat16:
        x = round_to(x, 28, 0, 0, 0, x)
    return x.to(dtype)


@triton.jit
def exp_f32(x):
    """e^x, the bits of `qkpipe.numerics.exp_log.exp_f32`."""
    x = tl.where(x > 89.0, 89.0, x)
    x = tl.where(x < -105.0, -105.0, x)
    shifted = x * 1.44269504088896341 + 12582912.0
    n_float = shifted - 12582912.0
    r = (x - n_float * 0.693359375) - n_float * -2.12194440e-4
    poly = 1.9875691500e-4 * r + 1.3981999507e-3
    poly = poly * r + 8.3334519073e-3
    poly = poly * r + 4.1665795894e-2
    poly = poly * r + 1.6666665459e-1
    poly = poly * r + 5.0000001201e-1
    y = (poly * (r * r) + r) + 1.0
    n = shifted.to(tl.int32, bitcast=True) - 0x4B400000
    half = n >> 1
    low = ((half + 127) << 23).to(tl.float32, bitcast=True)
    high = ((n - half + 127) << 23).to(tl.float32, bitcast=True)
    return (y * low) * high


@triton.jit
def log_f32(x):
    """Natural logarithm, the bits of `qkpipe.numerics.exp_log.log_f32`."""
    subnormal = x < 1.1754943508222875e-38
    bits = tl.where(subnormal, x * 8388608.0, x).to(tl.int32, bitcast=True)
    exponent = (bits >> 23) - 126 - tl.where(subnormal, 23, 0)
    fraction = ((bits & 0x007FFFFF) | 0x3F000000).to(tl.float32, bitcast=True)
    low = fraction < 0.707106781186547524
    e = (exponent - low.to(tl.int32)).to(tl.float32)
    f = tl.where(low, fraction + fraction, fraction) - 1.0
    z = f * f
    poly = 7.0376836292e-2 * f + -1.1514610310e-1
    poly = poly * f + 1.1676998740e-1
    poly = poly * f + -1.2420140846e-1
    poly = poly * f + 1.4249322787e-1
    poly = poly * f + -1.6668057665e-1
    poly = poly * f + 2.0000714765e-1
    poly = poly * f + -2.4999993993e-1
    poly = poly * f + 3.3333331174e-1
    y = (poly * f) * z + e * -2.12194440e-4
    y = y - z * 0.5
    result = (f + y) + e * 0.693359375
    result = tl.where(x == 0.0, float("-inf"), result)
    result = tl.where(x == float("inf"), x, result)
    return tl.where((x < 0.0) | (x != x), float("nan"), result)


@triton.jit
def exponential(x, SHARED: tl.constexpr):
    """e^x by the shared routine, or by the hardware's 2^x (2 ulp, and one instruction)."""
    if SHARED:
        return exp_f32(x)
    else:
        return tl.exp2(x * 1.4426950408889634)


@triton.jit
def matmul(a, b, A_PARTS: tl.constexpr, B_PARTS: tl.constexpr):
    """a @ b for fp32 or bfloat16 tiles, in fp32.

    PARTS: bfloat16 numbers whose sum holds an operand exactly: 1 (up to 8 significant bits), 2 (16) or 3
    (24). A wide a beside a narrow b is split, so that every product is exact on tensor cores; a wide b takes
    fp32 arithmetic.
    """
    if not HARDWARE_BF16 or B_PARTS > 1:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    elif A_PARTS > 1:
        b = b.to(tl.bfloat16)
        high = a.to(tl.bfloat16)
        rest = a - high.to(tl.float32)
        middle = rest.to(tl.bfloat16)
        product = tl.dot(middle, b)
        if A_PARTS > 2:
            product = tl.dot((rest - middle.to(tl.float32)).to(tl.bfloat16), b, product)
        return tl.dot(high, b, product)
    else:
        return tl.dot(a.to(tl.bfloat16), b.to(tl.bfloat16))
