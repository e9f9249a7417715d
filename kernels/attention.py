"""Streaming attention on a GPU: `qkpipe.numerics.streaming_attention` as Triton kernels.

The definitions are those of `qkpipe.numerics.streaming`. What differs is the order in which sums are
accumulated, in fp32, and, unless asked otherwise, the exponential (the hardware's); so a result may differ from the
reference's by one unit in the last place of the precision it is rounded to. At full precision inside (the
healthy setting) the kernels are a flash attention on bfloat16 tensor cores.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import triton
from qkpipe_kernels.attention_backward import (
    attention_backward_dkdv,
    attention_backward_dq,
    attention_delta,
    attention_delta_from_p,
)
from qkpipe_kernels.attention_forward import attention_forward
from qkpipe_kernels.launch import Launch, capability_of, strides
from qkpipe_kernels.prepare import inverse_rms, norm_backward_, round_rows
from qkpipe_kernels.rounding import bf16_parts, rounding_code, signed
from torch.autograd.function import once_differentiable

from qkpipe.errors import BadInput
from qkpipe.numerics.precision import ROUNDING_POINTS, Rounding, StreamPrecision, StreamRepair

HEAD_DIMS = (16, 32, 64, 128)
OPERANDS = ("exact", "bf16")
_POINTS = {point: index for index, point in enumerate(ROUNDING_POINTS)}
_FORWARD = ("qk", "s", "s_minus_m", "p", "block_sum", "rescale", "acc", "l", "m", "pv", "o", "lse")
_BACKWARD = ("bwd_s", "bwd_p", "dp", "ds")


@dataclass
class Statistics:
    """Per (B, H), fp32, outside of autograd; definitions in `qkpipe.numerics.streaming`; None if not asked for.

    max_logit: largest applied logit before any rounding. tied_fallbacks: int64, with max_logit. entropy: mean row
    entropy, nat. residual_r, residual_mean: of the rows of dS, filled in by the backward.
    """

    max_logit: torch.Tensor | None = None
    entropy: torch.Tensor | None = None
    residual_r: torch.Tensor | None = None
    residual_mean: torch.Tensor | None = None
    tied_fallbacks: torch.Tensor | None = None


@dataclass(frozen=True)
class Options:
    """One call's constants; see `attention`."""

    causal: bool = True
    scale: float | None = None
    tile: int = 64
    precision: StreamPrecision = field(default_factory=lambda: StreamPrecision(io=7))
    repair: StreamRepair = field(default_factory=StreamRepair)
    seed: int = 0
    operands: str = "exact"
    shared_exp: bool = False
    sense: bool = False
    entropy: bool = False
    residual: bool = False

    @property
    def fast_forward(self) -> bool:
        """No rounding between the products: the arithmetic of a stock kernel."""
        exact = all(getattr(self.precision, name).bits == 23 for name in _FORWARD)
        deterministic = self.precision.p_operand.mode != "stochastic"
        repair = self.repair
        repaired = repair.compensated or repair.tied_max_beta is not None or repair.out_gain != 1
        return exact and deterministic and self.scale > 0 and not self.shared_exp and not repaired

    @property
    def fast_backward(self) -> bool:
        exact = all(getattr(self.precision, name).bits == 23 for name in _BACKWARD)
        return exact and self.scale > 0 and not self.shared_exp

    def operand(self, rounding: Rounding) -> Rounding:
        """What a quantity of this precision is rounded to as an operand of a matrix product."""
        return Rounding(7) if self.operands == "bf16" and rounding.bits > 7 else rounding


class Tiling(NamedTuple):
    """A kernel's block of rows, block of keys, warps and pipeline stages."""

    rows: int
    keys: int
    warps: int
    stages: int


# Blocks as large as they can be without spilling, on every compute capability (capability: 80 for 8.0).


def forward_tiling(D: int, fast: bool, tile: int, wide: bool, capability: int) -> Tiling:
    """wide: the inputs are fp32, which tensor cores do not multiply exactly."""
    if wide:
        return Tiling(32, _block(tile, 32), 8 if D == 128 else 4, 1)
    warps = 4 if D < 128 and 90 <= capability < 100 else 8
    if fast:
        return Tiling(128, 32 if D == 128 and capability < 90 else 64, warps, 3)
    # A tile of more than one block computes its scores twice, and needs the registers.
    longest = 128 if tile == 128 and D < 128 else 64 if tile <= 64 or D == 128 or capability < 100 else 32
    return Tiling(64, _block(tile, longest), warps, 2)


def dq_tiling(D: int, fast: bool, wide: bool, split: bool, capability: int) -> Tiling:
    """split: an operand is multiplied as a sum of bfloat16 numbers, which takes registers."""
    if wide:
        return Tiling(16, 16, 4, 1) if D == 128 else Tiling(32, 32, 4, 1)
    if D < 128:
        return Tiling(128, 64 if fast or capability < 100 else 32, 8, 3)
    return Tiling(64 if split else 128, 32, 8, 2)


def dkdv_tiling(D: int, fast: bool, wide: bool, split: bool, capability: int) -> Tiling:
    if wide:
        return Tiling(16, 16, 4, 1) if D == 128 else Tiling(32, 32, 4, 1)
    if D < 128:
        return Tiling(64 if capability >= 90 and not split and (fast or capability < 100) else 32, 128, 8, 2)
    if split:
        return Tiling(16, 32, 8, 2)
    return Tiling(32, 128 if capability >= 90 else 64, 8, 2)


def effective_tile(tile: int, Tk: int) -> int:
    """A tile that cuts Tk keys as `tile` does, and is a power of two where it does not cut them at all."""
    return max(16, triton.next_power_of_2(Tk)) if tile >= Tk else tile


def _block(tile: int, longest: int) -> int:
    """Keys a block, a power of two of at least 16: it divides the tile, or reaches over its end, masked."""
    return math.gcd(tile, longest) if tile % 16 == 0 else min(longest, max(16, triton.next_power_of_2(tile)))


def unsupported(D: int) -> str | None:
    """Why the kernels cannot run this, or None."""
    return None if D in HEAD_DIMS else f"head dimension {D}; allowed: {', '.join(map(str, HEAD_DIMS))}"


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = True,
    scale: float | None = None,
    tile: int = 64,
    precision: StreamPrecision | None = None,
    repair: StreamRepair | None = None,
    seed: int = 0,
    operands: str = "bf16",
    norm_switch: torch.Tensor | None = None,
    sense: bool = False,
    entropy: bool = False,
    residual: bool = False,
    shared_exp: bool = False,
) -> tuple[torch.Tensor, Statistics]:
    """Softmax attention, differentiable once. The default is the healthy setting.

    Args:
        q: (B, H, Tq, D), k, v: (B, H_kv, Tk, D), H a multiple of H_kv, all float32 or all bfloat16, D in 16, 32, 64,
            128, the last axis contiguous; on a GPU, or on a CPU under Triton's interpreter.
        causal: row i sees keys 0..i; needs Tq == Tk. scale: of the logits, 1/sqrt(D) by default.
        tile, precision, repair, seed: as in `qkpipe.numerics.streaming_attention`; by default everything inside is
            fp32 and io bfloat16.
        operands: "bf16" rounds P and dS to bfloat16 as operands of the matrix products, where they are wider, as
            every stock kernel does; "exact" multiplies them as they are (slower, and what the reference does).
        norm_switch: int32 tensor of one element on q's device. Where it is not 0, each row of q and of k is first
            scaled to unit root mean square over D, in fp32. Read on the device; no host synchronisation.
        sense, entropy, residual: which statistics to return.
        shared_exp: the exponential whose bits are the reference's, instead of the hardware's.

    Returns:
        (B, H, Tq, D) of q's dtype, and the statistics.

    Raises:
        BadInput: shapes, dtypes, strides or options out of range.
    """
    options = Options(
        causal,
        scale if scale is not None else q.shape[-1] ** -0.5,
        tile,
        StreamPrecision(io=7) if precision is None else precision,
        StreamRepair() if repair is None else repair,
        seed,
        operands,
        shared_exp,
        sense,
        entropy,
        residual,
    )
    _check(q, k, v, options, norm_switch)
    statistics = Statistics()
    return _Attention.apply(q, k, v, options, norm_switch, statistics), statistics


def _check(q, k, v, options: Options, norm_switch) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 4 or 0 in x.shape:
            raise BadInput(f"{name}: shape {tuple(x.shape)}; allowed: (B, H, T, D), none of them 0")
        if x.dtype not in (torch.float32, torch.bfloat16) or x.dtype != q.dtype:
            raise BadInput(
                f"{name}: dtype {x.dtype}; allowed: torch.float32 or torch.bfloat16, one for q, k and v"
            )
        if x.stride(3) != 1:
            raise BadInput(f"{name}: strides {x.stride()}; allowed: a contiguous last axis")
    if k.shape != v.shape or k.shape[0] != q.shape[0] or k.shape[3] != q.shape[3] or q.shape[1] % k.shape[1]:
        raise BadInput(
            f"k, v: shapes {tuple(k.shape)}, {tuple(v.shape)}; allowed: equal, with B and D of q {tuple(q.shape)} "
            "and a divisor of its heads"
        )
    if options.causal and q.shape[2] != k.shape[2]:
        raise BadInput(f"k: {k.shape[2]} keys for {q.shape[2]} queries; allowed: equal numbers where causal")
    if q.dtype == torch.bfloat16 and options.precision.io.bits > 7:
        raise BadInput(
            f"precision: io = {options.precision.io.bits} bits of bfloat16 tensors; allowed: 1 to 7"
        )
    if options.operands not in OPERANDS:
        raise BadInput(f"operands = {options.operands!r}; allowed: {', '.join(OPERANDS)}")
    if norm_switch is not None and (norm_switch.numel() != 1 or norm_switch.dtype != torch.int32):
        raise BadInput(f"norm_switch: {tuple(norm_switch.shape)} {norm_switch.dtype}; allowed: one int32")
    if options.tile < 1:
        raise BadInput(f"tile = {options.tile}; allowed: an integer, 1 or more")
    reason = unsupported(q.shape[3])
    if reason is not None:
        raise BadInput(f"attention kernels: {reason}")


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, options, norm_switch, statistics):
        if norm_switch is not None:
            norm_switch = norm_switch.clone()  # a guard may turn it before the backward
        inputs = prepare(q, k, v, options, norm_switch)
        out, o_delta, lse = forward(inputs, options, q.dtype, statistics)
        ctx.save_for_backward(q, k, o_delta, lse, norm_switch, *inputs)
        ctx.options, ctx.statistics = options, statistics
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, do):
        q, k, o_delta, lse, norm_switch, *inputs = ctx.saved_tensors
        inputs = Inputs(*inputs)
        dq, dk, dv = backward(inputs, o_delta, lse, do, ctx.options, q.dtype, ctx.statistics)
        if norm_switch is not None:
            norm_backward_(dq, q, inputs.rq, norm_switch)
            norm_backward_(dk, k, inputs.rk, norm_switch)
        return dq, dk, dv, None, None, None


class Inputs(NamedTuple):
    """q, k, v rounded to io (bfloat16 where that holds them, else float32), and with a switch 1 / rms of the rows.

    Where nothing is rounded inside (`Options.fast_forward` and `fast_backward`), q and k are not normalised yet:
    the kernels multiply the scores by rq and rk, so that no second rounding to io is needed.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    rq: torch.Tensor | None = None
    rk: torch.Tensor | None = None


def prepare(q, k, v, options: Options, norm_switch: torch.Tensor | None = None) -> Inputs:
    """Point 1, and the normalisation before it."""
    io, seed = options.precision.io, signed(options.seed)

    def rounded(x, point, switch=None):
        if switch is None and x.dtype == torch.bfloat16 and io == Rounding(7):
            return x, None
        if switch is None and x.dtype == torch.float32 and io.bits == 23:
            return x, None
        return round_rows(x, io, _POINTS[point], seed, switch)

    if norm_switch is not None and options.fast_forward and options.fast_backward:
        rq, rk = inverse_rms(q, norm_switch), inverse_rms(k, norm_switch)
        return Inputs(rounded(q, "in_q")[0], rounded(k, "in_k")[0], rounded(v, "in_v")[0], rq, rk)
    q, rq = rounded(q, "in_q", norm_switch)
    k, rk = rounded(k, "in_k", norm_switch)
    return Inputs(q, k, rounded(v, "in_v")[0], rq, rk)


def forward(inputs: Inputs, options: Options, dtype: torch.dtype, statistics: Statistics):
    """Points 2 to 15: (out, the O that delta is taken from, LSE (B, H, Tq) fp32); fills in the statistics."""
    launch = forward_launch(inputs, options, dtype)
    launch.run()
    tensors = launch.arguments
    lse = tensors["lse_ptr"]
    if options.sense:
        statistics.max_logit = tensors["max_ptr"].amax(-1)
        if options.repair.tied_max_beta is None:
            statistics.tied_fallbacks = torch.zeros(lse.shape[:2], dtype=torch.int64, device=lse.device)
        else:
            statistics.tied_fallbacks = tensors["fallback_ptr"].sum(-1)
    if options.entropy:
        statistics.entropy = tensors["entropy_ptr"].mean(-1, dtype=torch.float64).float()
    o_delta = tensors["o_ptr"] if options.repair.delta == "o_fp32" else tensors["out_ptr"]
    return tensors["out_ptr"], o_delta, lse


def backward(inputs: Inputs, o_delta, lse, do, options: Options, dtype: torch.dtype, statistics: Statistics):
    """Points 16 to 25: (dQ, dK, dV) of dtype; fills in the residual."""
    io = options.precision.io
    if do.stride(3) != 1:
        do = do.contiguous()
    if do.dtype != torch.bfloat16 or io != Rounding(7):
        do = do if io.bits == 23 else round_rows(do, io, _POINTS["in_do"], signed(options.seed), None)[0]
    launches = backward_launches(inputs, o_delta, lse, do, options, dtype)
    for launch in launches:
        launch.run()
    dq_arguments, dkdv_arguments = launches[-2].arguments, launches[-1].arguments
    if options.residual:
        row, size = (dq_arguments[name].double() for name in ("row_sum_ptr", "row_size_ptr"))
        error, size = row.abs().sum(-1), size.sum(-1)
        statistics.residual_r = torch.where((error == 0) & (size == 0), 0.0, error / size).float()
        statistics.residual_mean = row.mean(-1).float()
    return dq_arguments["dq_ptr"], dkdv_arguments["dk_ptr"], dkdv_arguments["dv_ptr"]


def _sizes(inputs: Inputs, options: Options) -> dict:
    _, H, Tq, D = inputs.q.shape
    return {
        "scale": options.scale,
        "seed": signed(options.seed),
        "H": H,
        "group": H // inputs.k.shape[1],
        "Tq": Tq,
        "Tk": inputs.k.shape[2],
        "CAUSAL": options.causal,
        "D": D,
        "SHARED_EXP": options.shared_exp,
    }


def _codes(options: Options, names: tuple[str, ...]) -> dict:
    return {name.upper(): rounding_code(getattr(options.precision, name)) for name in names}


def _parts(rounding: Rounding) -> int:
    return bf16_parts(rounding.bits)


def _compile_options(tiling: Tiling, fast: bool) -> dict:
    # Fusing a*b + c would merge two roundings that the recurrence lists one by one; a stock kernel is free to.
    return {"num_warps": tiling.warps, "num_stages": tiling.stages, "enable_fp_fusion": fast}


def forward_launch(
    inputs: Inputs, options: Options, dtype: torch.dtype, capability: int | None = None
) -> Launch:
    """capability: of q's device by default."""
    q, k, v, rq, rk = inputs
    B, H, Tq, D = q.shape
    Tk = k.shape[2]
    fast = options.fast_forward
    tile = effective_tile(options.tile, Tk)
    capability = capability or capability_of(q.device)
    tiling = forward_tiling(D, fast, tile, q.dtype == torch.float32, capability)
    keys = tiling.keys
    out = torch.empty_like(q, dtype=dtype)
    lse = torch.empty(B, H, Tq, device=q.device)
    keep_o = options.repair.delta == "o_fp32"
    operand = options.operand(options.precision.p_operand)
    beta = options.repair.tied_max_beta
    counts = beta is not None and options.sense
    arguments = {
        "q_ptr": q,
        "k_ptr": k,
        "v_ptr": v,
        "out_ptr": out,
        "o_ptr": torch.empty_like(q, dtype=torch.float32) if keep_o else lse,
        "lse_ptr": lse,
        "max_ptr": torch.empty_like(lse) if options.sense else lse,
        "entropy_ptr": torch.empty_like(lse) if options.entropy else lse,
        "fallback_ptr": torch.empty_like(lse, dtype=torch.int32) if counts else lse,
        "rq_ptr": lse if rq is None else rq,
        "rk_ptr": lse if rk is None else rk,
        "out_gain": float(options.repair.out_gain),
        **_sizes(inputs, options),
        **strides(q=q, k=k, v=v, out=out),
        **_codes(options, (*_FORWARD, "io")),
        "P_OPERAND": rounding_code(operand),
        "IO_PARTS": _parts(options.precision.io),
        "P_PARTS": _parts(operand),
        "BLOCK_M": tiling.rows,
        "BLOCK_N": keys,
        "TILE": keys if fast else tile,
        "SUBTILES": 1 if fast else -(-tile // keys),
        "EVEN": Tq % tiling.rows == 0 and Tk % keys == 0 and (fast or (Tk % tile == 0 and tile % keys == 0)),
        "FAST": fast,
        "NORM": rq is not None and fast and options.fast_backward,
        "COMPENSATED": options.repair.compensated,
        "EXACT_LSE": options.repair.lse == "exact" and not fast,
        "GAIN": options.repair.out_gain != 1,
        "TIED": beta is not None,
        "BETA": float(beta or 0.0),
        "KEEP_O": keep_o,
        "SENSE": options.sense,
        "ENTROPY": options.entropy,
    }
    grid = (triton.cdiv(Tq, tiling.rows), B * H)
    return Launch(attention_forward, grid, arguments, _compile_options(tiling, fast))


def backward_launches(
    inputs: Inputs, o_delta, lse, do, options: Options, dtype: torch.dtype, capability: int | None = None
) -> list[Launch]:
    """In order; the last two are dQ's and dK and dV's. capability: of q's device by default."""
    q, k, v, rq, rk = inputs
    B, H, Tq, D = q.shape
    H_kv, Tk = k.shape[1:3]
    precision, repair = options.precision, options.repair
    capability = capability or capability_of(q.device)
    fast, wide = options.fast_backward, q.dtype == torch.float32
    norm = rq is not None and fast and options.fast_forward
    delta = torch.empty_like(lse)
    tensors = {"q_ptr": q, "k_ptr": k, "v_ptr": v, "do_ptr": do, "lse_ptr": lse, "delta_ptr": delta}
    sizes = _sizes(inputs, options)
    common = strides(q=q, k=k, v=v, do=do)
    launches = []

    from_p = repair.delta == "p" or repair.delta_gain != 1
    if repair.delta != "p":
        arguments = {
            "o_ptr": o_delta,
            "do_ptr": do,
            "delta_ptr": delta,
            "seed": sizes["seed"],
            "H": H,
            "T": Tq,
            **strides(o=o_delta, do=do),
            **_codes(options, ("delta_prod", "delta_sum")),
            "D": D,
            "ROWS": 64,
        }
        launches.append(
            Launch(attention_delta, (triton.cdiv(Tq, 64), B * H), arguments, {"enable_fp_fusion": False})
        )
    if from_p:
        tiling = dq_tiling(D, False, wide, False, capability)
        arguments = {
            **tensors,
            **sizes,
            **common,
            **_codes(options, ("bwd_s", "bwd_p", "dp")),
            "gain": repair.delta_gain,
            "GAIN": repair.delta != "p",
            "IO_PARTS": _parts(precision.io),
            "BLOCK_M": tiling.rows,
            "BLOCK_N": tiling.keys,
        }
        grid = (triton.cdiv(Tq, tiling.rows), B * H)
        launches.append(Launch(attention_delta_from_p, grid, arguments, _compile_options(tiling, False)))

    ds_operand, p_operand = options.operand(precision.ds), options.operand(precision.bwd_p)
    split = max(_parts(ds_operand), _parts(p_operand)) > 1
    shared = {
        **tensors,
        **sizes,
        "rq_ptr": lse if rq is None else rq,
        "rk_ptr": lse if rk is None else rk,
        **_codes(options, (*_BACKWARD, "io")),
        "OPERAND": rounding_code(options.operand(Rounding())),
        "IO_PARTS": _parts(precision.io),
        "DS_PARTS": _parts(ds_operand),
        "FAST": fast,
        "NORM": norm,
    }

    tiling = dq_tiling(D, fast, wide, split, capability)
    dq = torch.empty_like(q, dtype=dtype)
    arguments = {
        **shared,
        **common,
        **strides(dq=dq),
        "dq_ptr": dq,
        "row_sum_ptr": torch.empty_like(lse) if options.residual else lse,
        "row_size_ptr": torch.empty_like(lse) if options.residual else lse,
        "RESIDUAL": options.residual,
        "BLOCK_M": tiling.rows,
        "BLOCK_N": tiling.keys,
        "EVEN": Tq % tiling.rows == 0 and Tk % tiling.keys == 0,
    }
    grid = (triton.cdiv(Tq, tiling.rows), B * H)
    launches.append(Launch(attention_backward_dq, grid, arguments, _compile_options(tiling, fast)))

    tiling = dkdv_tiling(D, fast, wide, split, capability)
    dk, dv = torch.empty_like(k, dtype=dtype), torch.empty_like(v, dtype=dtype)
    arguments = {
        **shared,
        **common,
        **strides(dk=dk, dv=dv),
        "dk_ptr": dk,
        "dv_ptr": dv,
        "P_PARTS": _parts(p_operand),
        "BLOCK_M": tiling.rows,
        "BLOCK_N": tiling.keys,
        "EVEN": Tq % tiling.rows == 0 and Tk % tiling.keys == 0,
    }
    grid = (triton.cdiv(Tk, tiling.keys), B * H_kv)
    launches.append(Launch(attention_backward_dkdv, grid, arguments, _compile_options(tiling, fast)))
    return launches
