"""Streaming attention with a rounding of its own for every quantity, forward and backward.

The FlashAttention recurrence over key tiles (arXiv 2205.14135, 2307.08691), made to round where it is told to
(arXiv 2608.02091 section 3; its predecessor arXiv 2510.04212). Every operation below has one defined result,
so the plain PyTorch reference in this file and the compiled path (`qkpipe.numerics.streaming_compiled`) agree
in every bit.

Arithmetic
----------
R_x(.) rounds to the precision of quantity x (`StreamPrecision`); at 23 bits it is the identity. With a gain g
it is x + g * (r - x), r being the rounded x, where r is finite. Every other
operation is one fp32 operation, rounded once; nothing is fused. `dot` and `sum` run over the contracted index
in increasing order, from +0, in float64 (where a product of two fp32 numbers is exact), and are rounded to
fp32 once at the end. exp, log and tanh are those of `qkpipe.numerics.exp_log`. Row i sees key j if j <= i (causal)
or always; what a row does not see enters no maximum, sum or product.

Forward, for query row i:

     1  q, k, v        R_io
     2  x_j            dot(q_i, k_j) over the head dimension
     3  S_j            R_s(cap(R_qk(x_j) * scale)), where with a `softcap` c  cap(y) = c * tanh(y / c), else y
    for each tile of `tile` keys that the row sees anything of, from the left, starting at m = -inf, l = 0,
    acc = 0:
     4  top            max_j S_j over the tile; moved by the tied-maximum shift (`StreamRepair`) if it is on:
                       ties are counted among the S_j of the tile, the shift itself is one fp32 product
     5  m'             R_m(max(m, top))
     6  alpha          R_rescale(exp(R_s_minus_m(m - m')))
     7  P_j            R_p(exp(R_s_minus_m(S_j - m')))
     8  b              R_block_sum(sum_j P_j)
     9  l'             R_l(l * alpha + b)
    10  pv             R_pv(dot(R_p_operand(P_j), v_j)) over the tile's keys
    11  acc'           R_acc(acc * alpha + pv)
        compensated:   total = (acc * alpha + low * alpha) + pv;  acc' = R_acc(total);
                       low' = R_acc(total - acc');  the same for l;
                       at the end acc + low and l + low take the place of acc and l
    12  o              acc / l
    13  O              R_o(o);  with out_gain g != 1:  O = E + g * (R_o(o) - E),  o = E + g * (o - E)
    14  out            R_io(O)
    15  LSE            R_lse(m + log(l));  lse="exact":  M + log(Z), not rounded further
        where over the scores before any rounding, raw_j = cap(x_j * scale):
        M = max_j raw_j,  e_j = exp(raw_j - M),  Z = sum_j e_j,  E = dot(e_j, v_j) / Z

With `block`, which is a whole number of tiles, blocks of keys are attended to apart and their outputs merged, as
in ring attention (arXiv 2310.01889). After each block, for the rows that see any of it, o_b = acc / l, O_b = R_o(o_b)
and LSE_b = R_lse(m + log(l)), then m, l and acc start anew. O_c and LSE_c are those of the first block; each
further one goes into them:

    M1  L              max(LSE_c, LSE_b)
    M2  LSE_c'         R_lse(L + log(exp(LSE_c - L) + exp(LSE_b - L)))
    M3  keep, add      R_rescale(exp(LSE_c - LSE_c')),  R_rescale(exp(LSE_b - LSE_c'))
    M4  o, O_c'        o = keep * O_c + add * O_b,  O_c' = R_acc(o)

In 13, 14 and 15 the last o and O_c take the place of o and R_o(o), and LSE_c that of R_lse(m + log(l)).

Backward, for query row i (tiles play no part):

    16  dO             R_io
    17  x_j            dot(q_i, k_j), as in 2
    18  S_j            R_bwd_s(cap(y_j)),  y_j = R_bwd_s(x_j) * scale
    19  P_j            R_bwd_p(exp(S_j - LSE))
    20  dP_j           R_dp(dot(dO_i, v_j)) over the head dimension
    21  delta          "o", "o_fp32":  R_delta_sum(sum_d R_delta_prod(dO_id * O_id)), O: `out` of 14, o of 13
                       "p":  d_P = dot(P_j, dP_j) / sum_j P_j
                       with delta_gain g != 1:  d_P + g * (delta - d_P)
    22  dS_j           R_ds(P_j * (dP_j - delta))
        with a softcap c, in 23 and 24 its place is taken by R_ds(dS_j * (1 - t_j * t_j)),  t_j = tanh(y_j / c)
    23  dQ_i           R_io((dot(dS_ij, k_j) over j) * scale)
    24  dK_j           R_io((dot(dS_ij, q_i) over i) * scale)
    25  dV_j           R_io(dot(P_ij, dO_i) over i)
        With grouped queries the sums over i in 24 and 25 run over the group's heads, then over i.

Stochastic rounding draws from `counter_rng`: stream (point, tile), counter = the row-major number of the
element in the tile's (B, H, Tq, ...) tensor; the points are `ROUNDING_POINTS`; for what happens once a block the
tile is the block's number. A forward and its backward draw independently.

Statistics, per (B, H), from 15 and 22: max_logit = max raw; entropy = mean over rows of log(Z) - dot(e_j,
raw_j - M)/Z (the form LSE - sum P S cancels at large logits); residual_mean = mean_i sum_j dS_ij; residual_r
= (mean_i |sum_j dS_ij|) / (mean_i sum_j |dS_ij|), 0 where both vanish. Means over rows and the two row sums
stay in float64 until the end.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.autograd.function import once_differentiable

from qkpipe.errors import BadInput
from qkpipe.numerics._numba import HAVE_NUMBA
from qkpipe.numerics.counter_rng import fold_in, stream_keys
from qkpipe.numerics.exp_log import exp_f32, log_f32, tanh_f32
from qkpipe.numerics.minifloat import round_minifloat
from qkpipe.numerics.precision import ROUNDING_POINTS, StreamPrecision, StreamRepair


@dataclass
class StreamStats:
    """What attention felt like, per (B, H), fp32, outside of autograd; definitions in the module's docstring.

    max_logit: largest logit after the scale, before any rounding and before softmax; NaN if any is.
    entropy: mean row entropy, nat. residual_r, residual_mean: NaN until the backward has filled them in.
    tied_fallbacks: int64; rows and tiles at which the tied-maximum shift had to fall back, summed over rows.
    """

    max_logit: torch.Tensor
    entropy: torch.Tensor
    residual_r: torch.Tensor
    residual_mean: torch.Tensor
    tied_fallbacks: torch.Tensor


class Call(NamedTuple):
    """One call's constants. `only_stats`: a path may leave what is not a statistic or LSE undone."""

    causal: bool
    scale: float
    tile: int
    precision: StreamPrecision
    repair: StreamRepair
    seed: int
    stats: bool
    only_stats: bool = False
    block: int | None = None
    softcap: float | None = None


def streaming_attention(
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
    return_stats: bool = False,
    block: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor | tuple[torch.Tensor, StreamStats]:
    """Softmax attention by the streaming recurrence, each quantity at its own precision; differentiable once.

    Args:
        q: (B, H, Tq, D) float32. k, v: (B, H_kv, Tk, D) float32, H a multiple of H_kv; query head h reads key
            head h // (H / H_kv). Any T >= 1 and D >= 1; the last tile may be ragged.
        causal: row i sees keys 0..i; needs Tq == Tk.
        scale: of the logits, 1/sqrt(D) by default.
        tile: keys a tile. The result depends on it, as the rounding does; how queries are tiled never
        matters. precision, repair: fp32 throughout and no repair by default. seed: of stochastic rounding, in
        [0, 2^32): give every call (step, layer) its own. return_stats: also return `StreamStats`; its
        residual fields are filled by the backward. block: keys whose normalised output is merged with
        that of the others by LSE, a multiple of `tile`; None: one recurrence over all keys. softcap: c > 0, logits
        become c * tanh(logit / c) before the mask (Gemma 2, arXiv 2408.00118); None: they stay what they are.

    Returns:
        (B, H, Tq, D) float32, and the statistics if asked for.

    Raises:
        BadInput: shapes, dtypes, tile, block, softcap, scale or seed out of range.

    On a CPU, where numba is installed, a compiled path gives the bits of the reference. Non-finite inputs
    propagate to what depends on them, and to nothing else. The arithmetic is listed in the module's
    docstring. On a GPU, kernels sum in fp32 and in another order (`qkpipe.numerics.dispatch`).
    """
    scale = _check_inputs(q, k, v, causal, scale)
    if isinstance(tile, bool) or not isinstance(tile, int) or tile < 1:
        raise BadInput(f"tile = {tile!r}; allowed: an integer, 1 or more")
    if block is not None and (
        isinstance(block, bool) or not isinstance(block, int) or block < 1 or block % tile
    ):
        raise BadInput(f"block = {block!r}; allowed: none, or a multiple of tile = {tile}")
    if softcap is not None and not (
        isinstance(softcap, int | float) and math.isfinite(softcap) and softcap > 0
    ):
        raise BadInput(f"softcap = {softcap!r}; allowed: none, or a finite number above 0")
    stream_keys(seed, 0)  # refuses a seed out of range
    call = Call(
        causal,
        scale,
        tile,
        StreamPrecision() if precision is None else precision,
        StreamRepair() if repair is None else repair,
        seed,
        return_stats,
        block=block,
        softcap=softcap,
    )
    stats = _empty_stats(q) if return_stats else None
    out = _StreamingAttention.apply(q, k, v, call, stats)
    return (out, stats) if return_stats else out


def attention_stats(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor | None = None,
    do: torch.Tensor | None = None,
    *,
    causal: bool = True,
    scale: float | None = None,
) -> StreamStats:
    """The statistics of an attention that shows none, such as SDPA, from its tensors.

    Args:
        q, k, v, causal, scale: as in `streaming_attention`; they may require gradients, and are not
        differentiated. o, do: (B, H, Tq, D) float32, the output as that attention returned it and its
        gradient. The residual is that
            of delta = rowsum(do * o), everything else in fp32 with float64 sums: what the rounding of `o`
            alone does to the rows of dS. Without them the residual fields are NaN.
    """
    scale = _check_inputs(q, k, v, causal, scale)
    if (o is None) != (do is None):
        raise BadInput("o, do: give both, or neither")
    for name, x in (("o", o), ("do", do)):
        if x is not None and (x.shape != q.shape or x.dtype != torch.float32):
            raise BadInput(
                f"{name}: {tuple(x.shape)} {x.dtype}; allowed: float32 of q's shape {tuple(q.shape)}"
            )
    call = Call(causal, scale, k.shape[2], StreamPrecision(), StreamRepair(lse="exact"), 0, True, True)
    stats = _empty_stats(q)
    q, k, v = q.detach(), k.detach(), v.detach()
    path = _path(q)
    _, _, lse = path.forward(q, k, v, call, stats)
    if o is not None:
        path.backward(q, k, v, o.detach(), lse, do.detach(), call, stats)
    return stats


def _check_inputs(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float | None
) -> float:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dtype != torch.float32:
            raise BadInput(f"{name}: dtype {x.dtype}; allowed: torch.float32 (precisions are emulated on it)")
        if x.dim() != 4 or 0 in x.shape:
            raise BadInput(f"{name}: shape {tuple(x.shape)}; allowed: (B, H, T, D), none of them 0")
    if k.shape != v.shape or k.shape[0] != q.shape[0] or k.shape[3] != q.shape[3]:
        raise BadInput(
            f"k, v: shapes {tuple(k.shape)}, {tuple(v.shape)}; allowed: equal, with q's B and D {tuple(q.shape)}"
        )
    if q.shape[1] % k.shape[1]:
        raise BadInput(f"k: {k.shape[1]} heads; allowed: a divisor of q's {q.shape[1]} heads")
    if causal and q.shape[2] != k.shape[2]:
        raise BadInput(f"k: {k.shape[2]} keys for {q.shape[2]} queries; allowed: equal numbers where causal")
    if scale is None:
        return 1.0 / math.sqrt(q.shape[3])
    if not math.isfinite(scale):
        raise BadInput(f"scale = {scale!r}; allowed: a finite number")
    return float(scale)


def _empty_stats(q: torch.Tensor) -> StreamStats:
    unknown = torch.full((4, *q.shape[:2]), torch.nan, device=q.device)
    fallbacks = torch.zeros(q.shape[:2], dtype=torch.int64, device=q.device)
    return StreamStats(*unknown.unbind(), fallbacks)


class _StreamingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, call, stats):
        out, o_delta, lse = _path(q).forward(q, k, v, call, stats)
        ctx.save_for_backward(q, k, v, o_delta, lse)
        ctx.call, ctx.stats = call, stats
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, do):
        q, k, v, o_delta, lse = ctx.saved_tensors
        return *_path(q).backward(q, k, v, o_delta, lse, do, ctx.call, ctx.stats), None, None


class Path(NamedTuple):
    """One implementation of the recurrence: the plain reference, the compiled CPU path."""

    forward: Callable
    backward: Callable


def _path(q: torch.Tensor) -> Path:
    if q.device.type == "cuda":
        from qkpipe.numerics import dispatch

        return Path(dispatch.forward, dispatch.backward)
    if HAVE_NUMBA and q.device.type == "cpu":
        from qkpipe.numerics import streaming_compiled

        return Path(streaming_compiled.forward, streaming_compiled.backward)
    return REFERENCE


# The reference: plain PyTorch, slow and easy to check against the list above.


def _at_precision(call: Call, point: str, x: torch.Tensor, tile_index: int = 0) -> torch.Tensor:
    """R of the named rounding point."""
    rounding = getattr(call.precision, ROUNDING_POINTS[point])
    if rounding.bits == 23:
        return x
    stream = fold_in(list(ROUNDING_POINTS).index(point), tile_index) if rounding.mode == "stochastic" else 0
    rounded = round_minifloat(x, rounding.bits, rounding.mode, seed=call.seed, stream=stream)
    if rounding.gain == 1:
        return rounded
    return torch.where(rounded.isfinite(), x + (rounded - x) * rounding.gain, rounded)


def _sum(x: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """Sum over one axis in index order, in float64 (not rounded)."""
    total = torch.zeros_like(x.select(dim, 0), dtype=torch.float64)
    for index in range(x.shape[dim]):
        total = total + x.select(dim, index).double()
    return total


def _dot(a_IC: torch.Tensor, b_JC: torch.Tensor) -> torch.Tensor:
    """sum_c a_ic b_jc in index order, in float64, rounded to fp32 once: (..., I, J)."""
    a, b = a_IC.double(), b_JC.double()
    total = torch.zeros(*a.shape[:-1], b.shape[-2], dtype=torch.float64, device=a.device)
    for c in range(a.shape[-1]):
        total = total + a[..., :, c, None] * b[..., None, :, c]
    return total.float()


def _dot_seen(a_IC: torch.Tensor, b_CD: torch.Tensor, seen_IC: torch.Tensor) -> torch.Tensor:
    """The same over a_ic b_cd, for the c that i sees: (..., I, D)."""
    a, b = a_IC.double(), b_CD.double()
    total = torch.zeros(*a.shape[:-1], b.shape[-1], dtype=torch.float64, device=a.device)
    for c in range(a.shape[-1]):
        term = a[..., :, c, None] * b[..., c, None, :]
        total = total + torch.where(seen_IC[:, c, None], term, 0.0)
    return total.float()


def _seen(q: torch.Tensor, k: torch.Tensor, causal: bool) -> torch.Tensor:
    seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device)
    return seen.tril() if causal else seen


def forward_reference(q, k, v, call: Call, stats: StreamStats | None):
    """Points 1 to 15. Returns (out, the O that delta is taken from, LSE); fills in the forward's statistics."""
    repair = call.repair

    def rounded(point, x, tile_index=0):
        return _at_precision(call, point, x, tile_index)

    q, k, v = rounded("in_q", q), rounded("in_k", k), rounded("in_v", v)
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    seen = _seen(q, k, call.causal)
    x = _dot(q, k)
    s = torch.where(seen, rounded("s", _capped(call, rounded("qk", x) * call.scale)), -torch.inf)

    block = call.block or k.shape[2]
    for t, start in enumerate(range(0, k.shape[2], call.tile)):
        if start % block == 0:
            m = torch.full_like(x[..., 0], -torch.inf)
            l, l_low = torch.zeros_like(m), torch.zeros_like(m)
            acc, acc_low = torch.zeros_like(q), torch.zeros_like(q)
        keys = slice(start, start + call.tile)
        seen_t, s_t = seen[:, keys], s[..., keys]
        started = seen_t[:, 0]
        top = s_t.amax(-1)
        if repair.tied_max_beta is not None:
            top, fell_back = _shift_tied_maximum(s_t, seen_t, top, repair.tied_max_beta)
            if stats is not None:
                stats.tied_fallbacks += (fell_back & started).sum(-1)
        m_new = rounded("m", torch.maximum(m, top), t)
        alpha = rounded("rescale", exp_f32(rounded("m_step", m - m_new, t)), t)
        p = rounded("p", exp_f32(rounded("s_minus_m", s_t - m_new[..., None], t)), t)
        p = torch.where(seen_t, p, 0.0)
        b = rounded("block_sum", _sum(p).float(), t)
        pv = rounded("pv", _dot_seen(rounded("p_operand", p, t), v[..., keys, :], seen_t), t)

        l_new, l_low_new = _carry(call, "l", l, l_low, alpha, b, t)
        acc_new, acc_low_new = _carry(call, "acc", acc, acc_low, alpha[..., None], pv, t)
        m, l, l_low = (
            torch.where(started, new, old) for new, old in ((m_new, m), (l_new, l), (l_low_new, l_low))
        )
        acc, acc_low = (
            torch.where(started[:, None], new, old) for new, old in ((acc_new, acc), (acc_low_new, acc_low))
        )

        if (start + call.tile) % block and start + call.tile < k.shape[2]:
            continue
        b = start // block
        if repair.compensated:
            l, acc = l + l_low, acc + acc_low
        o_b = acc / l[..., None]
        out_b, lse_b = rounded("o", o_b, b), rounded("lse", m + log_f32(l), b)
        if b == 0:
            o, out, lse = o_b, out_b, lse_b
        else:
            merged = _merge_block(call, out, lse, out_b, lse_b, b)
            begun = seen[:, b * block]
            o, out, lse = (
                torch.where(begun[:, None] if new.dim() == 4 else begun, new, old)
                for new, old in zip(merged, (o, out, lse))
            )

    if stats is not None or repair.lse == "exact" or repair.out_gain != 1:
        raw = torch.where(seen, _capped(call, x * call.scale), -torch.inf)
        top = raw.amax(-1)
        below = raw - top[..., None]
        e = torch.where(seen, exp_f32(below), 0.0)
        z = _sum(e).float()
        if repair.lse == "exact":
            lse = top + log_f32(z)
        if repair.out_gain != 1:
            exact = _dot_seen(e, v, seen) / z[..., None]
            out, o = (exact + repair.out_gain * (faulty - exact) for faulty in (out, o))
        if stats is not None:
            stats.max_logit.copy_(top.amax(-1) + 0.0)
            spread = _sum(torch.where(seen, e.double() * below.double(), 0.0)).float()
            stats.entropy.copy_(_sum(log_f32(z) - spread / z) / q.shape[2])
    out = rounded("out", out)
    return out, o if repair.delta == "o_fp32" else out, lse


def _capped(call: Call, y: torch.Tensor) -> torch.Tensor:
    """cap of 3."""
    return y if call.softcap is None else call.softcap * tanh_f32(y / call.softcap)


def _merge_block(call: Call, out, lse, out_b, lse_b, block_index):
    """M1 to M4: (o, O, LSE)."""
    top = torch.maximum(lse, lse_b)
    merged = top + log_f32(exp_f32(lse - top) + exp_f32(lse_b - top))
    merged = _at_precision(call, "merge_lse", merged, block_index)
    keep = _at_precision(call, "merge_keep", exp_f32(lse - merged), block_index)
    add = _at_precision(call, "merge_add", exp_f32(lse_b - merged), block_index)
    o = keep[..., None] * out + add[..., None] * out_b
    return o, _at_precision(call, "merge_o", o, block_index), merged


def _shift_tied_maximum(s_t, seen_t, top, beta):
    """Point 4's repair: (the maximum to use, where it had to fall back)."""
    tied = ((s_t == top[..., None]) & seen_t).sum(-1) > 1
    safe = torch.where(top > 0, top * (beta - 1) < 80.0, top > -80.0)
    shifted = torch.where(top > 0, top * beta, torch.where(top < 0, 0.0, top))
    return torch.where(tied & safe, shifted, top), tied & ~safe


def _carry(call: Call, name, value, low, alpha, addend, tile_index):
    """Points 9 and 11: one update of a carry, and of its compensation."""
    total = value * alpha
    if call.repair.compensated:
        total = total + low * alpha
    total = total + addend
    new = _at_precision(call, name, total, tile_index)
    if call.repair.compensated:
        low = _at_precision(call, name + "_low", total - new, tile_index)
    return new, low


def backward_reference(q, k, v, o_delta, lse, do, call: Call, stats: StreamStats | None):
    """Points 16 to 25. Returns (dQ, dK, dV) and fills in the backward's statistics."""
    repair = call.repair

    def rounded(point, x):
        return _at_precision(call, point, x)

    q, k, v, do = rounded("in_q", q), rounded("in_k", k), rounded("in_v", v), rounded("in_do", do)
    B, H_kv = k.shape[:2]
    group = q.shape[1] // H_kv
    k_H, v_H = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    seen = _seen(q, k, call.causal)
    y = rounded("bwd_qk", _dot(q, k_H)) * call.scale
    s = rounded("bwd_s", _capped(call, y))
    p = torch.where(seen, rounded("bwd_p", exp_f32(s - lse[..., None])), 0.0)
    dp = rounded("dp", _dot(do, v_H))

    if repair.delta != "p":
        delta = rounded("delta_sum", _sum(rounded("delta_prod", do * o_delta)).float())
    if repair.delta == "p" or repair.delta_gain != 1:
        delta_p = _sum(torch.where(seen, p.double() * dp.double(), 0.0)).float() / _sum(p).float()
        delta = delta_p if repair.delta == "p" else delta_p + repair.delta_gain * (delta - delta_p)
    ds = torch.where(seen, rounded("ds", p * (dp - delta[..., None])), 0.0)

    if stats is not None:
        row = _sum(ds)
        error, size = _sum(row.abs()), _sum(_sum(ds.abs()))
        stats.residual_r.copy_(torch.where((error == 0) & (size == 0), 0.0, error / size))
        stats.residual_mean.copy_(_sum(row) / q.shape[2])

    if call.softcap is not None:
        t = tanh_f32(y / call.softcap)
        ds = torch.where(seen, rounded("dx", ds * (1.0 - t * t)), 0.0)

    def by_group(x):
        return x.reshape(B, H_kv, -1, x.shape[-1])  # (B, H_kv, group * Tq, ...): the order of summation

    seen_KN = seen.T.repeat(1, group)
    dq = rounded("out_dq", _dot_seen(ds, k_H, seen) * call.scale)
    dk = rounded("out_dk", _dot_seen(by_group(ds).mT, by_group(q), seen_KN) * call.scale)
    dv = rounded("out_dv", _dot_seen(by_group(p).mT, by_group(do), seen_KN))
    return dq, dk, dv


REFERENCE = Path(forward_reference, backward_reference)
