"""Microscaling formats on a GPU: `qkpipe.numerics.quantize_mx` as one pass over memory, with the same bits.

A program has ROWS blocks of 32 elements (NVFP4: 16). x is taken as (outer, length, inner), contiguous, with blocks
along `length`; block r = (o * n_blocks + n) * inner + c. The rules are those of `qkpipe.numerics.mx`; NVFP4 takes a
pass more, for the tensor's scale, and its quotients and products float64.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from qkpipe_kernels.launch import Launch
from qkpipe_kernels.rounding import cast_to, hash_u32, signed

from qkpipe.errors import BadInput
from qkpipe.numerics.counter_rng import stream_keys
from qkpipe.numerics.mx import FORMATS, ROUNDINGS, SCALE_RULES, nvfp4_tensor_scale

BLOCK = 32  # of the MX formats
_FLOOR, _EVEN, _RCEIL = (tl.constexpr(SCALE_RULES.index(rule)) for rule in ("floor", "even", "rceil"))
_NAN_E8M0, _NAN_E4M3 = tl.constexpr(255), tl.constexpr(127)
_FP32_MAX = tl.constexpr(torch.finfo(torch.float32).max)
_NAN = tl.constexpr(float("nan"))


@triton.jit
def _scale_byte(
    amax, M: tl.constexpr, EMAX: tl.constexpr, LARGEST_MANTISSA: tl.constexpr, RULE: tl.constexpr,
    STOCHASTIC: tl.constexpr,
):  # fmt: skip
    """e + 127 of the scale 2^e, from the pattern of a finite amax."""
    HALF: tl.constexpr = 1 << (22 - M)
    exponent = amax >> 23
    if RULE == _EVEN:
        exponent = (amax + HALF) >> 23
    elif RULE == _RCEIL:
        exponent += ((amax & 0x7FFFFF) > LARGEST_MANTISSA).to(tl.int32)
    UP: tl.constexpr = 2 * HALF - 1 if STOCHASTIC else HALF
    overflows = (exponent == 255) & (((amax + UP) >> 23) == 255)
    return tl.maximum(exponent - overflows.to(tl.int32) - EMAX, 0)


@triton.jit
def _elements(
    y,
    seed,
    stream,
    counter,
    M: tl.constexpr,
    EMIN: tl.constexpr,
    LARGEST: tl.constexpr,
    STOCHASTIC: tl.constexpr,
):
    """Non-negative scaled values on the element's grid."""
    exponent = tl.maximum(y.to(tl.int32, bitcast=True) & 0x7F800000, (EMIN + 127) << 23)
    if STOCHASTIC:
        v = y * ((254 + M - (exponent >> 23)) << 23).to(tl.float32, bitcast=True)
        whole = v.to(tl.int32)
        draw = hash_u32(seed, stream, counter)
        down = ((1 << 24) - (draw >> 8).to(tl.int32)).to(tl.float32) * 5.9604644775390625e-08
        whole += (v - whole.to(tl.float32) >= down).to(tl.int32)
        q = whole.to(tl.float32) * (exponent - (M << 23)).to(tl.float32, bitcast=True)
    else:
        # c is 2^23 steps, so that y + c is rounded to whole steps.
        c = (exponent + ((23 - M) << 23)).to(tl.float32, bitcast=True)
        q = (y + c) - c
    return tl.minimum(q, LARGEST)


@triton.jit
def _nv_scale(amax, tensor_scale):
    """(scale of the elements, float64; its E4M3 byte) from a finite amax and the tensor's scale, float64."""
    ratio = amax.to(tl.float64) / (tensor_scale * 6.0)
    ratio = tl.minimum(tl.maximum(ratio, 0.015625), 448.0)
    i = ratio.to(tl.int64, bitcast=True)
    # To nearest even at 3 bits; the range is E4M3's normal one.
    i = ((i + 0x0000FFFFFFFFFFFF + ((i >> 49) & 1)) >> 49) << 49
    byte = ((i >> 49) - ((1023 - 7) << 3)).to(tl.int32)
    return i.to(tl.float64, bitcast=True) * tensor_scale, byte


@triton.jit
def _nv_elements(y, seed, stream, counter, STOCHASTIC: tl.constexpr):
    """Non-negative scaled values, float64, on E2M1's grid."""
    step = tl.where(y >= 4.0, 2.0, tl.where(y >= 2.0, 1.0, 0.5)).to(tl.float64)
    k = y / step
    if STOCHASTIC:
        whole = k.to(tl.int32).to(tl.float64)
        draw = hash_u32(seed, stream, counter)
        down = ((1 << 24) - (draw >> 8).to(tl.int32)).to(tl.float64) * 5.9604644775390625e-08
        k = whole + (k - whole >= down).to(tl.float64)
    else:
        k = (k + 4503599627370496.0) - 4503599627370496.0  # 2^52: rounded to whole steps
    return tl.minimum(k * step, 6.0)


@triton.jit
def _codes(q, negative, M: tl.constexpr, EMIN: tl.constexpr, BITS: tl.constexpr):
    """uint8 codes of values on the grid."""
    normal = (q.to(tl.int32, bitcast=True) >> (23 - M)) - ((EMIN + 126) << M)
    LEAST: tl.constexpr = 2.0**EMIN
    PER_STEP: tl.constexpr = 2.0 ** (M - EMIN)
    code = tl.where(q >= LEAST, normal, (q * PER_STEP).to(tl.int32))
    return (code | (negative.to(tl.int32) << (BITS - 1))).to(tl.uint8)


@triton.jit(do_not_specialize=["seed", "stream"])
def quantize_blocks(
    x_ptr, y_ptr, codes_ptr, scales_ptr, error_ptr, tensor_scale_ptr, gain, seed, stream, n_rows, length, inner, n_blocks,
    M: tl.constexpr, EMIN: tl.constexpr, EMAX: tl.constexpr, LARGEST: tl.constexpr,
    LARGEST_MANTISSA: tl.constexpr, BITS: tl.constexpr, RULE: tl.constexpr, STOCHASTIC: tl.constexpr,
    VALUES: tl.constexpr, CODES: tl.constexpr, PACK: tl.constexpr, GAIN: tl.constexpr, ERROR: tl.constexpr,
    NV: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """VALUES writes dequantized values to y (with GAIN, x + gain * (Q(x) - x)), ERROR what was added to x; CODES
    writes codes and scales, laid out as x, or with PACK two codes a byte, rows outer * inner, blocks last.
    WHOLE: length is a multiple of BLOCK and n_rows of ROWS. NV: NVFP4, with the tensor's scale in memory.
    """
    r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    c = r % inner
    n = (r // inner) % n_blocks
    o = r // inner // n_blocks
    j = tl.arange(0, BLOCK)
    at = ((o * length + n * BLOCK) * inner + c)[:, None] + j[None, :] * inner
    inside = (r < n_rows)[:, None] & ((n * BLOCK)[:, None] + j[None, :] < length)
    x = (tl.load(x_ptr + at) if WHOLE else tl.load(x_ptr + at, mask=inside, other=0.0)).to(tl.float32)
    i = x.to(tl.int32, bitcast=True)
    amax = tl.max(i & 0x7FFFFFFF, 1)
    broken = amax >= 0x7F800000
    amax = tl.where(broken, 0, amax)
    u_seed, u_stream = seed.to(tl.uint32, bitcast=True), stream.to(tl.uint32, bitcast=True)
    if NV:
        tensor_scale = tl.load(tensor_scale_ptr).to(tl.float64)
        scale, byte = _nv_scale(amax.to(tl.float32, bitcast=True), tensor_scale)
        y = tl.where(broken[:, None], 0.0, tl.abs(x).to(tl.float64) / scale[:, None])
        q_64 = _nv_elements(y, u_seed, u_stream, at.to(tl.uint32), STOCHASTIC)
        q = q_64.to(tl.float32)
        magnitude = tl.minimum((q_64 * scale[:, None]).to(tl.float32), _FP32_MAX)
    else:
        byte = _scale_byte(amax, M, EMAX, LARGEST_MANTISSA, RULE, STOCHASTIC)
        inverse = ((254 - byte) << 23).to(tl.float32, bitcast=True)
        # 2^-127 is subnormal.
        scale = tl.maximum(byte << 23, 0x00400000).to(tl.float32, bitcast=True)
        y = tl.where(broken[:, None], 0.0, tl.abs(x) * inverse[:, None])
        q = _elements(y, u_seed, u_stream, at.to(tl.uint32), M, EMIN, LARGEST, STOCHASTIC)
        magnitude = q * scale[:, None]
    if VALUES:
        value = (magnitude.to(tl.int32, bitcast=True) | (i & -0x80000000)).to(tl.float32, bitcast=True)
        value = tl.where(broken[:, None], _NAN, value)
        error = value - x
        if GAIN:
            error = error * gain
            value = x + error
        if ERROR:
            tl.store(error_ptr + at, error, mask=inside)
        value = cast_to(value, y_ptr.dtype.element_ty)
        if WHOLE:
            tl.store(y_ptr + at, value)
        else:
            tl.store(y_ptr + at, value, mask=inside)
    if CODES:
        scales = tl.where(broken, _NAN_E4M3 if NV else _NAN_E8M0, byte).to(tl.uint8)
        code = _codes(q, (i < 0) & (broken == 0)[:, None], M, EMIN, BITS)
        if PACK:
            row = o * inner + c
            low, high = tl.split(tl.reshape(code, (ROWS, BLOCK // 2, 2)))
            pair = tl.arange(0, BLOCK // 2)
            at = (row * n_blocks + n)[:, None] * (BLOCK // 2) + pair[None, :]
            tl.store(codes_ptr + at, low | (high << 4), mask=(r < n_rows)[:, None])
            tl.store(scales_ptr + row * n_blocks + n, scales, mask=r < n_rows)
        else:
            tl.store(codes_ptr + at, code, mask=inside)
            tl.store(scales_ptr + r, scales, mask=r < n_rows)


def block_of(fmt: str) -> int:
    """Elements a block of the format."""
    return 16 if fmt == "nvfp4" else BLOCK


def quantize_mx(
    x: torch.Tensor,
    fmt: str = "mxfp4",
    *,
    axis: int = -1,
    scale_rule: str = "floor",
    rounding: str = "even",
    seed: int = 0,
    stream: int = 0,
    return_codes: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`qkpipe.numerics.quantize_mx` for blocks of the format's own size: the same arguments, results, bits."""
    _check(x, fmt, axis, scale_rule, rounding)
    x = x.detach().contiguous()
    values = torch.empty_like(x)
    length = x.shape[axis]
    scales_shape = list(x.shape)
    scales_shape[axis] = -(-length // block_of(fmt))
    codes = torch.empty(x.shape if return_codes else (0,), dtype=torch.uint8, device=x.device)
    scales = torch.empty(scales_shape if return_codes else (0,), dtype=torch.uint8, device=x.device)
    _launch(x, fmt, axis, scale_rule, rounding, seed, stream, values=values, codes=codes, scales=scales)
    return (values, codes, scales) if return_codes else values


def quantize_into_gradient(
    gradient: torch.Tensor,
    fmt: str = "mxfp4",
    *,
    gain: float = 1.0,
    scale_rule: str = "floor",
    rounding: str = "even",
    seed: int = 0,
    stream: int = 0,
    error: torch.Tensor | None = None,
) -> None:
    """gradient += gain * (Q(gradient) - gradient), in place, blocks along its last axis; at gain 1, Q(gradient).

    gradient: contiguous float32 or bfloat16. error: float32 of its shape, contiguous; takes the error before the
    sum is rounded to gradient's dtype.
    """
    if not gradient.is_contiguous():
        raise BadInput(f"gradient: strides {gradient.stride()}; allowed: contiguous (it is written in place)")
    _check(gradient, fmt, -1, scale_rule, rounding)
    if error is not None and (
        error.shape != gradient.shape or error.dtype != torch.float32 or not error.is_contiguous()
    ):
        raise BadInput(
            f"error: {tuple(error.shape)} {error.dtype}; allowed: contiguous float32 of gradient's shape"
        )
    _launch(gradient, fmt, -1, scale_rule, rounding, seed, stream, values=gradient, gain=gain, error=error)


def pack_mxfp4(
    x: torch.Tensor,
    *,
    axis: int = -1,
    scale_rule: str = "floor",
    rounding: str = "even",
    seed: int = 0,
    stream: int = 0,
    multiple: int = 128,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A matrix as a tensor core takes it: MXFP4 along `axis`, that axis last and padded with zeros to `multiple`.

    x: (M, K) with axis -1, or (K, M) with axis 0, float32 or bfloat16. Returns codes, uint8 (M, K'/2), the even
    element in the low half of a byte, and E8M0 scales, uint8 (M, K'/32).
    """
    if x.dim() != 2 or multiple % BLOCK:
        raise BadInput(
            f"x: {x.dim()} dimensions, multiple = {multiple}; allowed: 2, and a multiple of {BLOCK}"
        )
    _check(x, "mxfp4", axis, scale_rule, rounding)
    x = x.detach().contiguous()
    rows, n_blocks = x.shape[1 - axis % 2], -(-x.shape[axis] // multiple) * (multiple // BLOCK)
    codes = torch.empty(rows, n_blocks * BLOCK // 2, dtype=torch.uint8, device=x.device)
    scales = torch.empty(rows, n_blocks, dtype=torch.uint8, device=x.device)
    _launch(x, "mxfp4", axis, scale_rule, rounding, seed, stream, codes=codes, scales=scales, pack=True)
    return codes, scales


def _check(x, fmt, axis, scale_rule, rounding) -> None:
    for name, given, allowed in (
        ("fmt", fmt, FORMATS),
        ("scale_rule", scale_rule, SCALE_RULES if fmt != "nvfp4" else ("floor",)),
        ("rounding", rounding, ROUNDINGS),
        ("x.dtype", x.dtype, (torch.float32, torch.bfloat16)),
    ):
        if given not in allowed:
            raise BadInput(f"{name} = {given!r}; allowed: {', '.join(map(str, allowed))}")
    if not -x.dim() <= axis < x.dim():
        raise BadInput(f"axis = {axis}; x has {x.dim()} dimensions")


def _launch(x, *arguments, **outputs) -> None:
    if x.numel():
        quantize_launch(x, *arguments, **outputs).run()


def quantize_launch(
    x, fmt, axis, scale_rule, rounding, seed, stream, *, values=None, codes=None, scales=None, gain=1.0, error=None,
    pack=False,
):  # fmt: skip
    """The launch of `quantize_blocks` for a contiguous x; outputs that are None or empty are not written."""
    stream_keys(seed, stream)  # refuses what is out of range
    element, block = FORMATS[fmt], block_of(fmt)
    axis %= x.dim()
    length, inner = x.shape[axis], x.shape[axis + 1 :].numel()
    outer = x.numel() // (length * inner)
    writes_codes = codes is not None and codes.numel() > 0
    n_blocks = scales.shape[-1] if pack else -(-length // block)
    n_rows = outer * n_blocks * inner
    rows = 2048 // block
    arguments = {
        "x_ptr": x,
        "y_ptr": x if values is None else values,
        "codes_ptr": codes if writes_codes else x,
        "scales_ptr": scales if writes_codes else x,
        "error_ptr": x if error is None else error,
        "tensor_scale_ptr": nvfp4_tensor_scale(x) if fmt == "nvfp4" else x,
        "gain": float(gain),
        "seed": signed(seed),
        "stream": signed(stream),
        "n_rows": n_rows,
        "length": length,
        "inner": inner,
        "n_blocks": n_blocks,
        "M": element.mantissa,
        "EMIN": element.emin,
        "EMAX": element.emax,
        "LARGEST": element.largest,
        "LARGEST_MANTISSA": int((element.largest * 2.0**-element.emax - 1) * 2**23),
        "BITS": element.bits,
        "RULE": SCALE_RULES.index(scale_rule),
        "STOCHASTIC": rounding == "stochastic",
        "VALUES": values is not None,
        "CODES": writes_codes,
        "PACK": pack,
        "GAIN": gain != 1.0,
        "ERROR": error is not None,
        "NV": fmt == "nvfp4",
        "BLOCK": block,
        "WHOLE": n_rows % rows == 0 and length == n_blocks * block,
        "ROWS": rows,
    }
    return Launch(
        quantize_blocks, (triton.cdiv(n_rows, rows),), arguments, {"num_warps": 4, "enable_fp_fusion": False}
    )
