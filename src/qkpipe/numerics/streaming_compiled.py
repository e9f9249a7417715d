"""The compiled CPU path of streaming attention: the bits of the reference, at the speed of a fused kernel.

The arithmetic, and the numbers in brackets below, are those listed in `qkpipe.numerics.streaming`. What is
decided here is only the order in memory:

- A block is up to `LANES` query rows of one head against all keys they see. Its scores are kept transposed, key
  by key, the block's rows side by side: so every maximum and every sum over keys runs in key order by
  construction, while the compiler has `LANES` independent rows to vectorise over, in loops of constant length.
- All products of matrices go through one micro-kernel, `float64_matmul`.
- A masked entry is an exact 0 in P and dS, and 0 * x = 0 leaves a float64 sum that began at +0 as it was.
  That fails where x is not finite, so a head whose rounded inputs may not be finite takes blocks of one row,
  whose products end at the mask.

Suffixes: L is a lane (a query row of the block), K a key, D a head dimension; a lone `x` is x_KL or x_LD flattened.
"""

from functools import lru_cache

import numpy as np
import torch
from numba import carray, njit, types
from numba.extending import intrinsic

from qkpipe.numerics import lane_kernels as lanes
from qkpipe.numerics.exp_log import exp_nb, log_nb
from qkpipe.numerics.float64_matmul import COLUMNS, matmul
from qkpipe.numerics.lane_kernels import LANES as _LANES
from qkpipe.numerics.lane_kernels import POINTS
from qkpipe.numerics.minifloat import to_bits_nb
from qkpipe.numerics.precision import ROUNDING_POINTS, StreamPrecision

# Typed, since numba compiles a function anew for every plain int it is given.
LANES, NONE, ONE = np.int64(_LANES), np.int64(0), np.int64(1)
F32, F64 = np.float32, np.float64
ZERO, INF = F32(0), F32(np.inf)
SIZE = np.int32(0x7FFFFFFF)  # of a pattern: all but the sign
LARGEST = np.finfo(F32).max
ALL_SEEN = np.int64(-(2**30))  # of `hidden`, where no lane misses any key
IN_Q, IN_K, IN_V, IN_DO, OUT, OUT_DQ, OUT_DK, OUT_DV, LSE, DELTA_PROD, DELTA_SUM = (
    np.int64(POINTS[name])
    for name in (
        "in_q", "in_k", "in_v", "in_do", "out", "out_dq", "out_dk", "out_dv", "lse", "delta_prod", "delta_sum",
    )
)  # fmt: skip
MERGE_LSE, MERGE_KEEP, MERGE_ADD, MERGE_O = (
    np.int64(POINTS[name]) for name in ("merge_lse", "merge_keep", "merge_add", "merge_o")
)
DELTA = {"o": 0, "o_fp32": 1, "p": 2}
DELTA_O_FP32, DELTA_FROM_P = DELTA["o_fp32"], DELTA["p"]


def forward(q, k, v, call, stats):
    """As `streaming.forward_reference`, for float32 CPU tensors."""
    repair = call.repair
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    out = torch.empty_like(q)
    o_delta = torch.empty_like(q) if repair.delta == "o_fp32" else out
    lse = torch.empty(q.shape[:3])
    kept = stats if stats is not None else _UNWANTED
    _forward_kernel(
        _addresses(q, k, v, out, o_delta, lse, kept.max_logit, kept.entropy, kept.tied_fallbacks),
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
        call.only_stats,
        (call.block or 0) // call.tile,
        F32(call.softcap or 0),
    )
    return out, o_delta, lse


def backward(q, k, v, o_delta, lse, do, call, stats):
    """As `streaming.backward_reference`, for float32 CPU tensors."""
    q, k, v, do, o_delta = (x.contiguous() for x in (q, k, v, do, o_delta))
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    kept = stats if stats is not None else _UNWANTED
    _backward_kernel(
        _addresses(q, k, v, o_delta, lse, do, dq, dk, dv, kept.residual_r, kept.residual_mean),
        *_shape(q, k),
        *_constants(call),
        stats is not None,
        DELTA[call.repair.delta],
        F32(call.repair.delta_gain),
        call.only_stats,
        F32(call.softcap or 0),
        _surely_finite(call.precision.io),
    )
    return dq, dk, dv


class _UNWANTED:
    """Stands where statistics go when nobody asked; never written."""

    max_logit = entropy = residual_r = residual_mean = torch.empty(0)
    tied_fallbacks = torch.empty(0, dtype=torch.int64)


def _addresses(*tensors):
    """Contiguous tensors as the kernels take them: unpacking so many arrays would cost a small call dearly."""
    return np.array([x.data_ptr() for x in tensors])


def _shape(q, k):
    B, H, Tq, D = q.shape
    return B, H, k.shape[1], Tq, k.shape[2], D


def _constants(call):
    at = _table(call.precision)
    if call.seed:
        at = at.copy()
        at[0] = np.uint32(call.seed).view(np.int32)
    return call.causal, F32(call.scale), at


def _surely_finite(rounding):
    """A size up to which R(x) cannot overflow: R adds at most |x| + |gain * x|."""
    return F32(np.finfo(F32).max / (2 + abs(rounding.gain)))


@lru_cache(maxsize=64)
def _table(precision: StreamPrecision) -> np.ndarray:
    return lanes.rounding_table([getattr(precision, quantity) for quantity in ROUNDING_POINTS.values()])


@intrinsic
def _as_pointer(typing, address):
    def codegen(context, builder, signature, args):
        return builder.inttoptr(args[0], context.get_value_type(types.voidptr))

    return types.voidptr(types.intp), codegen


# No reference counting inside: it would cost a helper more than its loop. The kernels own every array.
_helper = njit(nogil=True, error_model="numpy", _nrt=False)


@njit(nogil=True)
def _floats(address, size):
    """The float32 tensor at an address, flat."""
    return carray(_as_pointer(address), size, F32)


@_helper
def _within(x, start, count, limit):
    """Whether no size is above the limit, and nothing is NaN."""
    bad = np.int32(0)
    part, most = x[start : start + count], to_bits_nb(limit)
    for n in range(part.size):
        bad |= np.int32((to_bits_nb(part[n]) & SIZE) > most)
    return bad == 0


@_helper
def _load(source, start, rows, D, x_RD):
    """Rows source[start : start + rows * D] to padded ones; the padding stays as it is."""
    part = source[start : start + rows * D]
    for row in range(rows):
        for d in range(D):
            x_RD[row, d] = part[row * D + d]


@_helper
def _store(x_RD, rows, D, target, start):
    part = target[start : start + rows * D]
    for row in range(rows):
        for d in range(D):
            part[row * D + d] = x_RD[row, d]


@_helper
def _transpose(wide_LD, wide_DL, D):
    for d in range(D):
        for lane in range(LANES):
            wide_DL[d, lane] = wide_LD[lane, d]


@_helper
def _max_or_nan(x, top):
    return x if (x > top or x != x) else top


@_helper
def _shift_tied_maximum(s_KL, first, stop, hidden, top_L, beta, beta_less_1, first_lane, rows):
    """[4] In place; returns how many rows had to fall back."""
    fallbacks = 0
    for lane in range(LANES):
        top = top_L[lane]
        count = 0
        for k in range(first, stop):
            count += s_KL[k, lane] == top and lane >= hidden + k
        if count > 1 and top != ZERO:
            safe = top * beta_less_1 < F32(80) if top > ZERO else top > F32(-80)
            if safe:
                top_L[lane] = top * beta if top > ZERO else ZERO
            elif first_lane <= lane < rows:
                fallbacks += 1
    return fallbacks


@_helper
def _add_compensation(l, l_low, acc_LD, low_LD, D):
    """[11] At the end."""
    for lane in range(LANES):
        l[lane] = l[lane] + l_low[lane]
        for d in range(D):
            acc_LD[lane, d] = acc_LD[lane, d] + low_LD[lane, d]


@_helper
def _log_sum_exp(m, l, lse):
    """[15] Before its rounding."""
    for lane in range(LANES):
        lse[lane] = m[lane] + log_nb(l[lane])


@_helper
def _merged_lse(lse, block_lse, merged):
    """[M1, M2] Before its rounding."""
    for lane in range(LANES):
        top = _max_or_nan(block_lse[lane], lse[lane])
        merged[lane] = top + log_nb(exp_nb(lse[lane] - top) + exp_nb(block_lse[lane] - top))


@_helper
def _weights(lse, block_lse, merged, keep, add):
    """[M3] Before their rounding."""
    for lane in range(LANES):
        keep[lane] = exp_nb(lse[lane] - merged[lane])
        add[lane] = exp_nb(block_lse[lane] - merged[lane])


@_helper
def _merge_rows(out_LD, block_out_LD, keep, add, begun, o_LD, block_o_LD):
    """[M4] Before its rounding: to block_o_LD, and to o_LD from lane `begun` on."""
    for lane in range(LANES):
        for d in range(out_LD.shape[1]):
            merged = keep[lane] * out_LD[lane, d] + add[lane] * block_out_LD[lane, d]
            block_o_LD[lane, d] = merged
            if lane >= begun:
                o_LD[lane, d] = merged


@njit(cache=True, nogil=True, error_model="numpy")
def _forward_kernel(
    addresses, B, H, H_kv, Tq, Tk, D, causal, scale, at, tile, want_stats, delta, lse_exact, compensated, beta,
    beta_less_1, out_gain, only_stats, tiles_a_block, softcap,
):  # fmt: skip
    q_size, k_size, heads = B * H * Tq * D, B * H_kv * Tk * D, B * H
    q, k, v = _floats(addresses[0], q_size), _floats(addresses[1], k_size), _floats(addresses[2], k_size)
    out, o_delta, lse_out = (
        _floats(addresses[3], q_size), _floats(addresses[4], q_size), _floats(addresses[5], heads * Tq)
    )  # fmt: skip
    max_logit, entropy = _floats(addresses[6], heads), _floats(addresses[7], heads)
    tied_fallbacks = carray(_as_pointer(addresses[8]), heads, np.int64)
    tile = min(tile, Tk)
    group = H // H_kv
    padded = (D + COLUMNS - 1) // COLUMNS * COLUMNS
    head_KD = np.zeros((Tk, padded), F32)
    wide_heads = np.empty((2, Tk, padded))
    k_KD, v_KD = wide_heads[0], wide_heads[1]
    scores = np.empty((2, Tk, LANES), F32)
    s_KL, raw_KL = scores[0], scores[1]
    wide_KL = np.empty((Tk, LANES))
    rows_LD = np.zeros((7, LANES, padded), F32)
    q_LD, acc_LD, low_LD, o_LD, out_LD = rows_LD[0], rows_LD[1], rows_LD[2], rows_LD[3], rows_LD[4]
    block_o_LD, block_out_LD = rows_LD[5], rows_LD[6]
    wide_LD, wide_DL = np.empty((LANES, padded)), np.empty((D, LANES))
    by_lane = np.zeros((11, LANES), F32)
    block_lse, merged_lse, keep, add = by_lane[7], by_lane[8], by_lane[9], by_lane[10]
    m, l, l_low, alpha, top, lse, z = (
        by_lane[0], by_lane[1], by_lane[2], by_lane[3], by_lane[4], by_lane[5], by_lane[6]
    )  # fmt: skip
    total, spread = np.empty(LANES), np.empty(LANES)
    exact = want_stats or lse_exact or out_gain != F32(1)

    for bh in range(B * H):
        b, h = bh // H, bh % H
        if h % group == 0:
            row = (b * H_kv + h // group) * Tk
            _load(k, row * D, Tk, D, head_KD)
            lanes.widen_rows(head_KD, k_KD, Tk, padded, IN_K, at, row * D, D)
            _load(v, row * D, Tk, D, head_KD)
            lanes.widen_rows(head_KD, v_KD, Tk, padded, IN_V, at, row * D, D)
            block_rows = LANES if _within(head_KD.reshape(-1), NONE, Tk * padded, LARGEST) else ONE
        head_max, head_entropy, head_fallbacks = -INF, 0.0, 0

        for block_start in range(0, Tq, block_rows):
            rows = min(block_rows, Tq - block_start)
            first_row = bh * Tq + block_start
            keys = min(Tk, block_start + rows) if causal else Tk
            hidden = -block_start if causal else ALL_SEEN
            _load(q, first_row * D, rows, D, q_LD)
            lanes.widen_rows(q_LD, wide_LD, LANES, padded, IN_Q, at, first_row * D, D)
            _transpose(wide_LD, wide_DL, D)

            # [2, 3]
            matmul(wide_KL, 0, LANES, k_KD, 0, padded, 1, wide_DL, 0, LANES, keys, LANES, D, False)
            lanes.forward_scores(
                wide_KL, s_KL, raw_KL, exact, keys, scale, softcap, hidden, at, first_row * Tk, Tk
            )

            m[:] = -INF
            l[:] = ZERO
            l_low[:] = ZERO
            acc_LD[:] = ZERO
            low_LD[:] = ZERO
            tiles = NONE if only_stats else (keys + tile - 1) // tile
            for t in range(tiles):
                first, stop = t * tile, min(t * tile + tile, keys)
                first_lane = max(NONE, first - block_start) if causal else NONE

                # [4 to 9]
                lanes.max_over_keys(s_KL, first, stop, top)
                if beta > ZERO:
                    head_fallbacks += _shift_tied_maximum(
                        s_KL, first, stop, hidden, top, beta, beta_less_1, first_lane, rows
                    )
                lanes.softmax_tile(
                    s_KL, first, stop, top, m, l, l_low, alpha, wide_KL, compensated, hidden + first, first_lane,
                    at, t, first_row, min(tile, Tk - first),
                )  # fmt: skip

                # [10, 11]
                matmul(wide_LD, 0, padded, wide_KL, 0, 1, LANES, v_KD, first * padded, padded,
                       LANES, padded, stop - first, False)  # fmt: skip
                lanes.carry_rows(
                    wide_LD, acc_LD, low_LD, alpha, first_lane, padded, compensated, at, t, first_row * D, D
                )

                if tiles_a_block and ((t + 1) % tiles_a_block == 0 or t + 1 == tiles):
                    block = t // tiles_a_block
                    if compensated:
                        _add_compensation(l, l_low, acc_LD, low_LD, D)
                    lanes.divide_rows(
                        acc_LD, l, block_o_LD, block_out_LD, padded, at, block, first_row * D, D
                    )
                    _log_sum_exp(m, l, block_lse)
                    lanes.round_lanes(block_lse, LSE, at, block, first_row)
                    if block == 0:
                        o_LD[:], out_LD[:], lse[:] = block_o_LD, block_out_LD, block_lse
                    else:
                        # [M1 to M4]; results are junk in the lanes that do not see the block
                        _merged_lse(lse, block_lse, merged_lse)
                        lanes.round_lanes(merged_lse, MERGE_LSE, at, block, first_row)
                        _weights(lse, block_lse, merged_lse, keep, add)
                        lanes.round_lanes(keep, MERGE_KEEP, at, block, first_row)
                        lanes.round_lanes(add, MERGE_ADD, at, block, first_row)
                        begun = max(NONE, block * tiles_a_block * tile - block_start) if causal else NONE
                        _merge_rows(out_LD, block_out_LD, keep, add, begun, o_LD, block_o_LD)
                        lanes.round_rows(block_o_LD, LANES, padded, MERGE_O, at, block, first_row * D, D)
                        for lane in range(begun, LANES):
                            out_LD[lane] = block_o_LD[lane]
                            lse[lane] = merged_lse[lane]
                    m[:] = -INF
                    l[:] = ZERO
                    l_low[:] = ZERO
                    acc_LD[:] = ZERO
                    low_LD[:] = ZERO

            # [12, 13, 15]
            if not tiles_a_block:
                if compensated:
                    _add_compensation(l, l_low, acc_LD, low_LD, D)
                lanes.divide_rows(acc_LD, l, o_LD, out_LD, padded, at, NONE, first_row * D, D)
                if not lse_exact:
                    _log_sum_exp(m, l, lse)
                    lanes.round_lanes(lse, LSE, at, NONE, first_row)

            if exact:
                lanes.max_over_keys(raw_KL, NONE, keys, top)
                lanes.exponentials(raw_KL, top, keys, hidden, total, spread, wide_KL)
                for lane in range(rows):
                    z[lane] = F32(total[lane])
                    log_z = log_nb(z[lane])
                    if lse_exact:
                        lse[lane] = top[lane] + log_z
                    if want_stats:
                        head_max = _max_or_nan(top[lane], head_max)
                        head_entropy += F64(log_z - F32(spread[lane]) / z[lane])
                if out_gain != F32(1):
                    matmul(wide_LD, 0, padded, wide_KL, 0, 1, LANES, v_KD, 0, padded,
                           LANES, padded, keys, False)  # fmt: skip
                    for lane in range(rows):
                        for d in range(D):
                            true = F32(wide_LD[lane, d]) / z[lane]
                            out_LD[lane, d] = true + out_gain * (out_LD[lane, d] - true)
                            o_LD[lane, d] = true + out_gain * (o_LD[lane, d] - true)

            # [14]
            lanes.round_rows(out_LD, rows, padded, OUT, at, NONE, first_row * D, D)
            _store(out_LD, rows, D, out, first_row * D)
            if delta == DELTA_O_FP32:
                _store(o_LD, rows, D, o_delta, first_row * D)
            for lane in range(rows):
                lse_out[first_row + lane] = lse[lane]

        if want_stats:
            max_logit[bh] = head_max + ZERO
            entropy[bh] = F32(head_entropy / Tq)
            tied_fallbacks[bh] = head_fallbacks


@njit(cache=True, nogil=True, error_model="numpy")
def _backward_kernel(
    addresses, B, H, H_kv, Tq, Tk, D, causal, scale, at, want_stats, delta, delta_gain, only_stats, softcap,
    surely_finite,
):  # fmt: skip
    q_size, k_size, heads = B * H * Tq * D, B * H_kv * Tk * D, B * H
    q, k, v = _floats(addresses[0], q_size), _floats(addresses[1], k_size), _floats(addresses[2], k_size)
    o_delta, lse_in, do = (
        _floats(addresses[3], q_size), _floats(addresses[4], heads * Tq), _floats(addresses[5], q_size)
    )  # fmt: skip
    dq, dk, dv = _floats(addresses[6], q_size), _floats(addresses[7], k_size), _floats(addresses[8], k_size)
    residual_r, residual_mean = _floats(addresses[9], heads), _floats(addresses[10], heads)
    group = H // H_kv
    padded = (D + COLUMNS - 1) // COLUMNS * COLUMNS
    head_KD = np.zeros((Tk, padded), F32)
    wide_heads = np.empty((4, Tk, padded))
    k_KD, v_KD, dk_KD, dv_KD = wide_heads[0], wide_heads[1], wide_heads[2], wide_heads[3]
    scores = np.empty((3, Tk, LANES), F32)
    p_KL, dp_KL, slope_KL = scores[0], scores[1], scores[2]
    wide_scores = np.empty((2, Tk, LANES))
    wide_p_KL, wide_ds_KL = wide_scores[0], wide_scores[1]
    rows_LD = np.zeros((4, LANES, padded), F32)
    q_LD, do_LD, o_LD, dq_LD = rows_LD[0], rows_LD[1], rows_LD[2], rows_LD[3]
    wide_rows = np.empty((3, LANES, padded))
    wide_q_LD, wide_do_LD, wide_dq_LD = wide_rows[0], wide_rows[1], wide_rows[2]
    wide_DL = np.empty((D, LANES))
    by_lane = np.zeros((2, LANES), F32)
    lse, delta_L = by_lane[0], by_lane[1]
    total, other = np.empty(LANES), np.empty(LANES)

    for bh in range(B * H):
        b, h = bh // H, bh % H
        if h % group == 0:
            kv_row = (b * H_kv + h // group) * Tk
            _load(v, kv_row * D, Tk, D, head_KD)
            lanes.widen_rows(head_KD, v_KD, Tk, padded, IN_V, at, kv_row * D, D)
            _load(k, kv_row * D, Tk, D, head_KD)
            lanes.widen_rows(head_KD, k_KD, Tk, padded, IN_K, at, kv_row * D, D)
            k_finite = _within(head_KD.reshape(-1), NONE, Tk * padded, LARGEST)
            dk_KD[:] = 0.0
            dv_KD[:] = 0.0
        finite = (
            k_finite
            and _within(q, bh * Tq * D, Tq * D, surely_finite)
            and _within(do, bh * Tq * D, Tq * D, surely_finite)
        )
        block_rows = LANES if finite else ONE
        head_error, head_size, head_sum = 0.0, 0.0, 0.0

        for block_start in range(0, Tq, block_rows):
            rows = min(block_rows, Tq - block_start)
            first_row = bh * Tq + block_start
            first, counter = first_row * D, first_row * Tk
            keys = min(Tk, block_start + rows) if causal else Tk
            hidden = -block_start if causal else ALL_SEEN
            _load(q, first, rows, D, q_LD)
            lanes.widen_rows(q_LD, wide_q_LD, LANES, padded, IN_Q, at, first, D)
            _load(do, first, rows, D, do_LD)
            lanes.widen_rows(do_LD, wide_do_LD, LANES, padded, IN_DO, at, first, D)
            for lane in range(rows):
                lse[lane] = lse_in[first_row + lane]

            # [17, 18, 19]
            _transpose(wide_q_LD, wide_DL, D)
            matmul(wide_p_KL, 0, LANES, k_KD, 0, padded, 1, wide_DL, 0, LANES, keys, LANES, D, False)
            lanes.backward_probabilities(
                wide_p_KL, p_KL, slope_KL, lse, keys, scale, softcap, hidden, at, counter, Tk
            )

            # [20]
            _transpose(wide_do_LD, wide_DL, D)
            matmul(wide_ds_KL, 0, LANES, v_KD, 0, padded, 1, wide_DL, 0, LANES, keys, LANES, D, False)
            lanes.probability_gradients(wide_ds_KL, dp_KL, keys, hidden, at, counter, Tk)

            # [21]
            if delta != DELTA_FROM_P:
                _load(o_delta, first, rows, D, o_LD)
                for lane in range(rows):
                    for d in range(D):
                        o_LD[lane, d] = do_LD[lane, d] * o_LD[lane, d]
                lanes.round_rows(o_LD, rows, padded, DELTA_PROD, at, NONE, first, D)
                for lane in range(rows):
                    row_sum = 0.0
                    for d in range(D):
                        row_sum += F64(o_LD[lane, d])
                    delta_L[lane] = F32(row_sum)
                lanes.round_lanes(delta_L, DELTA_SUM, at, NONE, first_row)
            if delta == DELTA_FROM_P or delta_gain != F32(1):
                lanes.dot_and_sum_over_keys(p_KL, dp_KL, keys, total, other)
                for lane in range(LANES):
                    true = F32(total[lane]) / F32(other[lane])
                    if delta == DELTA_FROM_P:
                        delta_L[lane] = true
                    else:
                        delta_L[lane] = true + delta_gain * (delta_L[lane] - true)

            # [22]
            lanes.score_gradients(
                p_KL, dp_KL, delta_L, wide_ds_KL, keys, hidden, total, other, at, counter, Tk
            )
            for lane in range(rows):
                head_error += abs(total[lane])
                head_size += other[lane]
                head_sum += total[lane]
            if softcap > ZERO:
                lanes.through_cap(wide_ds_KL, slope_KL, keys, hidden, at, counter, Tk)

            # [23]
            matmul(
                wide_dq_LD, 0, padded, wide_ds_KL, 0, 1, LANES, k_KD, 0, padded, LANES, padded, keys, False
            )
            lanes.narrow_rows(wide_dq_LD, dq_LD, rows, padded, scale, OUT_DQ, at, first, D)
            _store(dq_LD, rows, D, dq, first)

            # [24, 25]
            matmul(dk_KD, 0, padded, wide_ds_KL, 0, LANES, 1, wide_q_LD, 0, padded, keys, padded, rows, True)
            matmul(dv_KD, 0, padded, wide_p_KL, 0, LANES, 1, wide_do_LD, 0, padded, keys, padded, rows, True)

        if want_stats:
            vanish = head_error == 0.0 and head_size == 0.0
            residual_r[bh] = ZERO if vanish else F32(head_error / head_size)
            residual_mean[bh] = F32(head_sum / Tq)
        if h % group == group - 1 and not only_stats:
            lanes.narrow_rows(dk_KD, head_KD, Tk, padded, scale, OUT_DK, at, kv_row * D, D)
            _store(head_KD, Tk, D, dk, kv_row * D)
            lanes.narrow_rows(dv_KD, head_KD, Tk, padded, F32(1), OUT_DV, at, kv_row * D, D)
            _store(head_KD, Tk, D, dv, kv_row * D)
