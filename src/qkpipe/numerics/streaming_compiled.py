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

Suffixes: L is a lane (a query row of the block), K a key, D a head dimension; a lone `x` is x_KL or x_LD flattened.
"""

from typing import NamedTuple

import numpy as np
import torch
from numba import njit, types
from numba.extending import intrinsic

from qkpipe.numerics.counter_rng import draw_nb, stream_keys_nb
from qkpipe.numerics.exp_log import exp_nb, log_nb
from qkpipe.numerics.float64_matmul import COLUMNS, matmul
from qkpipe.numerics.lane_kernels import (
    LANES as _LANES,
)
from qkpipe.numerics.lane_kernels import (
    dot_over_keys,
    max_over_keys,
    subtract_row,
    sum_over_keys,
    sum_sizes_over_keys,
)
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
LANES, NONE, ONE = np.int64(_LANES), np.int64(0), np.int64(1)
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


# No reference counting inside: it would cost a helper more than its loop. The kernels own every array.
_helper = njit(nogil=True, error_model="numpy", _nrt=False)


# Rounding


@_helper
def _round(x, count, point, tile_index, number, lane_step, key_step, at):
    """R of a rounding point on x[:count], in place.

    x[key * LANES + lane] is element number + lane * lane_step + key * key_step of its tensor, which sets its draw.
    """
    _never_inline()
    shift, mode = at.shifts[point], at.modes[point]
    if shift == 0:
        return
    if mode == EVEN:
        for n in range(count):
            x[n] = round_even_nb(x[n], shift)
    elif mode == TOWARD_ZERO:
        for n in range(count):
            x[n] = to_float_nb(round_toward_zero_bits_nb(to_bits_nb(x[n]), shift))
    else:
        stream, _ = stream_keys_nb(np.uint32(point), np.uint32(tile_index))
        k1, k2 = stream_keys_nb(at.seed, stream)
        for n in range(count):
            u = draw_nb(k1, k2, np.uint32(number + n % LANES * lane_step + n // LANES * key_step))
            x[n] = to_float_nb(round_stochastic_bits_nb(to_bits_nb(x[n]), shift, u))


@_helper
def _round_scores(x, keys, point, tile_index, first_row, width, at):
    """x_KL of a tensor (rows, width)."""
    _round(x, keys * LANES, point, tile_index, first_row * width, width, ONE, at)


@_helper
def _round_rows(x, count, point, tile_index, number, at):
    """x as it lies in its tensor, from element `number` on."""
    _round(x, count, point, tile_index, number, ONE, LANES, at)


# Loading, storing, converting


@_helper
def _widen(x, wide, count):
    _never_inline()
    for n in range(count):
        wide[n] = F64(x[n])


@_helper
def _narrow(wide, x, count):
    _never_inline()
    for n in range(count):
        x[n] = F32(wide[n])


@_helper
def _pad_rows(x_LD, wide_LD, rows, D):
    """To float64 rows of `COLUMNS`-padded length; the padding stays as it is."""
    _never_inline()
    for lane in range(rows):
        for d in range(D):
            wide_LD[lane, d] = F64(x_LD[lane, d])


@_helper
def _unpad_rows(wide_LD, x_LD, rows, D, scale):
    """Back from float64, rounded to fp32, then scaled."""
    _never_inline()
    for lane in range(rows):
        for d in range(D):
            x_LD[lane, d] = F32(wide_LD[lane, d]) * scale


@_helper
def _transpose(wide_LD, wide_DL, D):
    _never_inline()
    for d in range(D):
        for lane in range(LANES):
            wide_DL[d, lane] = wide_LD[lane, d]


@_helper
def _finite(x, start, count):
    _never_inline()
    bad = np.int32(0)
    part = x[start : start + count]
    for n in range(part.size):
        bad |= np.int32((to_bits_nb(part[n]) & EXPONENT) == EXPONENT)
    return bad == 0


@_helper
def _load(source, start, count, x, point, at):
    """[1, 16] source[start : start + count], rounded."""
    _never_inline()
    part = source[start : start + count]
    for n in range(count):
        x[n] = part[n]
    if point != UNROUNDED:
        _round_rows(x, count, point, NONE, start, at)


@_helper
def _store(x, count, target, start):
    part = target[start : start + count]
    for n in range(count):
        part[n] = x[n]


# Pieces of the recurrence


@_helper
def _mask(x_KL, first_key, keys, block_start, value):
    """x_KL[k] belongs to key first_key + k; lane holds row block_start + lane, which sees no later key."""
    _never_inline()
    for k in range(max(NONE, block_start + 1 - first_key), keys):
        hidden = first_key + k - block_start
        for lane in range(LANES):
            x_KL[k, lane] = value if lane < hidden else x_KL[k, lane]


@_helper
def _max_or_nan(x, top):
    return x if (x > top or x != x) else top


@_helper
def _scale_all(x, count, scale, out):
    for n in range(count):
        out[n] = x[n] * scale


@_helper
def _exp_all(x, count, out):
    _never_inline()
    for n in range(count):
        out[n] = exp_nb(x[n])


@_helper
def _shift_tied_maximum(s_KL, first, stop, top_L, beta, beta_less_1, first_lane, rows):
    """[4] In place; returns how many rows had to fall back."""
    _never_inline()
    fallbacks = 0
    for lane in range(LANES):
        top = top_L[lane]
        count = 0
        for k in range(first, stop):
            count += s_KL[k, lane] == top
        if count > 1 and top != ZERO:
            safe = top * beta_less_1 < F32(80) if top > ZERO else top > F32(-80)
            if safe:
                top_L[lane] = top * beta if top > ZERO else ZERO
            elif first_lane <= lane < rows:
                fallbacks += 1
    return fallbacks


@_helper
def _carry(old_LD, low_LD, alpha_L, addend_LD, D, first_lane, new_LD, new_low_LD, compensated, point, low_point,
           tile_index, first_row, at):  # fmt: skip
    """[9, 11] One update of a carry and of its compensation; lanes before first_lane keep the old."""
    _never_inline()
    new, new_low, count = new_LD.reshape(-1), new_low_LD.reshape(-1), LANES * D
    for lane in range(LANES):
        alpha = alpha_L[lane]
        if compensated:
            for d in range(D):
                total = old_LD[lane, d] * alpha + low_LD[lane, d] * alpha
                new_LD[lane, d] = total + addend_LD[lane, d]
        else:
            for d in range(D):
                new_LD[lane, d] = old_LD[lane, d] * alpha + addend_LD[lane, d]
    if compensated:
        for n in range(count):
            new_low[n] = new[n]
    _round_rows(new, count, point, tile_index, first_row * D, at)
    if compensated:
        for n in range(count):
            new_low[n] = new_low[n] - new[n]
        _round_rows(new_low, count, low_point, tile_index, first_row * D, at)
    for lane in range(first_lane):
        for d in range(D):
            new_LD[lane, d] = old_LD[lane, d]
            new_low_LD[lane, d] = low_LD[lane, d]


@njit(cache=True, nogil=True, error_model="numpy")
def _forward_kernel(
    q, k, v, out, o_delta, lse_out, max_logit, entropy, tied_fallbacks, B, H, H_kv, Tq, Tk, D, causal, scale,
    at, tile, want_stats, delta, lse_exact, compensated, beta, beta_less_1, out_gain,
):  # fmt: skip
    tile = min(tile, Tk)
    group = H // H_kv
    padded = (D + COLUMNS - 1) // COLUMNS * COLUMNS
    head = np.empty(Tk * D, F32)
    head_KD = head.reshape(Tk, D)
    wide_heads = np.zeros((2, Tk, padded))
    k_KD, v_KD = wide_heads[0], wide_heads[1]
    scores = np.empty((4, Tk, LANES), F32)
    s_KL, raw_KL, e_KL, p_KL = scores[0], scores[1], scores[2], scores[3]
    s, raw, e, p = s_KL.reshape(-1), raw_KL.reshape(-1), e_KL.reshape(-1), p_KL.reshape(-1)
    wide_scores = np.empty(Tk * LANES)
    rows_LD = np.zeros((8, LANES, D), F32)
    q_LD, pv_LD, acc_LD, low_LD, new_LD, new_low_LD, o_LD, out_LD = (
        rows_LD[0], rows_LD[1], rows_LD[2], rows_LD[3], rows_LD[4], rows_LD[5], rows_LD[6], rows_LD[7]
    )  # fmt: skip
    q_rows, pv, o_rows, out_rows = q_LD.reshape(-1), pv_LD.reshape(-1), o_LD.reshape(-1), out_LD.reshape(-1)
    wide_LD, wide_DL = np.zeros((LANES, padded)), np.empty((D, LANES))
    lanes = np.zeros((6, LANES), F32)
    m, m_new, top, alpha, block_sum, z = lanes[0], lanes[1], lanes[2], lanes[3], lanes[4], lanes[5]
    block_sum_L1 = block_sum.reshape(LANES, 1)
    lse = np.zeros(LANES, F32)
    sums = np.empty((4, LANES, 1), F32)
    l_L1, l_low_L1, l_new_L1, l_new_low_L1 = sums[0], sums[1], sums[2], sums[3]
    total, spread = np.empty(LANES), np.empty(LANES)

    for bh in range(B * H):
        b, h = bh // H, bh % H
        if h % group == 0:
            start = (b * H_kv + h // group) * Tk * D
            _load(k, start, Tk * D, head, IN_K, at)
            _pad_rows(head_KD, k_KD, Tk, D)
            _load(v, start, Tk * D, head, IN_V, at)
            _pad_rows(head_KD, v_KD, Tk, D)
            block_rows = LANES if _finite(head, NONE, Tk * D) else ONE
        head_max, head_entropy, head_fallbacks = -INF, 0.0, 0

        for block_start in range(0, Tq, block_rows):
            rows = min(block_rows, Tq - block_start)
            first_row = bh * Tq + block_start
            keys = min(Tk, block_start + rows) if causal else Tk
            _load(q, first_row * D, rows * D, q_rows, IN_Q, at)
            _pad_rows(q_LD, wide_LD, LANES, D)
            _transpose(wide_LD, wide_DL, D)

            # [2, 3]
            matmul(wide_scores, 0, LANES, k_KD, 0, padded, 1, wide_DL, 0, LANES, keys, LANES, D, False)
            _narrow(wide_scores, s, keys * LANES)
            exact = want_stats or lse_exact or out_gain != F32(1)
            if exact:
                _scale_all(s, keys * LANES, scale, raw)
            _round_scores(s, keys, QK, NONE, first_row, Tk, at)
            _scale_all(s, keys * LANES, scale, s)
            _round_scores(s, keys, S, NONE, first_row, Tk, at)
            if causal:
                _mask(s_KL, NONE, keys, block_start, -INF)

            m[:] = -INF
            l_L1[:] = ZERO
            l_low_L1[:] = ZERO
            acc_LD[:] = ZERO
            low_LD[:] = ZERO
            for t in range((keys + tile - 1) // tile):
                first, stop = t * tile, min(t * tile + tile, keys)
                width = min(tile, Tk - first)
                first_lane = max(NONE, first - block_start) if causal else NONE

                # [4, 5, 6]
                max_over_keys(s_KL, s_KL, first, stop, top)
                if beta > ZERO:
                    head_fallbacks += _shift_tied_maximum(
                        s_KL, first, stop, top, beta, beta_less_1, first_lane, rows
                    )
                for lane in range(LANES):
                    m_new[lane] = _max_or_nan(top[lane], m[lane])
                _round_rows(m_new, LANES, M, t, first_row, at)
                for lane in range(LANES):
                    alpha[lane] = m[lane] - m_new[lane]
                _round_rows(alpha, LANES, M_STEP, t, first_row, at)
                _exp_all(alpha, LANES, alpha)
                _round_rows(alpha, LANES, RESCALE, t, first_row, at)

                # [7, 8, 9]
                subtract_row(s_KL, first, stop - first, m_new, p_KL)
                _round_scores(p, stop - first, S_MINUS_M, t, first_row, width, at)
                _exp_all(p, (stop - first) * LANES, p)
                _round_scores(p, stop - first, P, t, first_row, width, at)
                if causal:
                    _mask(p_KL, first, stop - first, block_start, ZERO)
                sum_over_keys(p_KL, p_KL, NONE, stop - first, total)
                _narrow(total, block_sum, LANES)
                _round_rows(block_sum, LANES, BLOCK_SUM, t, first_row, at)
                _carry(l_L1, l_low_L1, alpha, block_sum_L1, ONE, first_lane, l_new_L1, l_new_low_L1, compensated,
                       L, L_LOW, t, first_row, at)  # fmt: skip

                # [10, 11]
                _round_scores(p, stop - first, P_OPERAND, t, first_row, width, at)
                _widen(p, wide_scores, (stop - first) * LANES)
                matmul(wide_LD, 0, padded, wide_scores, 0, 1, LANES, v_KD, first * padded, padded,
                       LANES, padded, stop - first, False)  # fmt: skip
                _unpad_rows(wide_LD, pv_LD, LANES, D, F32(1))
                _round_rows(pv, LANES * D, PV, t, first_row * D, at)
                _carry(acc_LD, low_LD, alpha, pv_LD, D, first_lane, new_LD, new_low_LD, compensated,
                       ACC, ACC_LOW, t, first_row, at)  # fmt: skip

                for lane in range(first_lane, LANES):
                    m[lane] = m_new[lane]
                l_L1, l_new_L1, l_low_L1, l_new_low_L1 = l_new_L1, l_L1, l_new_low_L1, l_low_L1
                acc_LD, new_LD, low_LD, new_low_LD = new_LD, acc_LD, new_low_LD, low_LD

            # [12, 13, 15]
            for lane in range(LANES):
                if compensated:
                    l_L1[lane, 0] = l_L1[lane, 0] + l_low_L1[lane, 0]
                    for d in range(D):
                        acc_LD[lane, d] = acc_LD[lane, d] + low_LD[lane, d]
                lse[lane] = m[lane] + log_nb(l_L1[lane, 0])
                for d in range(D):
                    o_LD[lane, d] = acc_LD[lane, d] / l_L1[lane, 0]
                    out_LD[lane, d] = o_LD[lane, d]
            _round_rows(out_rows, LANES * D, O, NONE, first_row * D, at)
            _round_rows(lse, LANES, LSE, NONE, first_row, at)

            if exact:
                if causal:
                    _mask(raw_KL, NONE, keys, block_start, -INF)
                max_over_keys(raw_KL, raw_KL, NONE, keys, top)
                subtract_row(raw_KL, NONE, keys, top, raw_KL)
                _exp_all(raw, keys * LANES, e)
                if causal:
                    _mask(raw_KL, NONE, keys, block_start, ZERO)
                    _mask(e_KL, NONE, keys, block_start, ZERO)
                sum_over_keys(e_KL, e_KL, NONE, keys, total)
                _narrow(total, z, LANES)
                if lse_exact:
                    for lane in range(LANES):
                        lse[lane] = top[lane] + log_nb(z[lane])
                if out_gain != F32(1):
                    _widen(e, wide_scores, keys * LANES)
                    matmul(wide_LD, 0, padded, wide_scores, 0, 1, LANES, v_KD, 0, padded,
                           LANES, padded, keys, False)  # fmt: skip
                    for lane in range(LANES):
                        for d in range(D):
                            true = F32(wide_LD[lane, d]) / z[lane]
                            out_LD[lane, d] = true + out_gain * (out_LD[lane, d] - true)
                            o_LD[lane, d] = true + out_gain * (o_LD[lane, d] - true)
                if want_stats:
                    dot_over_keys(e_KL, raw_KL, NONE, keys, spread)
                    for lane in range(rows):
                        head_max = _max_or_nan(top[lane], head_max)
                        head_entropy += F64(log_nb(z[lane]) - F32(spread[lane]) / z[lane])

            # [14]
            _round_rows(out_rows, LANES * D, OUT, NONE, first_row * D, at)
            _store(out_rows, rows * D, out, first_row * D)
            if delta == DELTA_O_FP32:
                _store(o_rows, rows * D, o_delta, first_row * D)
            _store(lse, rows, lse_out, first_row)

        if want_stats:
            max_logit[bh] = head_max + ZERO
            entropy[bh] = F32(head_entropy / Tq)
            tied_fallbacks[bh] = head_fallbacks


@njit(cache=True, nogil=True, error_model="numpy")
def _backward_kernel(
    q, k, v, o_delta, lse_in, do, dq, dk, dv, residual_r, residual_mean, B, H, H_kv, Tq, Tk, D, causal, scale,
    at, want_stats, delta, delta_gain,
):  # fmt: skip
    group = H // H_kv
    padded = (D + COLUMNS - 1) // COLUMNS * COLUMNS
    head = np.empty(Tk * D, F32)
    head_KD = head.reshape(Tk, D)
    wide_heads = np.zeros((4, Tk, padded))
    k_KD, v_KD, dk_KD, dv_KD = wide_heads[0], wide_heads[1], wide_heads[2], wide_heads[3]
    scores = np.empty((2, Tk, LANES), F32)
    p_KL, dp_KL = scores[0], scores[1]
    p, dp = p_KL.reshape(-1), dp_KL.reshape(-1)
    ds_KL, ds = p_KL, p
    wide_p, wide_ds = np.empty(Tk * LANES), np.empty(Tk * LANES)
    rows_LD = np.zeros((4, LANES, D), F32)
    q_LD, do_LD, o_LD, dq_LD = rows_LD[0], rows_LD[1], rows_LD[2], rows_LD[3]
    q_rows, do_rows, o_rows, dq_rows = (
        q_LD.reshape(-1),
        do_LD.reshape(-1),
        o_LD.reshape(-1),
        dq_LD.reshape(-1),
    )
    wide_rows = np.zeros((3, LANES, padded))
    wide_q_LD, wide_do_LD, wide_dq_LD = wide_rows[0], wide_rows[1], wide_rows[2]
    wide_DL = np.empty((D, LANES))
    lse, delta_L = np.zeros(LANES, F32), np.empty(LANES, F32)
    total, other = np.empty(LANES), np.empty(LANES)

    for bh in range(B * H):
        b, h = bh // H, bh % H
        kv_start = (b * H_kv + h // group) * Tk * D
        if h % group == 0:
            _load(v, kv_start, Tk * D, head, IN_V, at)
            _pad_rows(head_KD, v_KD, Tk, D)
            _load(k, kv_start, Tk * D, head, IN_K, at)
            _pad_rows(head_KD, k_KD, Tk, D)
            k_finite = _finite(head, NONE, Tk * D)
            dk_KD[:] = 0.0
            dv_KD[:] = 0.0
        finite = k_finite and _finite(q, bh * Tq * D, Tq * D) and _finite(do, bh * Tq * D, Tq * D)
        block_rows = LANES if finite else ONE
        head_error, head_size, head_sum = 0.0, 0.0, 0.0

        for block_start in range(0, Tq, block_rows):
            rows = min(block_rows, Tq - block_start)
            first_row = bh * Tq + block_start
            keys = min(Tk, block_start + rows) if causal else Tk
            _load(q, first_row * D, rows * D, q_rows, IN_Q, at)
            _load(do, first_row * D, rows * D, do_rows, IN_DO, at)
            _pad_rows(q_LD, wide_q_LD, LANES, D)
            _pad_rows(do_LD, wide_do_LD, LANES, D)
            for lane in range(rows):
                lse[lane] = lse_in[first_row + lane]

            # [17, 18, 19]
            _transpose(wide_q_LD, wide_DL, D)
            matmul(wide_p, 0, LANES, k_KD, 0, padded, 1, wide_DL, 0, LANES, keys, LANES, D, False)
            _narrow(wide_p, p, keys * LANES)
            _round_scores(p, keys, BWD_QK, NONE, first_row, Tk, at)
            _scale_all(p, keys * LANES, scale, p)
            _round_scores(p, keys, BWD_S, NONE, first_row, Tk, at)
            subtract_row(p_KL, NONE, keys, lse, p_KL)
            _exp_all(p, keys * LANES, p)
            _round_scores(p, keys, BWD_P, NONE, first_row, Tk, at)

            # [20]
            _transpose(wide_do_LD, wide_DL, D)
            matmul(wide_ds, 0, LANES, v_KD, 0, padded, 1, wide_DL, 0, LANES, keys, LANES, D, False)
            _narrow(wide_ds, dp, keys * LANES)
            _round_scores(dp, keys, DP, NONE, first_row, Tk, at)
            if causal:
                _mask(p_KL, NONE, keys, block_start, ZERO)
                _mask(dp_KL, NONE, keys, block_start, ZERO)

            # [21]
            if delta != DELTA_FROM_P:
                _load(o_delta, first_row * D, rows * D, o_rows, UNROUNDED, at)
                for n in range(rows * D):
                    o_rows[n] = do_rows[n] * o_rows[n]
                _round_rows(o_rows, rows * D, DELTA_PROD, NONE, first_row * D, at)
                for lane in range(LANES):
                    total[lane] = 0.0
                    for d in range(D):
                        total[lane] += F64(o_LD[lane, d])
                _narrow(total, delta_L, LANES)
                _round_rows(delta_L, LANES, DELTA_SUM, NONE, first_row, at)
            if delta == DELTA_FROM_P or delta_gain != F32(1):
                dot_over_keys(p_KL, dp_KL, NONE, keys, total)
                sum_over_keys(p_KL, p_KL, NONE, keys, other)
                for lane in range(LANES):
                    true = F32(total[lane]) / F32(other[lane])
                    if delta == DELTA_FROM_P:
                        delta_L[lane] = true
                    else:
                        delta_L[lane] = true + delta_gain * (delta_L[lane] - true)

            # [22]
            _widen(p, wide_p, keys * LANES)
            subtract_row(dp_KL, NONE, keys, delta_L, dp_KL)
            for n in range(keys * LANES):
                ds[n] = p[n] * dp[n]
            _round_scores(ds, keys, DS, NONE, first_row, Tk, at)
            if causal:
                _mask(ds_KL, NONE, keys, block_start, ZERO)
            _widen(ds, wide_ds, keys * LANES)
            if want_stats:
                sum_over_keys(ds_KL, ds_KL, NONE, keys, total)
                sum_sizes_over_keys(ds_KL, ds_KL, NONE, keys, other)
                for lane in range(rows):
                    head_error += abs(total[lane])
                    head_size += other[lane]
                    head_sum += total[lane]

            # [23]
            matmul(wide_dq_LD, 0, padded, wide_ds, 0, 1, LANES, k_KD, 0, padded, LANES, padded, keys, False)
            _unpad_rows(wide_dq_LD, dq_LD, rows, D, scale)
            _round_rows(dq_rows, rows * D, OUT_DQ, NONE, first_row * D, at)
            _store(dq_rows, rows * D, dq, first_row * D)

            # [24, 25]
            matmul(dk_KD, 0, padded, wide_ds, 0, LANES, 1, wide_q_LD, 0, padded, keys, padded, rows, True)
            matmul(dv_KD, 0, padded, wide_p, 0, LANES, 1, wide_do_LD, 0, padded, keys, padded, rows, True)

        if want_stats:
            vanish = head_error == 0.0 and head_size == 0.0
            residual_r[bh] = ZERO if vanish else F32(head_error / head_size)
            residual_mean[bh] = F32(head_sum / Tq)
        if h % group == group - 1:
            _unpad_rows(dk_KD, head_KD, Tk, D, scale)
            _round_rows(head, Tk * D, OUT_DK, NONE, kv_start, at)
            _store(head, Tk * D, dk, kv_start)
            _unpad_rows(dv_KD, head_KD, Tk, D, F32(1))
            _round_rows(head, Tk * D, OUT_DV, NONE, kv_start, at)
            _store(head, Tk * D, dv, kv_start)
