"""The compiled CPU path of streaming attention: the bits of the reference, at the speed of a fused kernel.

The arithmetic, and the numbers in brackets below, are those listed in `qkpipe.numerics.streaming`. What is
decided here is only the order in memory:

- A block is up to `LANES` query rows of one head against all keys they see. Its scores are kept transposed,
key
  by key, the block's rows side by side: so every maximum and every sum over keys runs in key order by
  construction, while the compiler has `LANES` independent rows to vectorise over, in loops of constant
  length.
- All products of matrices go through one micro-kernel, `float64_matmul`.
- A masked entry is an exact 0 in P and dS, and 0 * x = 0 leaves a float64 sum that began at +0 as it was.
That
  fails where x is not finite, so a head with a non-finite input takes blocks of one row, whose products end
  at the mask.

Suffixes: C is a column of a block, a key or a head dimension; L its lanes (`LANES`, the query rows).
"""

from typing import NamedTuple

import numpy as np
import torch
from numba import njit, types
from numba.extending import intrinsic

from qkpipe.numerics._numba import helper
from qkpipe.numerics.counter_rng import draw_nb, stream_keys_nb
from qkpipe.numerics.exp_log import exp_nb, log_nb
from qkpipe.numerics.float64_matmul import COLUMNS, matmul
from qkpipe.numerics.minifloat import (
    EVEN,
    ROUNDINGS,
    TOWARD_ZERO,
    round_even_nb,
    round_stochastic_bits_nb,
    round_toward_zero_bits_nb,
    to_bits_nb,
    to_float_nb,
)
from qkpipe.numerics.precision import ROUNDING_POINTS

# Typed, since numba compiles a function anew for every plain int it is given.
LANES, NONE, ONE = np.int64(16), np.int64(0), np.int64(1)
F32, F64 = np.float32, np.float64
ZERO, INF = F32(0), F32(np.inf)
EXPONENT = np.int32(0x7F800000)
(
    IN_Q, IN_K, IN_V, IN_DO, OUT, OUT_DQ, OUT_DK, OUT_DV, QK, S, M, M_STEP, RESCALE, S_MINUS_M, P, BLOCK_SUM,
    L, L_LOW, P_OPERAND, PV, ACC, ACC_LOW, O, LSE, BWD_QK, BWD_S, BWD_P, DP, DELTA_PROD, DELTA_SUM, DS,
) = (np.int64(n) for n in range(len(ROUNDING_POINTS)))  # fmt: skip
DELTA = {"o": 0, "o_fp32": 1, "p": 2}
DELTA_O_FP32, DELTA_FROM_P = DELTA["o_fp32"], DELTA["p"]
UNROUNDED = np.int64(-1)


class At(NamedTuple):
    """What rounding needs: bits to drop and mode, both by rounding point; the call's seed."""

    shifts: np.ndarray
    modes: np.ndarray
    seed: np.uint32


def forward(q, k, v, call, stats):
    """As `streaming.forward_reference`, for float32 CPU tensors."""
    repair = call.repair
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    out = torch.empty_like(q)
    o_delta = torch.empty_like(q) if repair.delta == "o_fp32" else out
    lse = torch.empty(q.shape[:3])
    kept = stats if stats is not None else _UNWANTED
    _forward_kernel(
        *_flat(q, k, v, out, o_delta, lse),
        *_flat(kept.max_logit, kept.entropy, kept.tied_fallbacks),
        *_shape(q, k),
        *_constants(call),
        call.tile,
        stats is not None,
        DELTA[repair.delta],
        repair.lse == "exact",
        repair.compensated,
        F32(repair.tied_max_beta or 0),
        F32((repair.tied_max_beta or 0) - 1),
        F32(repair.out_gain),
    )
    return out, o_delta, lse


def backward(q, k, v, o_delta, lse, do, call, stats):
    """As `streaming.backward_reference`, for float32 CPU tensors."""
    q, k, v, do, o_delta = (x.contiguous() for x in (q, k, v, do, o_delta))
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    kept = stats if stats is not None else _UNWANTED
    _backward_kernel(
        *_flat(q, k, v, o_delta, lse, do, dq, dk, dv),
        *_flat(kept.residual_r, kept.residual_mean),
        *_shape(q, k),
        *_constants(call),
        stats is not None,
        DELTA[call.repair.delta],
        F32(call.repair.delta_gain),
    )
    return dq, dk, dv


class _UNWANTED:
    """Stands where statistics go when nobody asked; never written."""

    max_logit = entropy = residual_r = residual_mean = torch.empty(0)
    tied_fallbacks = torch.empty(0, dtype=torch.int64)


def _flat(*tensors):
    return [x.detach().view(-1).numpy() for x in tensors]


def _shape(q, k):
    B, H, Tq, D = q.shape
    return B, H, k.shape[1], Tq, k.shape[2], D


def _constants(call):
    at = [getattr(call.precision, quantity) for quantity in ROUNDING_POINTS.values()]
    shifts = np.array([23 - r.bits for r in at], dtype=np.int32)
    modes = np.array([ROUNDINGS[r.mode] for r in at], dtype=np.int32)
    return call.causal, F32(call.scale), At(shifts, modes, np.uint32(call.seed))


@intrinsic
def _never_inline(typing):
    """Keeps the function it stands in out of line: thirty copies of one loop made the build ten times as long."""

    def codegen(context, builder, signature, args):
        builder.function.attributes.add("noinline")
        return context.get_dummy_value()

    return types.void(), codegen


# Rounding


@helper
def _round(x, columns, point, tile_index, number, lane_step, column_step, at):
    """R of a rounding point on x[: columns * LANES], in place.

    x[c * LANES + lane] is element number + lane * lane_step + c * column_step of its tensor (for its draw).
    """
    _never_inline()
    shift, mode = at.shifts[point], at.modes[point]
    if shift == 0:
        return
    count = columns * LANES
    if mode == EVEN:
        for n in range(count):
            x[n] = round_even_nb(x[n], shift)
    elif mode == TOWARD_ZERO:
        for n in range(count):
            x[n] = to_float_nb(round_toward_zero_bits_nb(to_bits_nb(x[n]), shift))
    else:
        stream, _ = stream_keys_nb(np.uint32(point), np.uint32(tile_index))
        k1, k2 = stream_keys_nb(at.seed, stream)
        for c in range(columns):
            for lane in range(LANES):
                n = c * LANES + lane
                u = draw_nb(k1, k2, np.uint32(number + lane * lane_step + c * column_step))
                x[n] = to_float_nb(round_stochastic_bits_nb(to_bits_nb(x[n]), shift, u))


@helper
def _round_block(x_CL, columns, point, tile_index, first_row, width, at):
    """The first columns of a block; (row, column) is element row * width + column."""
    _round(x_CL, columns, point, tile_index, first_row * width, width, ONE, at)


@helper
def _columns_of(count):
    return (count + LANES - ONE) // LANES


# Moving rows in and out


@helper
def _widen(x, wide, count):
    _never_inline()
    for n in range(count):
        wide[n] = F64(x[n])


@helper
def _narrow(wide, x, count):
    _never_inline()
    for n in range(count):
        x[n] = F32(wide[n])


@helper
def _finite(x, start, count):
    bad = np.int32(0)
    for n in range(start, start + count):
        bad += np.int32((to_bits_nb(x[n]) & EXPONENT) == EXPONENT)
    return bad == 0


@helper
def _load_head(x, start, count, x32, x64, point, at):
    """[1, 16] One key head, rounded, as it lies, in fp32 and float64. Returns whether it is finite."""
    _never_inline()
    for n in range(count):
        x32[n] = x[start + n]
    _round(x32, _columns_of(count), point, NONE, start, ONE, LANES, at)
    _widen(x32, x64, count)
    return _finite(x32, NONE, count)


@helper
def _store_head(wide, keys, D, row_length, scale, x32, x, start, point, at):
    """[24, 25] A key head's float64 sums, scaled and rounded, to x[start:]."""
    _never_inline()
    for j in range(keys):
        for d in range(D):
            x32[j * D + d] = F32(wide[j * row_length + d]) * scale
    _round(x32, _columns_of(keys * D), point, NONE, start, ONE, LANES, at)
    for n in range(keys * D):
        x[start + n] = x32[n]


@helper
def _load_block(x, first_row, rows, D, x_DL, point, at):
    """[1, 16] `rows` rows, rounded, transposed; unused lanes are 0."""
    _never_inline()
    if rows < LANES:
        x_DL[: D * LANES] = ZERO
    for lane in range(rows):
        start = (first_row + lane) * D
        for d in range(D):
            x_DL[d * LANES + lane] = x[start + d]
    if point >= 0:
        _round_block(x_DL, D, point, NONE, first_row, D, at)


@helper
def _store_block(x_DL, first_row, rows, D, x):
    _never_inline()
    for lane in range(rows):
        start = (first_row + lane) * D
        for d in range(D):
            x[start + d] = x_DL[d * LANES + lane]


@helper
def _to_rows(x_DL, rows, D, wide_LD, row_length):
    """A transposed block back to rows in float64 (columns from D to row_length are left alone)."""
    _never_inline()
    for lane in range(rows):
        for d in range(D):
            wide_LD[lane * row_length + d] = F64(x_DL[d * LANES + lane])


# Pieces of the recurrence


@helper
def _fill(x, value):
    for lane in range(LANES):
        x[lane] = value


@helper
def _mask(x_CL, first_key, keys, block_start, value):
    """Column c holds key first_key + c; lane holds row block_start + lane, which sees keys up to its own number."""
    _never_inline()
    for c in range(max(0, block_start + 1 - first_key), keys):
        hidden = first_key + c - block_start
        for lane in range(LANES):
            if lane < hidden:
                x_CL[c * LANES + lane] = value


@helper
def _max_over_columns(x_CL, first, stop, top_L):
    """NaN if any is."""
    _never_inline()
    _fill(top_L, -INF)
    for c in range(first, stop):
        for lane in range(LANES):
            x, top = x_CL[c * LANES + lane], top_L[lane]
            top_L[lane] = x if (x > top or x != x) else top


@helper
def _sum_over_columns(x_CL, columns, total_L):
    _never_inline()
    for lane in range(LANES):
        total_L[lane] = 0.0
    for c in range(columns):
        for lane in range(LANES):
            total_L[lane] += F64(x_CL[c * LANES + lane])


@helper
def _dot_over_columns(x_CL, y_CL, columns, total_L):
    _never_inline()
    for lane in range(LANES):
        total_L[lane] = 0.0
    for c in range(columns):
        for lane in range(LANES):
            total_L[lane] += F64(x_CL[c * LANES + lane]) * F64(y_CL[c * LANES + lane])


@helper
def _subtract_row(x_CL, first, columns, row_L, out_CL):
    """out = x[first:] - row, per lane."""
    _never_inline()
    for c in range(columns):
        for lane in range(LANES):
            out_CL[c * LANES + lane] = x_CL[(first + c) * LANES + lane] - row_L[lane]


@helper
def _exp_all(x_CL, count):
    _never_inline()
    for n in range(count):
        x_CL[n] = exp_nb(x_CL[n])


@helper
def _shift_tied_maximum(s_CL, first, stop, top_L, beta, beta_less_1, first_lane, rows):
    """[4] In place; returns how many rows had to fall back."""
    _never_inline()
    fallbacks = 0
    for lane in range(LANES):
        top = top_L[lane]
        count = 0
        for c in range(first, stop):
            count += s_CL[c * LANES + lane] == top
        if count > 1 and top != ZERO:
            safe = top * beta_less_1 < F32(80) if top > ZERO else top > F32(-80)
            if safe:
                top_L[lane] = top * beta if top > ZERO else ZERO
            elif first_lane <= lane < rows:
                fallbacks += 1
    return fallbacks


@helper
def _carry(x_CL, low_CL, alpha_L, add_CL, columns, first_lane, total_CL, spare_CL, compensated, point, low_point,
           tile_index, first_row, at):  # fmt: skip
    """[9, 11] One update of a carry and of its compensation, for the lanes that have started."""
    _never_inline()
    for c in range(columns):
        for lane in range(LANES):
            n = c * LANES + lane
            total = x_CL[n] * alpha_L[lane]
            if compensated:
                total = total + low_CL[n] * alpha_L[lane]
            total_CL[n] = total + add_CL[n]
    if compensated:
        for n in range(columns * LANES):
            spare_CL[n] = total_CL[n]
    _round_block(total_CL, columns, point, tile_index, first_row, columns, at)
    if compensated:
        for n in range(columns * LANES):
            spare_CL[n] = spare_CL[n] - total_CL[n]
        _round_block(spare_CL, columns, low_point, tile_index, first_row, columns, at)
        _commit(spare_CL, columns, first_lane, low_CL)
    _commit(total_CL, columns, first_lane, x_CL)


@helper
def _commit(new_CL, columns, first_lane, x_CL):
    _never_inline()
    for c in range(columns):
        for lane in range(LANES):
            n = c * LANES + lane
            x_CL[n] = new_CL[n] if lane >= first_lane else x_CL[n]


@njit(cache=True, nogil=True, error_model="numpy")
def _forward_kernel(
    q, k, v, out, o_delta, lse_out, max_logit, entropy, tied_fallbacks, B, H, H_kv, Tq, Tk, D, causal, scale,
    at, tile, want_stats, delta, lse_exact, compensated, beta, beta_less_1, out_gain,
):  # fmt: skip
    tile = min(tile, Tk)
    group = H // H_kv
    head32 = np.empty(_columns_of(Tk * D) * LANES, F32)
    heads64 = np.empty((2, Tk * D))
    k64, v64 = heads64[0], heads64[1]
    scores = np.empty((4, Tk * LANES), F32)
    s_CL, raw_CL, e_CL, p_CL = scores[0], scores[1], scores[2], scores[3]
    scores64 = np.empty((2, Tk * LANES))
    x64, p64 = scores64[0], scores64[1]
    rows32 = np.empty((8, D * LANES), F32)
    q_DL, pv_DL, acc_DL, low_DL = rows32[0], rows32[1], rows32[2], rows32[3]
    total_DL, spare_DL, o_DL, out_DL = rows32[4], rows32[5], rows32[6], rows32[7]
    rows64 = np.empty((2, D * LANES))
    q64, pv64 = rows64[0], rows64[1]
    lanes32 = np.zeros((11, LANES), F32)
    m_L, m_new_L, l_L, l_low_L, top_L, alpha_L = (
        lanes32[0], lanes32[1], lanes32[2], lanes32[3], lanes32[4], lanes32[5]
    )  # fmt: skip
    b_L, lse_L, total_L, spare_L, z_L = lanes32[6], lanes32[7], lanes32[8], lanes32[9], lanes32[10]
    lanes64 = np.empty((2, LANES))
    sum_L, spread_L = lanes64[0], lanes64[1]

    for head in range(B * H):
        b, h = head // H, head % H
        if h % group == 0:
            start = (b * H_kv + h // group) * Tk * D
            _load_head(k, start, Tk * D, head32, k64, IN_K, at)
            finite = _load_head(v, start, Tk * D, head32, v64, IN_V, at)
        block_rows = LANES if finite else 1
        head_max, head_entropy, head_fallbacks = -INF, 0.0, 0

        for block_start in range(0, Tq, block_rows):
            rows = min(block_rows, Tq - block_start)
            first_row = head * Tq + block_start
            keys = min(Tk, block_start + rows) if causal else Tk
            n_scores = keys * LANES
            _load_block(q, first_row, rows, D, q_DL, IN_Q, at)
            _widen(q_DL, q64, D * LANES)

            # [2, 3]
            matmul(x64, 0, LANES, k64, 0, D, 1, q64, 0, LANES, keys, LANES, D, False)
            _narrow(x64, s_CL, n_scores)
            exact = want_stats or lse_exact or out_gain != F32(1)
            if exact:
                for n in range(n_scores):
                    raw_CL[n] = s_CL[n] * scale
            _round_block(s_CL, keys, QK, NONE, first_row, Tk, at)
            for n in range(n_scores):
                s_CL[n] = s_CL[n] * scale
            _round_block(s_CL, keys, S, NONE, first_row, Tk, at)
            if causal:
                _mask(s_CL, NONE, keys, block_start, -INF)

            _fill(m_L, -INF)
            _fill(l_L, ZERO)
            _fill(l_low_L, ZERO)
            for n in range(D * LANES):
                acc_DL[n] = ZERO
                low_DL[n] = ZERO
            for t in range((keys + tile - 1) // tile):
                first, stop = t * tile, min(t * tile + tile, keys)
                columns = stop - first
                width = min(tile, Tk - first)
                first_lane = max(0, first - block_start) if causal else 0

                # [4, 5, 6]
                _max_over_columns(s_CL, first, stop, top_L)
                if beta > ZERO:
                    head_fallbacks += _shift_tied_maximum(
                        s_CL, first, stop, top_L, beta, beta_less_1, first_lane, rows
                    )
                for lane in range(LANES):
                    m, top = m_L[lane], top_L[lane]
                    m_new_L[lane] = top if (top > m or top != top) else m
                _round_block(m_new_L, ONE, M, t, first_row, ONE, at)
                for lane in range(LANES):
                    alpha_L[lane] = m_L[lane] - m_new_L[lane]
                _round_block(alpha_L, ONE, M_STEP, t, first_row, ONE, at)
                _exp_all(alpha_L, LANES)
                _round_block(alpha_L, ONE, RESCALE, t, first_row, ONE, at)

                # [7, 8, 9]
                _subtract_row(s_CL, first, columns, m_new_L, p_CL)
                _round_block(p_CL, columns, S_MINUS_M, t, first_row, width, at)
                _exp_all(p_CL, columns * LANES)
                _round_block(p_CL, columns, P, t, first_row, width, at)
                if causal:
                    _mask(p_CL, first, columns, block_start, ZERO)
                _sum_over_columns(p_CL, columns, sum_L)
                _narrow(sum_L, b_L, LANES)
                _round_block(b_L, ONE, BLOCK_SUM, t, first_row, ONE, at)
                _carry(l_L, l_low_L, alpha_L, b_L, ONE, first_lane, total_L, spare_L, compensated, L, L_LOW,
                       t, first_row, at)  # fmt: skip

                # [10, 11]
                _round_block(p_CL, columns, P_OPERAND, t, first_row, width, at)
                _widen(p_CL, p64, columns * LANES)
                matmul(pv64, 0, LANES, v64, first * D, 1, D, p64, 0, LANES, D, LANES, columns, False)
                _narrow(pv64, pv_DL, D * LANES)
                _round_block(pv_DL, D, PV, t, first_row, D, at)
                _carry(acc_DL, low_DL, alpha_L, pv_DL, D, first_lane, total_DL, spare_DL, compensated, ACC,
                       ACC_LOW, t, first_row, at)  # fmt: skip
                _commit(m_new_L, ONE, first_lane, m_L)

            # [12, 13, 15]
            if compensated:
                for lane in range(LANES):
                    l_L[lane] = l_L[lane] + l_low_L[lane]
                for n in range(D * LANES):
                    acc_DL[n] = acc_DL[n] + low_DL[n]
            for d in range(D):
                for lane in range(LANES):
                    n = d * LANES + lane
                    o_DL[n] = acc_DL[n] / l_L[lane]
                    out_DL[n] = o_DL[n]
            _round_block(out_DL, D, O, NONE, first_row, D, at)
            for lane in range(rows):
                lse_L[lane] = m_L[lane] + log_nb(l_L[lane])
            _round_block(lse_L, ONE, LSE, NONE, first_row, ONE, at)

            if exact:
                if causal:
                    _mask(raw_CL, NONE, keys, block_start, -INF)
                _max_over_columns(raw_CL, NONE, keys, top_L)
                _subtract_row(raw_CL, NONE, keys, top_L, raw_CL)
                for n in range(n_scores):
                    e_CL[n] = exp_nb(raw_CL[n])
                if causal:
                    _mask(raw_CL, NONE, keys, block_start, ZERO)
                    _mask(e_CL, NONE, keys, block_start, ZERO)
                _sum_over_columns(e_CL, keys, sum_L)
                _narrow(sum_L, z_L, LANES)
                if lse_exact:
                    for lane in range(rows):
                        lse_L[lane] = top_L[lane] + log_nb(z_L[lane])
                if out_gain != F32(1):
                    _widen(e_CL, x64, n_scores)
                    matmul(pv64, 0, LANES, v64, 0, 1, D, x64, 0, LANES, D, LANES, keys, False)
                    for d in range(D):
                        for lane in range(LANES):
                            n = d * LANES + lane
                            true = F32(pv64[n]) / z_L[lane]
                            out_DL[n] = true + out_gain * (out_DL[n] - true)
                            o_DL[n] = true + out_gain * (o_DL[n] - true)
                if want_stats:
                    _dot_over_columns(e_CL, raw_CL, keys, spread_L)
                    for lane in range(rows):
                        top, z = top_L[lane], z_L[lane]
                        head_max = top if (top > head_max or top != top) else head_max
                        head_entropy += F64(log_nb(z) - F32(spread_L[lane]) / z)

            # [14]
            _round_block(out_DL, D, OUT, NONE, first_row, D, at)
            _store_block(out_DL, first_row, rows, D, out)
            if delta == DELTA_O_FP32:
                _store_block(o_DL, first_row, rows, D, o_delta)
            for lane in range(rows):
                lse_out[first_row + lane] = lse_L[lane]

        if want_stats:
            max_logit[head] = head_max + ZERO
            entropy[head] = F32(head_entropy / Tq)
            tied_fallbacks[head] = head_fallbacks


@njit(cache=True, nogil=True, error_model="numpy")
def _backward_kernel(
    q, k, v, o_delta, lse, do, dq, dk, dv, residual_r, residual_mean, B, H, H_kv, Tq, Tk, D, causal, scale,
    at, want_stats, delta, delta_gain,
):  # fmt: skip
    group = H // H_kv
    padded = (D + COLUMNS - 1) // COLUMNS * COLUMNS
    head32 = np.empty(_columns_of(Tk * D) * LANES, F32)
    heads64 = np.empty((2, Tk * D))
    k64, v64 = heads64[0], heads64[1]
    sums64 = np.empty((2, Tk * padded))
    dk64, dv64 = sums64[0], sums64[1]
    rows32 = np.empty((4, D * LANES), F32)
    q_DL, do_DL, o_DL, dq_DL = rows32[0], rows32[1], rows32[2], rows32[3]
    wide_DL = np.empty(D * LANES)
    rows64 = np.zeros((2, LANES * padded))
    q_LD, do_LD = rows64[0], rows64[1]
    scores64 = np.empty((2, Tk * LANES))
    x64, p64 = scores64[0], scores64[1]
    scores = np.empty((2, Tk * LANES), F32)
    p_CL, dp_CL = scores[0], scores[1]
    lanes32 = np.zeros((2, LANES), F32)
    lse_L, delta_L = lanes32[0], lanes32[1]
    lanes64 = np.empty((3, LANES))
    sum_L, size_L, dot_L = lanes64[0], lanes64[1], lanes64[2]

    for head in range(B * H):
        b, h = head // H, head % H
        kv_start = (b * H_kv + h // group) * Tk * D
        if h % group == 0:
            k_finite = _load_head(k, kv_start, Tk * D, head32, k64, IN_K, at)
            _load_head(v, kv_start, Tk * D, head32, v64, IN_V, at)
            dk64[:] = 0.0
            dv64[:] = 0.0
        finite = k_finite and _finite(q, head * Tq * D, Tq * D) and _finite(do, head * Tq * D, Tq * D)
        block_rows = LANES if finite else 1
        head_error, head_size, head_sum = 0.0, 0.0, 0.0

        for block_start in range(0, Tq, block_rows):
            rows = min(block_rows, Tq - block_start)
            first_row = head * Tq + block_start
            keys = min(Tk, block_start + rows) if causal else Tk
            n_scores = keys * LANES
            _load_block(q, first_row, rows, D, q_DL, IN_Q, at)
            _load_block(do, first_row, rows, D, do_DL, IN_DO, at)
            for lane in range(rows):
                lse_L[lane] = lse[first_row + lane]

            # [17, 18, 19]
            _widen(q_DL, wide_DL, D * LANES)
            matmul(x64, 0, LANES, k64, 0, D, 1, wide_DL, 0, LANES, keys, LANES, D, False)
            _narrow(x64, p_CL, n_scores)
            _round_block(p_CL, keys, BWD_QK, NONE, first_row, Tk, at)
            for n in range(n_scores):
                p_CL[n] = p_CL[n] * scale
            _round_block(p_CL, keys, BWD_S, NONE, first_row, Tk, at)
            _subtract_row(p_CL, NONE, keys, lse_L, p_CL)
            _exp_all(p_CL, n_scores)
            _round_block(p_CL, keys, BWD_P, NONE, first_row, Tk, at)

            # [20]
            _widen(do_DL, wide_DL, D * LANES)
            matmul(x64, 0, LANES, v64, 0, D, 1, wide_DL, 0, LANES, keys, LANES, D, False)
            _narrow(x64, dp_CL, n_scores)
            _round_block(dp_CL, keys, DP, NONE, first_row, Tk, at)
            if causal:
                _mask(p_CL, NONE, keys, block_start, ZERO)
                _mask(dp_CL, NONE, keys, block_start, ZERO)

            # [21]
            if delta != DELTA_FROM_P:
                _load_block(o_delta, first_row, rows, D, o_DL, UNROUNDED, at)
                for n in range(D * LANES):
                    o_DL[n] = do_DL[n] * o_DL[n]
                _round_block(o_DL, D, DELTA_PROD, NONE, first_row, D, at)
                _sum_over_columns(o_DL, D, sum_L)
                _narrow(sum_L, delta_L, LANES)
                _round_block(delta_L, ONE, DELTA_SUM, NONE, first_row, ONE, at)
            if delta == DELTA_FROM_P or delta_gain != F32(1):
                _dot_over_columns(p_CL, dp_CL, keys, dot_L)
                _sum_over_columns(p_CL, keys, sum_L)
                for lane in range(LANES):
                    true = F32(dot_L[lane]) / F32(sum_L[lane])
                    faulty = true if delta == DELTA_FROM_P else delta_L[lane]
                    delta_L[lane] = true if delta == DELTA_FROM_P else true + delta_gain * (faulty - true)

            # [22]
            _widen(p_CL, p64, n_scores)
            for c in range(keys):
                for lane in range(LANES):
                    n = c * LANES + lane
                    p_CL[n] = p_CL[n] * (dp_CL[n] - delta_L[lane])
            _round_block(p_CL, keys, DS, NONE, first_row, Tk, at)
            if causal:
                _mask(p_CL, NONE, keys, block_start, ZERO)
            _widen(p_CL, x64, n_scores)
            if want_stats:
                for lane in range(LANES):
                    sum_L[lane] = 0.0
                    size_L[lane] = 0.0
                for c in range(keys):
                    for lane in range(LANES):
                        sum_L[lane] += x64[c * LANES + lane]
                        size_L[lane] += abs(x64[c * LANES + lane])
                for lane in range(rows):
                    head_error += abs(sum_L[lane])
                    head_size += size_L[lane]
                    head_sum += sum_L[lane]

            # [23]
            matmul(wide_DL, 0, LANES, k64, 0, 1, D, x64, 0, LANES, D, LANES, keys, False)
            for n in range(D * LANES):
                dq_DL[n] = F32(wide_DL[n]) * scale
            _round_block(dq_DL, D, OUT_DQ, NONE, first_row, D, at)
            _store_block(dq_DL, first_row, rows, D, dq)

            # [24, 25]
            _to_rows(q_DL, rows, D, q_LD, padded)
            _to_rows(do_DL, rows, D, do_LD, padded)
            matmul(dk64, 0, padded, x64, 0, LANES, 1, q_LD, 0, padded, keys, padded, rows, True)
            matmul(dv64, 0, padded, p64, 0, LANES, 1, do_LD, 0, padded, keys, padded, rows, True)

        if want_stats:
            vanish = head_error == 0.0 and head_size == 0.0
            residual_r[head] = ZERO if vanish else F32(head_error / head_size)
            residual_mean[head] = F32(head_sum / Tq)
        if h % group == group - 1:
            _store_head(dk64, Tk, D, padded, scale, head32, dk, kv_start, OUT_DK, at)
            _store_head(dv64, Tk, D, padded, F32(1), head32, dv, kv_start, OUT_DV, at)
