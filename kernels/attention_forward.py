"""Streaming attention, forward: the recurrence of `qkpipe.numerics.streaming`, points 1 to 15, on a GPU.

One program has BLOCK_M query rows of one head and walks over the keys. What is rounded, and how, is compiled
in (the upper-case arguments named after `StreamPrecision`'s quantities). Two arithmetics:

    FAST       nothing inside is rounded: scores stay in units of q.k, exponentials are powers of two, and the
               maximum of a row is the running maximum of the recurrence, so sensing it is free. The tile of
               the recurrence has no meaning then, and BLOCK_N is chosen for speed.
    otherwise  every operation of the list in its order, each rounded to fp32 by itself (compile without
               floating-point fusion). A tile of TILE keys takes SUBTILES blocks of BLOCK_N, whose last may
               reach over its end; where there is more than one, the tile's maximum is found first, and the
               scores are computed again.

Sums and products over an index are accumulated in fp32, in the order of the tensor cores; there the result
differs from the reference's, which sums in float64.
"""

import triton
import triton.language as tl
from qkpipe_kernels.rounding import exponential, log_f32, matmul, round_to

from qkpipe.numerics.precision import ROUNDING_POINTS

_POINTS = list(ROUNDING_POINTS)
OUT = tl.constexpr(_POINTS.index("out"))
QK_POINT = tl.constexpr(_POINTS.index("qk"))
S_POINT = tl.constexpr(_POINTS.index("s"))
M_POINT = tl.constexpr(_POINTS.index("m"))
M_STEP = tl.constexpr(_POINTS.index("m_step"))
RESCALE_POINT = tl.constexpr(_POINTS.index("rescale"))
S_MINUS_M_POINT = tl.constexpr(_POINTS.index("s_minus_m"))
P_POINT = tl.constexpr(_POINTS.index("p"))
BLOCK_SUM_POINT = tl.constexpr(_POINTS.index("block_sum"))
L_POINT = tl.constexpr(_POINTS.index("l"))
L_LOW = tl.constexpr(_POINTS.index("l_low"))
P_OPERAND_POINT = tl.constexpr(_POINTS.index("p_operand"))
PV_POINT = tl.constexpr(_POINTS.index("pv"))
ACC_POINT = tl.constexpr(_POINTS.index("acc"))
ACC_LOW = tl.constexpr(_POINTS.index("acc_low"))
O_POINT = tl.constexpr(_POINTS.index("o"))
LSE_POINT = tl.constexpr(_POINTS.index("lse"))

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def load_rows(base, stride_t, rows, n_rows, D: tl.constexpr, EVEN: tl.constexpr):
    """(len(rows), D) of a tensor whose last axis is contiguous; rows past the end are 0."""
    at = base + rows[:, None] * stride_t + tl.arange(0, D)[None, :]
    if EVEN:
        return tl.load(at)
    else:
        return tl.load(at, mask=rows[:, None] < n_rows, other=0.0)


@triton.jit
def load_columns(base, stride_t, rows, n_rows, D: tl.constexpr, EVEN: tl.constexpr):
    """The transpose of `load_rows`: (D, len(rows))."""
    at = base + rows[None, :] * stride_t + tl.arange(0, D)[:, None]
    if EVEN:
        return tl.load(at)
    else:
        return tl.load(at, mask=rows[None, :] < n_rows, other=0.0)


@triton.jit
def _scores(
    q, k, scale, seed, row_number, rows, keys, end, Tk,
    QK: tl.constexpr, S: tl.constexpr, IO_PARTS: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """(scores of point 3, scores before any rounding), -inf where not seen, or where a key lies past `end`."""
    x = matmul(q, k, IO_PARTS, IO_PARTS)
    counter = row_number[:, None] * Tk + keys[None, :]
    zero = Tk * 0
    s = round_to(round_to(x, QK, seed, QK_POINT, zero, counter) * scale, S, seed, S_POINT, zero, counter)
    raw = x * scale
    if MASKED:
        seen = is_seen(rows[:, None], keys[None, :], end, CAUSAL)
        s = tl.where(seen, s, float("-inf"))
        raw = tl.where(seen, raw, float("-inf"))
    return s, raw


@triton.jit
def is_seen(rows, keys, end, CAUSAL: tl.constexpr):
    """Whether row i sees key j < end, for shapes that broadcast. A causal row sees none past the last key: Tq = Tk."""
    if CAUSAL:
        return (keys <= rows) & (keys < end)
    else:
        return (keys < end) & (rows >= 0)


@triton.jit
def _running_raw(raw, v, top, z, w, exact, SENSE: tl.constexpr, RAW: tl.constexpr, GAIN: tl.constexpr,
                 IO_PARTS: tl.constexpr, SHARED_EXP: tl.constexpr):  # fmt: skip
    """Take a block of unrounded scores into M = top, Z = z, sum e (raw - M) = w and, with GAIN, sum e v = exact."""
    if RAW:
        new = tl.maximum(top, tl.max(raw, 1))
        step = tl.where(z > 0, top - new, 0.0)
        alpha = exponential(step, SHARED_EXP)
        below = raw - new[:, None]
        e = exponential(below, SHARED_EXP)
        w = (w + z * step) * alpha + tl.sum(tl.where(raw > float("-inf"), e * below, 0.0), 1)
        z = z * alpha + tl.sum(e, 1)
        if GAIN:
            exact = exact * alpha[:, None] + matmul(e, v, 3, IO_PARTS)
        return new, z, w, exact
    elif SENSE:
        return tl.maximum(top, tl.max(raw, 1)), z, w, exact
    else:
        return top, z, w, exact


@triton.jit
def _tally(s, top, count, TIED: tl.constexpr):
    """Take a block of scores into the tile's maximum and, with TIED, into how often it is attained."""
    block_top = tl.max(s, 1)
    new = tl.maximum(top, block_top)
    if TIED:
        count = tl.where(top == new, count, 0) + tl.sum((s == new[:, None]).to(tl.int32), 1)
    return new, count


@triton.jit
def _shift_tied_maximum(top, count, BETA: tl.constexpr):
    """The tied-maximum shift of `StreamRepair`: (the maximum to use, whether it had to fall back)."""
    tied = count > 1
    safe = tl.where(top > 0.0, top * (BETA - 1.0) < 80.0, top > -80.0)
    shifted = tl.where(top > 0.0, top * BETA, tl.where(top < 0.0, 0.0, top))
    return tl.where(tied & safe, shifted, top), tied & (safe == 0)


@triton.jit
def _fast_tile(
    q, k_base, v_base, k_stride, v_stride, factor, rk_base, t, rows, Tk, m, l, acc, w,
    IO_PARTS: tl.constexpr, P_OPERAND: tl.constexpr, P_PARTS: tl.constexpr,
    BLOCK_N: tl.constexpr, D: tl.constexpr, CAUSAL: tl.constexpr, EVEN: tl.constexpr,
    NORM: tl.constexpr, ENTROPY: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """One block of keys without any rounding but that of P as an operand; m in units of q.k."""
    keys = t * BLOCK_N + tl.arange(0, BLOCK_N)
    k = load_columns(k_base, k_stride, keys, Tk, D, EVEN)
    x = matmul(q, k, IO_PARTS, IO_PARTS)
    if NORM:
        x = x * tl.load(rk_base + keys, mask=keys < Tk, other=0.0)[None, :]
    if MASKED:
        x = tl.where(is_seen(rows[:, None], keys[None, :], Tk, CAUSAL), x, float("-inf"))
    m_new = tl.maximum(m, tl.max(x, 1))
    below = x * factor[:, None] - (m_new * factor)[:, None]
    p = tl.exp2(below)
    step = (m - m_new) * factor
    alpha = tl.exp2(step)
    if ENTROPY:
        w = (w + tl.where(l > 0, l * step, 0.0)) * alpha
        w += tl.sum(tl.where(below > float("-inf"), p * below, 0.0) if MASKED else p * below, 1)
    l = l * alpha + tl.sum(p, 1)
    v = load_rows(v_base, v_stride, keys, Tk, D, EVEN)
    operand = round_to(p, P_OPERAND, t, P_OPERAND_POINT, t, keys)
    acc = acc * alpha[:, None] + matmul(operand, v, P_PARTS, IO_PARTS)
    return m_new, l, acc, w


@triton.jit
def _tile(
    q, k_base, v_base, k_stride, v_stride, scale, seed, t, row_number, rows, Tk,
    m, l, acc, l_low, acc_low, top, z, w, exact, fallbacks,
    QK: tl.constexpr, S: tl.constexpr, S_MINUS_M: tl.constexpr, P: tl.constexpr, P_OPERAND: tl.constexpr,
    BLOCK_SUM: tl.constexpr, RESCALE: tl.constexpr, ACC: tl.constexpr, L: tl.constexpr, M: tl.constexpr,
    PV: tl.constexpr, IO_PARTS: tl.constexpr, P_PARTS: tl.constexpr,
    TILE: tl.constexpr, BLOCK_N: tl.constexpr, SUBTILES: tl.constexpr, D: tl.constexpr, CAUSAL: tl.constexpr,
    EVEN: tl.constexpr, SHARED_EXP: tl.constexpr, COMPENSATED: tl.constexpr, SENSE: tl.constexpr,
    RAW: tl.constexpr, GAIN: tl.constexpr, TIED: tl.constexpr, BETA: tl.constexpr, CUT: tl.constexpr,
):  # fmt: skip
    """Points 4 to 11 for one tile of keys. CUT: some of its blocks' keys are not seen."""
    MASKED: tl.constexpr = CUT or TILE != SUBTILES * BLOCK_N
    start = t * TILE
    width = tl.minimum(Tk - start, TILE)
    end = start + width
    block = tl.arange(0, BLOCK_N)
    tile_top = tl.full(m.shape, float("-inf"), tl.float32)
    count = tl.zeros(m.shape, tl.int32)

    if SUBTILES == 1:
        k = load_columns(k_base, k_stride, start + block, Tk, D, EVEN)
        v = load_rows(v_base, v_stride, start + block, Tk, D, EVEN)
        s, raw = _scores(
            q, k, scale, seed, row_number, rows, start + block, end, Tk, QK, S, IO_PARTS, CAUSAL, MASKED
        )
        tile_top, count = _tally(s, tile_top, count, TIED)
        top, z, w, exact = _running_raw(raw, v, top, z, w, exact, SENSE, RAW, GAIN, IO_PARTS, SHARED_EXP)
    else:
        for first in range(0, TILE, BLOCK_N):
            keys = start + first + block
            k = load_columns(k_base, k_stride, keys, Tk, D, EVEN)
            v = k
            if GAIN:
                v = load_rows(v_base, v_stride, keys, Tk, D, EVEN)
            s, raw = _scores(
                q, k, scale, seed, row_number, rows, keys, end, Tk, QK, S, IO_PARTS, CAUSAL, MASKED
            )
            tile_top, count = _tally(s, tile_top, count, TIED)
            top, z, w, exact = _running_raw(raw, v, top, z, w, exact, SENSE, RAW, GAIN, IO_PARTS, SHARED_EXP)

    if TIED:
        tile_top, fell_back = _shift_tied_maximum(tile_top, count, BETA)
        fallbacks += (fell_back & ((start <= rows) | (not CAUSAL))).to(tl.int32)
    m_new = round_to(tl.maximum(m, tile_top), M, seed, M_POINT, t, row_number)
    step = round_to(m - m_new, S_MINUS_M, seed, M_STEP, t, row_number)
    alpha = round_to(exponential(step, SHARED_EXP), RESCALE, seed, RESCALE_POINT, t, row_number)

    if SUBTILES == 1:
        p = _exponentials(s, m_new, seed, t, row_number, start + block, block, width, rows, end,
                          S_MINUS_M, P, CAUSAL, SHARED_EXP, MASKED)  # fmt: skip
        b = tl.sum(p, 1)
        operand = round_to(
            p, P_OPERAND, seed, P_OPERAND_POINT, t, row_number[:, None] * width + block[None, :]
        )
        pv = matmul(operand, v, P_PARTS, IO_PARTS)
    else:
        b = tl.zeros_like(m)
        pv = tl.zeros_like(acc)
        for first in range(0, TILE, BLOCK_N):
            keys = start + first + block
            k = load_columns(k_base, k_stride, keys, Tk, D, EVEN)
            s, _ = _scores(
                q, k, scale, seed, row_number, rows, keys, end, Tk, QK, S, IO_PARTS, CAUSAL, MASKED
            )
            p = _exponentials(s, m_new, seed, t, row_number, keys, first + block, width, rows, end,
                              S_MINUS_M, P, CAUSAL, SHARED_EXP, MASKED)  # fmt: skip
            b += tl.sum(p, 1)
            v = load_rows(v_base, v_stride, keys, Tk, D, EVEN)
            counter = row_number[:, None] * width + (first + block)[None, :]
            operand = round_to(p, P_OPERAND, seed, P_OPERAND_POINT, t, counter)
            pv += matmul(operand, v, P_PARTS, IO_PARTS)
    b = round_to(b, BLOCK_SUM, seed, BLOCK_SUM_POINT, t, row_number)
    element = row_number[:, None] * D + tl.arange(0, D)[None, :]
    pv = round_to(pv, PV, seed, PV_POINT, t, element)

    if COMPENSATED:
        total_l = (l * alpha + l_low * alpha) + b
        total = (acc * alpha[:, None] + acc_low * alpha[:, None]) + pv
    else:
        total_l = l * alpha + b
        total = acc * alpha[:, None] + pv
    l_new = round_to(total_l, L, seed, L_POINT, t, row_number)
    acc_new = round_to(total, ACC, seed, ACC_POINT, t, element)
    if COMPENSATED:
        # A row that sees nothing of the tile keeps its pairs: adding 0 could move digits between the two.
        started = (start <= rows) | (not CAUSAL)
        l_low_new = round_to(total_l - l_new, L, seed, L_LOW, t, row_number)
        acc_low_new = round_to(total - acc_new, ACC, seed, ACC_LOW, t, element)
        l_low = tl.where(started, l_low_new, l_low)
        acc_low = tl.where(started[:, None], acc_low_new, acc_low)
        l_new = tl.where(started, l_new, l)
        acc_new = tl.where(started[:, None], acc_new, acc)
    return m_new, l_new, acc_new, l_low, acc_low, top, z, w, exact, fallbacks


@triton.jit
def _exponentials(
    s, m, seed, t, row_number, keys, in_tile, width, rows, end,
    S_MINUS_M: tl.constexpr, P: tl.constexpr, CAUSAL: tl.constexpr, SHARED_EXP: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """P of point 7, 0 where not seen."""
    counter = row_number[:, None] * width + in_tile[None, :]
    below = round_to(s - m[:, None], S_MINUS_M, seed, S_MINUS_M_POINT, t, counter)
    p = round_to(exponential(below, SHARED_EXP), P, seed, P_POINT, t, counter)
    if MASKED:
        p = tl.where(is_seen(rows[:, None], keys[None, :], end, CAUSAL), p, 0.0)
    return p


@triton.jit(do_not_specialize=["seed"])
def attention_forward(
    q_ptr, k_ptr, v_ptr, out_ptr, o_ptr, lse_ptr, max_ptr, entropy_ptr, fallback_ptr, rq_ptr, rk_ptr,
    scale, out_gain, seed, H, group, Tq, Tk,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, out_b, out_h, out_t,
    QK: tl.constexpr, S: tl.constexpr, S_MINUS_M: tl.constexpr, P: tl.constexpr, P_OPERAND: tl.constexpr,
    BLOCK_SUM: tl.constexpr, RESCALE: tl.constexpr, ACC: tl.constexpr, L: tl.constexpr, M: tl.constexpr,
    PV: tl.constexpr, O: tl.constexpr, LSE: tl.constexpr, IO: tl.constexpr,
    IO_PARTS: tl.constexpr, P_PARTS: tl.constexpr,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TILE: tl.constexpr,
    SUBTILES: tl.constexpr, CAUSAL: tl.constexpr, EVEN: tl.constexpr, FAST: tl.constexpr, NORM: tl.constexpr,
    SHARED_EXP: tl.constexpr, COMPENSATED: tl.constexpr, EXACT_LSE: tl.constexpr, GAIN: tl.constexpr,
    TIED: tl.constexpr, BETA: tl.constexpr, KEEP_O: tl.constexpr, SENSE: tl.constexpr, ENTROPY: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of rows, B * H). q: (B, H, Tq, D); k, v: (B, H / group, Tk, D), rounded to io already.

    Writes out (io), o (fp32, before any rounding, if KEEP_O), lse, with SENSE and ENTROPY the largest
    unrounded logit and the entropy (nat) of every row, fp32 (B, H, Tq), and with TIED and SENSE the tiles at which the
    tied-maximum shift fell back, int32 (B, H, Tq). With NORM, scores are multiplied by
    rq[i] and rk[j], (B, H, Tq) and (B, H / group, Tk).
    """
    bh = tl.program_id(1)
    # Under a causal mask the last rows have the most to do: they start first.
    block_m = tl.num_programs(0) - 1 - tl.program_id(0)
    b, h = (bh // H).to(tl.int64), (bh % H).to(tl.int64)
    h_kv = h // group
    rows = block_m * BLOCK_M + tl.arange(0, BLOCK_M)
    row_number = bh * Tq + rows

    q = load_rows(q_ptr + b * q_b + h * q_h, q_t, rows, Tq, D, EVEN)
    k_base = k_ptr + b * k_b + h_kv * k_h
    v_base = v_ptr + b * v_b + h_kv * v_h
    rk_base = rk_ptr + (b * (H // group) + h_kv) * Tk
    factor = tl.full((BLOCK_M,), 1.0, tl.float32) * scale
    if NORM:
        factor = factor * tl.load(rq_ptr + row_number, mask=rows < Tq, other=0.0)
    factor_2 = factor * LOG2_E

    m = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    l = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, D), tl.float32)
    l_low, z, w = tl.zeros_like(l), tl.zeros_like(l), tl.zeros_like(l)
    acc_low = tl.zeros_like(acc)
    top = m
    exact = acc
    fallbacks = tl.zeros((BLOCK_M,), tl.int32)

    RAW: tl.constexpr = ENTROPY or EXACT_LSE or GAIN
    if CAUSAL:
        n_full = (block_m * BLOCK_M + 1) // TILE
        n_tiles = tl.cdiv(tl.minimum((block_m + 1) * BLOCK_M, Tk), TILE)
    else:
        n_full = Tk // TILE
        n_tiles = tl.cdiv(Tk, TILE)
    for MASKED in tl.static_range(2):
        first = n_full if MASKED else 0
        last = n_tiles if MASKED else n_full
        for t in range(first, last):
            if FAST:
                m, l, acc, w = _fast_tile(
                    q, k_base, v_base, k_t, v_t, factor_2, rk_base, t, rows, Tk, m, l, acc, w,
                    IO_PARTS, P_OPERAND, P_PARTS, BLOCK_N, D, CAUSAL, EVEN, NORM, ENTROPY, MASKED,
                )  # fmt: skip
            else:
                m, l, acc, l_low, acc_low, top, z, w, exact, fallbacks = _tile(
                    q, k_base, v_base, k_t, v_t, scale, seed, t, row_number, rows, Tk,
                    m, l, acc, l_low, acc_low, top, z, w, exact, fallbacks,
                    QK, S, S_MINUS_M, P, P_OPERAND, BLOCK_SUM, RESCALE, ACC, L, M, PV, IO_PARTS, P_PARTS,
                    TILE, BLOCK_N, SUBTILES, D, CAUSAL, EVEN, SHARED_EXP, COMPENSATED, SENSE, RAW, GAIN,
                    TIED, BETA, MASKED,
                )  # fmt: skip

    zero = bh * 0
    if COMPENSATED:
        l = l + l_low
        acc = acc + acc_low
    if FAST:
        o = acc * (1.0 / l)[:, None]
        top, z, w = m * factor, l, w * LN_2
        lse = top + log_f32(l)
    else:
        o = tl.div_rn(acc, l[:, None])
        lse = round_to(m + log_f32(l), LSE, seed, LSE_POINT, zero, row_number)
    if EXACT_LSE:
        lse = top + log_f32(z)

    exists = rows < Tq
    element = row_number[:, None] * D + tl.arange(0, D)[None, :]
    at = b * out_b + h * out_h + rows[:, None] * out_t + tl.arange(0, D)[None, :]
    rounded = round_to(o, O, seed, O_POINT, zero, element)
    if GAIN:
        exact = tl.div_rn(exact, tl.broadcast_to(z[:, None], (BLOCK_M, D)))
        rounded = exact + out_gain * (rounded - exact)
        o = exact + out_gain * (o - exact)
    if KEEP_O:
        tl.store(o_ptr + at, o, mask=exists[:, None])
    out = round_to(rounded, IO, seed, OUT, zero, element)
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=exists[:, None])
    tl.store(lse_ptr + row_number, lse, mask=exists)
    if SENSE:
        # A maximum skips NaN, a sum does not.
        top = tl.where(l != l, tl.where(top == float("inf"), top, float("nan")), top)
        tl.store(max_ptr + row_number, top + 0.0, mask=exists)  # no -0
        if TIED:
            tl.store(fallback_ptr + row_number, fallbacks, mask=exists)
    if ENTROPY:
        tl.store(entropy_ptr + row_number, log_f32(z) - tl.div_rn(w, z), mask=exists)
