"""Streaming attention, backward: points 16 to 25 of `qkpipe.numerics.streaming`, on a GPU.

Three kernels, without atomics, so that equal inputs give equal bits: delta; dQ, a block of query rows over the
keys, which is also where the rows of dS are summed up (the residual); dK and dV, a block of keys over the query
rows of every head of its group. Scores and dP are computed in each of the last two.
FAST and NORM are those of `attention_forward`. OPERAND: a further rounding of P and dS as operands of the
matrix products (bfloat16 in a stock kernel), after everything else has used them.
"""

import triton
import triton.language as tl
from qkpipe_kernels.attention_forward import LOG2_E, is_seen, load_columns, load_rows
from qkpipe_kernels.rounding import exponential, matmul, round_to

from qkpipe.numerics.precision import ROUNDING_POINTS

_POINTS = list(ROUNDING_POINTS)
OUT_DQ = tl.constexpr(_POINTS.index("out_dq"))
OUT_DK = tl.constexpr(_POINTS.index("out_dk"))
OUT_DV = tl.constexpr(_POINTS.index("out_dv"))
BWD_QK = tl.constexpr(_POINTS.index("bwd_qk"))
BWD_S_POINT = tl.constexpr(_POINTS.index("bwd_s"))
BWD_P_POINT = tl.constexpr(_POINTS.index("bwd_p"))
DP_POINT = tl.constexpr(_POINTS.index("dp"))
DELTA_PROD_POINT = tl.constexpr(_POINTS.index("delta_prod"))
DELTA_SUM_POINT = tl.constexpr(_POINTS.index("delta_sum"))
DS_POINT = tl.constexpr(_POINTS.index("ds"))


@triton.jit
def _p_and_dp(
    x, dp, rows, keys, lse, factor, scale, seed, counter, Tk,
    BWD_S: tl.constexpr, BWD_P: tl.constexpr, DP: tl.constexpr, CAUSAL: tl.constexpr, FAST: tl.constexpr,
    SHARED_EXP: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Points 18 to 20 from the two products. rows, keys, lse, factor: shaped to broadcast over x."""
    zero = Tk * 0
    if FAST:
        p = tl.exp2(x * factor - lse * LOG2_E)
    else:
        s = round_to(x, BWD_S, seed, BWD_QK, zero, counter) * scale
        s = round_to(s, BWD_S, seed, BWD_S_POINT, zero, counter)
        p = round_to(exponential(s - lse, SHARED_EXP), BWD_P, seed, BWD_P_POINT, zero, counter)
        dp = round_to(dp, DP, seed, DP_POINT, zero, counter)
    if MASKED:
        p = tl.where(is_seen(rows, keys, Tk, CAUSAL), p, 0.0)
    return p, dp


@triton.jit
def _ds(
    p, dp, delta, rows, keys, seed, counter, Tk, DS: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr
):
    """Point 22."""
    ds = round_to(p * (dp - delta), DS, seed, DS_POINT, Tk * 0, counter)
    if MASKED:
        ds = tl.where(is_seen(rows, keys, Tk, CAUSAL), ds, 0.0)
    return ds


@triton.jit(do_not_specialize=["seed"])
def attention_delta(
    o_ptr, do_ptr, delta_ptr, seed, H, T, o_b, o_h, o_t, do_b, do_h, do_t,
    DELTA_PROD: tl.constexpr, DELTA_SUM: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Point 21, "o". Grid (blocks of rows, B * H)."""
    bh = tl.program_id(1)
    b, h = (bh // H).to(tl.int64), (bh % H).to(tl.int64)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row_number = bh * T + rows
    o = load_rows(o_ptr + b * o_b + h * o_h, o_t, rows, T, D, False).to(tl.float32)
    do = load_rows(do_ptr + b * do_b + h * do_h, do_t, rows, T, D, False).to(tl.float32)
    element = row_number[:, None] * D + tl.arange(0, D)[None, :]
    product = round_to(do * o, DELTA_PROD, seed, DELTA_PROD_POINT, bh * 0, element)
    delta = round_to(tl.sum(product, 1), DELTA_SUM, seed, DELTA_SUM_POINT, bh * 0, row_number)
    tl.store(delta_ptr + row_number, delta, mask=rows < T)


@triton.jit(do_not_specialize=["seed"])
def attention_delta_from_p(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, scale, gain, seed, H, group, Tq, Tk,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, do_b, do_h, do_t,
    BWD_S: tl.constexpr, BWD_P: tl.constexpr, DP: tl.constexpr, IO_PARTS: tl.constexpr,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr,
    SHARED_EXP: tl.constexpr, GAIN: tl.constexpr,
):  # fmt: skip
    """Point 21, "p": d_P = sum P dP / sum P takes the place of delta; with GAIN, d_P + gain * (delta - d_P) does."""
    bh = tl.program_id(1)
    b, h = (bh // H).to(tl.int64), (bh % H).to(tl.int64)
    h_kv = h // group
    first_row = tl.program_id(0) * BLOCK_M
    rows = first_row + tl.arange(0, BLOCK_M)
    row_number = bh * Tq + rows
    q = load_rows(q_ptr + b * q_b + h * q_h, q_t, rows, Tq, D, False)
    do = load_rows(do_ptr + b * do_b + h * do_h, do_t, rows, Tq, D, False)
    lse = tl.load(lse_ptr + row_number, mask=rows < Tq, other=0.0)[:, None]
    sum_p = tl.zeros((BLOCK_M,), tl.float32)
    sum_pdp = tl.zeros((BLOCK_M,), tl.float32)
    end = tl.minimum(first_row + BLOCK_M, Tk) if CAUSAL else Tk
    for start in range(0, end, BLOCK_N):
        keys = start + tl.arange(0, BLOCK_N)
        k = load_columns(k_ptr + b * k_b + h_kv * k_h, k_t, keys, Tk, D, False)
        v = load_columns(v_ptr + b * v_b + h_kv * v_h, v_t, keys, Tk, D, False)
        p, dp = _p_and_dp(
            matmul(q, k, IO_PARTS, IO_PARTS), matmul(do, v, IO_PARTS, IO_PARTS), rows[:, None], keys[None, :],
            lse, scale, scale, seed, row_number[:, None] * Tk + keys[None, :], Tk,
            BWD_S, BWD_P, DP, CAUSAL, False, SHARED_EXP, True,
        )  # fmt: skip
        sum_p += tl.sum(p, 1)
        sum_pdp += tl.sum(p * dp, 1)
    delta = tl.div_rn(sum_pdp, sum_p)
    if GAIN:
        delta = delta + gain * (tl.load(delta_ptr + row_number, mask=rows < Tq, other=0.0) - delta)
    tl.store(delta_ptr + row_number, delta, mask=rows < Tq)


@triton.jit
def _dq_block(
    q, do, k_base, v_base, k_t, v_t, rk_base, lse, delta, factor, scale, seed, start, rows, row_number, Tk,
    dq, row_sum, row_size,
    BWD_S: tl.constexpr, BWD_P: tl.constexpr, DP: tl.constexpr, DS: tl.constexpr, OPERAND: tl.constexpr,
    IO_PARTS: tl.constexpr, DS_PARTS: tl.constexpr, D: tl.constexpr, BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr, EVEN: tl.constexpr, FAST: tl.constexpr, NORM: tl.constexpr,
    SHARED_EXP: tl.constexpr, RESIDUAL: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    keys = start + tl.arange(0, BLOCK_N)
    k = load_rows(k_base, k_t, keys, Tk, D, EVEN)
    v = load_columns(v_base, v_t, keys, Tk, D, EVEN)
    x = matmul(q, tl.trans(k), IO_PARTS, IO_PARTS)
    if NORM:
        rk = tl.load(rk_base + keys, mask=keys < Tk, other=0.0)[None, :]
        x = x * rk
    counter = row_number[:, None] * Tk + keys[None, :]
    p, dp = _p_and_dp(
        x, matmul(do, v, IO_PARTS, IO_PARTS), rows[:, None], keys[None, :], lse, factor, scale, seed, counter, Tk,
        BWD_S, BWD_P, DP, CAUSAL, FAST, SHARED_EXP, MASKED,
    )  # fmt: skip
    ds = _ds(p, dp, delta, rows[:, None], keys[None, :], seed, counter, Tk, DS, CAUSAL, MASKED)
    if RESIDUAL:
        row_sum += tl.sum(ds, 1)
        row_size += tl.sum(tl.abs(ds), 1)
    if NORM:
        ds = ds * rk
    dq += matmul(round_to(ds, OPERAND, seed, DS_POINT, start, counter), k, DS_PARTS, IO_PARTS)
    return dq, row_sum, row_size


@triton.jit(do_not_specialize=["seed"])
def attention_backward_dq(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dq_ptr, row_sum_ptr, row_size_ptr, rq_ptr, rk_ptr,
    scale, seed, H, group, Tq, Tk,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, do_b, do_h, do_t, dq_b, dq_h, dq_t,
    BWD_S: tl.constexpr, BWD_P: tl.constexpr, DP: tl.constexpr, DS: tl.constexpr, IO: tl.constexpr,
    OPERAND: tl.constexpr, IO_PARTS: tl.constexpr, DS_PARTS: tl.constexpr,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr, EVEN: tl.constexpr, FAST: tl.constexpr, NORM: tl.constexpr,
    SHARED_EXP: tl.constexpr, RESIDUAL: tl.constexpr,
):  # fmt: skip
    """Points 22 and 23. Grid (blocks of rows, B * H). With RESIDUAL also sum_j dS_ij and sum_j |dS_ij|, (B, H, Tq)."""
    bh = tl.program_id(1)
    block_m = tl.num_programs(0) - 1 - tl.program_id(0)
    b, h = (bh // H).to(tl.int64), (bh % H).to(tl.int64)
    h_kv = h // group
    first_row = block_m * BLOCK_M
    rows = first_row + tl.arange(0, BLOCK_M)
    exists = rows < Tq
    row_number = bh * Tq + rows
    q = load_rows(q_ptr + b * q_b + h * q_h, q_t, rows, Tq, D, EVEN)
    do = load_rows(do_ptr + b * do_b + h * do_h, do_t, rows, Tq, D, EVEN)
    lse = tl.load(lse_ptr + row_number, mask=exists, other=0.0)[:, None]
    delta = tl.load(delta_ptr + row_number, mask=exists, other=0.0)[:, None]
    factor = tl.full((BLOCK_M, 1), LOG2_E, tl.float32) * scale
    if NORM:
        factor = factor * tl.load(rq_ptr + row_number, mask=exists, other=0.0)[:, None]
    k_base = k_ptr + b * k_b + h_kv * k_h
    v_base = v_ptr + b * v_b + h_kv * v_h
    rk_base = rk_ptr + (b * (H // group) + h_kv) * Tk

    dq = tl.zeros((BLOCK_M, D), tl.float32)
    row_sum = tl.zeros((BLOCK_M,), tl.float32)
    row_size = tl.zeros((BLOCK_M,), tl.float32)
    if CAUSAL:
        whole = (first_row + 1) // BLOCK_N * BLOCK_N
        end = tl.minimum(first_row + BLOCK_M, Tk)
    else:
        whole = Tk // BLOCK_N * BLOCK_N
        end = Tk
    for MASKED in tl.static_range(2):
        for start in range(whole if MASKED else 0, end if MASKED else whole, BLOCK_N):
            dq, row_sum, row_size = _dq_block(
                q, do, k_base, v_base, k_t, v_t, rk_base, lse, delta, factor, scale, seed, start, rows,
                row_number, Tk, dq, row_sum, row_size,
                BWD_S, BWD_P, DP, DS, OPERAND, IO_PARTS, DS_PARTS, D, BLOCK_N, CAUSAL, EVEN, FAST, NORM,
                SHARED_EXP, RESIDUAL, MASKED,
            )  # fmt: skip

    columns = tl.arange(0, D)
    dq = round_to(dq * scale, IO, seed, OUT_DQ, bh * 0, row_number[:, None] * D + columns[None, :])
    at = dq_ptr + b * dq_b + h * dq_h + rows[:, None] * dq_t + columns[None, :]
    tl.store(at, dq.to(dq_ptr.dtype.element_ty), mask=exists[:, None])
    if RESIDUAL:
        tl.store(row_sum_ptr + row_number, row_sum, mask=exists)
        tl.store(row_size_ptr + row_number, row_size, mask=exists)


@triton.jit
def _dkdv_block(
    k, v, q_base, do_base, q_t, do_t, lse_base, delta_base, rq_base, rk, scale, seed, start, keys, head_row, Tq, Tk,
    dk, dv,
    BWD_S: tl.constexpr, BWD_P: tl.constexpr, DP: tl.constexpr, DS: tl.constexpr, OPERAND: tl.constexpr,
    IO_PARTS: tl.constexpr, P_PARTS: tl.constexpr, DS_PARTS: tl.constexpr, D: tl.constexpr,
    BLOCK_M: tl.constexpr, CAUSAL: tl.constexpr, EVEN: tl.constexpr, FAST: tl.constexpr, NORM: tl.constexpr,
    SHARED_EXP: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """One block of rows; scores are held transposed, (keys, rows). A row past the end has do = 0 and P = 0."""
    rows = start + tl.arange(0, BLOCK_M)
    q = load_rows(q_base, q_t, rows, Tq, D, EVEN)
    do = load_rows(do_base, do_t, rows, Tq, D, EVEN)
    if EVEN:
        lse = tl.load(lse_base + rows)
        delta = tl.load(delta_base + rows)
    else:
        lse = tl.load(lse_base + rows, mask=rows < Tq, other=float("inf"))
        delta = tl.load(delta_base + rows, mask=rows < Tq, other=0.0)
    x = matmul(k, tl.trans(q), IO_PARTS, IO_PARTS)
    factor = tl.full((1, BLOCK_M), LOG2_E, tl.float32) * scale
    if NORM:
        rq = tl.load(rq_base + rows, mask=rows < Tq, other=0.0)[None, :]
        x = x * rk
        factor = factor * rq
    counter = (head_row + rows)[None, :] * Tk + keys[:, None]
    p, dp = _p_and_dp(
        x, matmul(v, tl.trans(do), IO_PARTS, IO_PARTS), rows[None, :], keys[:, None], lse[None, :], factor,
        scale, seed, counter, Tk, BWD_S, BWD_P, DP, CAUSAL, FAST, SHARED_EXP, MASKED,
    )  # fmt: skip
    dv += matmul(round_to(p, OPERAND, seed, BWD_P_POINT, start, counter), do, P_PARTS, IO_PARTS)
    ds = _ds(p, dp, delta[None, :], rows[None, :], keys[:, None], seed, counter, Tk, DS, CAUSAL, MASKED)
    if NORM:
        ds = ds * rq
    dk += matmul(round_to(ds, OPERAND, seed, DS_POINT, start, counter), q, DS_PARTS, IO_PARTS)
    return dk, dv


@triton.jit(do_not_specialize=["seed"])
def attention_backward_dkdv(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, rq_ptr, rk_ptr,
    scale, seed, H, group, Tq, Tk,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, do_b, do_h, do_t, dk_b, dk_h, dk_t, dv_b, dv_h, dv_t,
    BWD_S: tl.constexpr, BWD_P: tl.constexpr, DP: tl.constexpr, DS: tl.constexpr, IO: tl.constexpr,
    OPERAND: tl.constexpr, IO_PARTS: tl.constexpr, P_PARTS: tl.constexpr, DS_PARTS: tl.constexpr,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr, EVEN: tl.constexpr, FAST: tl.constexpr, NORM: tl.constexpr, SHARED_EXP: tl.constexpr,
):  # fmt: skip
    """Points 24 and 25. Grid (blocks of keys, B * H / group)."""
    bh_kv = tl.program_id(1)
    H_kv = H // group
    b, h_kv = (bh_kv // H_kv).to(tl.int64), (bh_kv % H_kv).to(tl.int64)
    first_key = tl.program_id(0) * BLOCK_N
    keys = first_key + tl.arange(0, BLOCK_N)
    k = load_rows(k_ptr + b * k_b + h_kv * k_h, k_t, keys, Tk, D, EVEN)
    v = load_rows(v_ptr + b * v_b + h_kv * v_h, v_t, keys, Tk, D, EVEN)
    rk = tl.full((BLOCK_N, 1), 1.0, tl.float32)
    if NORM:
        rk = tl.load(rk_ptr + bh_kv * Tk + keys, mask=keys < Tk, other=0.0)[:, None]

    dk = tl.zeros((BLOCK_N, D), tl.float32)
    dv = tl.zeros((BLOCK_N, D), tl.float32)
    if CAUSAL:
        first_row = first_key // BLOCK_M * BLOCK_M
        whole = tl.minimum(tl.cdiv(first_key + BLOCK_N - 1, BLOCK_M) * BLOCK_M, Tq)
    else:
        first_row = 0
        whole = 0
    for in_group in range(group):
        h = h_kv * group + in_group
        head_row = (bh_kv * group + in_group) * Tq
        q_base = q_ptr + b * q_b + h * q_h
        do_base = do_ptr + b * do_b + h * do_h
        for MASKED in tl.static_range(1, -1, -1):
            for start in range(first_row if MASKED else whole, whole if MASKED else Tq, BLOCK_M):
                dk, dv = _dkdv_block(
                    k, v, q_base, do_base, q_t, do_t, lse_ptr + head_row, delta_ptr + head_row, rq_ptr + head_row,
                    rk, scale, seed, start, keys, head_row, Tq, Tk, dk, dv,
                    BWD_S, BWD_P, DP, DS, OPERAND, IO_PARTS, P_PARTS, DS_PARTS, D, BLOCK_M,
                    CAUSAL, EVEN, FAST, NORM, SHARED_EXP, MASKED,
                )  # fmt: skip

    exists = (keys < Tk)[:, None]
    columns = tl.arange(0, D)
    element = (bh_kv * Tk + keys)[:, None] * D + columns[None, :]
    dk = round_to(dk * scale, IO, seed, OUT_DK, bh_kv * 0, element)
    dv = round_to(dv, IO, seed, OUT_DV, bh_kv * 0, element)
    at_dk = dk_ptr + b * dk_b + h_kv * dk_h + keys[:, None] * dk_t + columns[None, :]
    at_dv = dv_ptr + b * dv_b + h_kv * dv_h + keys[:, None] * dv_t + columns[None, :]
    tl.store(at_dk, dk.to(dk_ptr.dtype.element_ty), mask=exists)
    tl.store(at_dv, dv.to(dv_ptr.dtype.element_ty), mask=exists)
