"""What happens to q and k before attention: parameter-free QK normalisation, and rounding to io.

The normalisation (`qkpipe.model.qk_norm.unit_rms`) hangs on a switch in device memory, so that a guard can turn it
on without the host knowing: while the switch is 0 its kernels read nothing but the switch.
"""

import torch
import triton
import triton.language as tl
from qkpipe_kernels.launch import Launch, strides
from qkpipe_kernels.rounding import cast_to, round_to, rounding_code

from qkpipe.numerics.precision import Rounding

_ROWS = 64
_EPS = tl.constexpr(1.1754943508222875e-38)


@triton.jit
def _inverse_rms(x, D: tl.constexpr):
    return tl.div_rn(tl.full((x.shape[0],), 1.0, tl.float32), tl.sqrt_rn(tl.sum(x * x, 1) * (1.0 / D) + _EPS))


@triton.jit(do_not_specialize=["seed"])
def prepare_rows(
    x_ptr, y_ptr, inverse_ptr, switch_ptr, seed, H, T, x_b, x_h, x_t, y_b, y_h, y_t,
    ROUNDING: tl.constexpr, POINT: tl.constexpr, NORM: tl.constexpr, WRITE: tl.constexpr,
    D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Grid (B * H, blocks of rows). inverse = 1 / rms(x) of each row where the switch is on, else 1, if NORM;
    y = x * inverse rounded, if WRITE.
    """
    bh = tl.program_id(0)
    b, h = (bh // H).to(tl.int64), (bh % H).to(tl.int64)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    exists = rows < T
    columns = tl.arange(0, D)
    at_x = x_ptr + b * x_b + h * x_h + rows[:, None] * x_t + columns[None, :]
    inverse = tl.full((ROWS,), 1.0, tl.float32)
    if NORM:
        if tl.load(switch_ptr) != 0:
            inverse = _inverse_rms(tl.load(at_x, mask=exists[:, None], other=0.0).to(tl.float32), D)
        tl.store(inverse_ptr + bh * T + rows, inverse, mask=exists)
    if WRITE:
        x = tl.load(at_x, mask=exists[:, None], other=0.0).to(tl.float32) * inverse[:, None]
        element = (bh * T + rows)[:, None] * D + columns[None, :]
        y = round_to(x, ROUNDING, seed, POINT, bh * 0, element)
        at_y = y_ptr + b * y_b + h * y_h + rows[:, None] * y_t + columns[None, :]
        tl.store(at_y, y.to(y_ptr.dtype.element_ty), mask=exists[:, None])


@triton.jit
def norm_backward(
    x_ptr,
    g_ptr,
    inverse_ptr,
    switch_ptr,
    H,
    T,
    x_b,
    x_h,
    x_t,
    g_b,
    g_h,
    g_t,
    D: tl.constexpr,
    ROWS: tl.constexpr,
):
    """g, the gradient for y = x / rms(x), becomes that for x, in place, where the switch is on."""
    if tl.load(switch_ptr) != 0:
        bh = tl.program_id(0)
        b, h = (bh // H).to(tl.int64), (bh % H).to(tl.int64)
        rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
        exists = rows < T
        columns = tl.arange(0, D)
        at_x = x_ptr + b * x_b + h * x_h + rows[:, None] * x_t + columns[None, :]
        at_g = g_ptr + b * g_b + h * g_h + rows[:, None] * g_t + columns[None, :]
        inverse = tl.load(inverse_ptr + bh * T + rows, mask=exists, other=0.0)[:, None]
        y = tl.load(at_x, mask=exists[:, None], other=0.0).to(tl.float32) * inverse
        g = tl.load(at_g, mask=exists[:, None], other=0.0).to(tl.float32)
        g = inverse * (g - y * (tl.sum(y * g, 1) * (1.0 / D))[:, None])
        tl.store(at_g, cast_to(g, g_ptr.dtype.element_ty), mask=exists[:, None])


def round_rows(
    x: torch.Tensor, rounding: Rounding, point: int, seed: int, switch: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """x (B, H, T, D) normalised where `switch` (an int32 of 1 element, on x's device) is not 0, and rounded.

    Returns it as bfloat16 if the rounding fits in that, else as float32, and 1 / rms, fp32 (B, H, T), if there is
    a switch.
    """
    y = torch.empty_like(x, dtype=torch.bfloat16 if rounding.bits <= 7 else torch.float32)
    inverse = None if switch is None else torch.empty(x.shape[:3], device=x.device)
    _launch(x, y, inverse, switch, rounding, point, seed, write=True)
    return y, inverse


def inverse_rms(x: torch.Tensor, switch: torch.Tensor) -> torch.Tensor:
    """1 / rms of each row of x (B, H, T, D), fp32 (B, H, T), where the switch is on, else 1."""
    inverse = torch.empty(x.shape[:3], device=x.device)
    _launch(x, x, inverse, switch, Rounding(), 0, 0, write=False)
    return inverse


def _launch(x, y, inverse, switch, rounding, point, seed, write):
    B, H, T, D = x.shape
    arguments = {
        "x_ptr": x,
        "y_ptr": y,
        "inverse_ptr": x if inverse is None else inverse,
        "switch_ptr": x if switch is None else switch,
        "seed": seed,
        "H": H,
        "T": T,
        **strides(x=x, y=y),
        "ROUNDING": rounding_code(rounding),
        "POINT": point,
        "NORM": switch is not None,
        "WRITE": write,
        "D": D,
        "ROWS": _ROWS,
    }
    Launch(prepare_rows, (B * H, triton.cdiv(T, _ROWS)), arguments, {"enable_fp_fusion": False}).run()


def norm_backward_(g: torch.Tensor, x: torch.Tensor, inverse: torch.Tensor, switch: torch.Tensor) -> None:
    """Take the gradient g of the normalised x to that of x, in place, where the switch is on."""
    B, H, T, D = x.shape
    arguments = {
        "x_ptr": x,
        "g_ptr": g,
        "inverse_ptr": inverse,
        "switch_ptr": switch,
        "H": H,
        "T": T,
        **strides(x=x, g=g),
        "D": D,
        "ROWS": _ROWS,
    }
    Launch(norm_backward, (B * H, triton.cdiv(T, _ROWS)), arguments, {"enable_fp_fusion": False}).run()
