"""The inner loops of compiled streaming attention, emitted as LLVM IR with vector types.

A block of scores x_KL holds one row of `LANES` neighbours a key. LLVM unrolls so short a loop before its vectoriser
sees it, and then finds no proof that the arrays do not overlap: it stays scalar. Here each row is one vector value,
running results stay in registers, and every step between two matrix products is one pass over memory. Each loop
is a function of the module, emitted at its first use there. Rows of D numbers are padded to a multiple of
`COLUMNS`, and worked on so many at a time. Arrays are contiguous; nothing is checked. Numbers in brackets: the
arithmetic of `qkpipe.numerics.streaming`.

Rounding points come as a table of int32 (`rounding_table`). All modes are one formula on the pattern i,

    (i + offset + ((i >> shift) & bit)) & keep, NaN excepted

plus a draw's low bits under stochastic rounding, a branch, as is the gain. Element (row, column) of a tensor with rows of
`width` takes the draw of counter row * width + column: so over a block, counter + lane * width + key.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from qkpipe.numerics import counter_rng, exp_log
from qkpipe.numerics.float64_matmul import COLUMNS
from qkpipe.numerics.precision import ROUNDING_POINTS

LANES = 16
POINTS = {name: number for number, name in enumerate(ROUNDING_POINTS)}
# table: the seed; then shift, offset, bit, keep, stochastic, bits of the gain, whether it is not 1, of every point
_SEED, _FIRST, _FIELDS = 0, 1, 7

_INT, _SIZE, _BOOL = ir.IntType(32), ir.IntType(64), ir.IntType(1)
_FLOAT, _DOUBLE = ir.FloatType(), ir.DoubleType()


def rounding_table(roundings) -> np.ndarray:
    """The table of `ROUNDING_POINTS`, given each point's `Rounding`; the seed, entry 0, is 0."""
    table = np.zeros(_FIRST + _FIELDS * len(roundings), np.int32)
    for row, rounding in zip(table[_FIRST:].reshape(-1, _FIELDS), roundings, strict=True):
        shift = 23 - rounding.bits
        to_even = rounding.mode == "even" and shift > 0
        offset = (1 << (shift - 1)) - 1 if to_even else 0
        row[:5] = shift, offset, to_even, -(1 << shift), rounding.mode == "stochastic" and shift > 0
        row[5:] = np.float32(rounding.gain).view(np.int32), rounding.gain != 1 and shift > 0
    return table


# Emission


def _int(value, kind=_INT):
    return ir.Constant(kind, value)


def _vector(kind, width):
    return ir.VectorType(kind, width)


def _splat(builder, scalar, width):
    if isinstance(scalar, ir.Constant):
        return ir.Constant(_vector(scalar.type, width), [scalar.constant] * width)
    kind = _vector(scalar.type, width)
    first = builder.insert_element(ir.Constant(kind, ir.Undefined), scalar, _int(0))
    return builder.shuffle_vector(first, first, ir.Constant(_vector(_INT, width), None))


def _iota(width):
    return ir.Constant(_vector(_INT, width), list(range(width)))


def _row(builder, base, index, width):
    """Pointer to the vector base[index : index + width]."""
    kind = _vector(base.type.pointee, width)
    return builder.bitcast(builder.gep(base, [index]), kind.as_pointer())


def _load(builder, base, index=None, width=LANES):
    index = _int(0, _SIZE) if index is None else index
    return builder.load(_row(builder, base, index, width), align=4)


def _store(builder, value, base, index=None):
    index = _int(0, _SIZE) if index is None else index
    builder.store(value, _row(builder, base, index, value.type.count), align=4)


def _widened(builder, x):
    return builder.fpext(x, _vector(_DOUBLE, x.type.count))


def _narrowed(builder, x):
    return builder.fptrunc(x, _vector(_FLOAT, x.type.count))


def _is_nan(builder, x):
    return builder.fcmp_unordered("uno", x, x)


def _max_or_nan(builder, x, top):
    above = builder.fcmp_ordered(">", x, top)
    return builder.select(builder.or_(above, _is_nan(builder, x)), x, top)


def _size(builder, x):
    return builder.select(builder.fcmp_ordered("<", x, _constant(x, 0.0)), builder.fneg(x), x)


def _constant(like, value):
    """A float as a vector of the type of `like`."""
    return ir.Constant(like.type, [float(value)] * like.type.count)


def _ints(width, value):
    return ir.Constant(_vector(_INT, width), [int(value)] * width)


def _exp(builder, x):
    """`exp_log.exp_f32`, operation by operation."""
    width = x.type.count
    f = {name: _constant(x, np.float32(getattr(exp_log, name))) for name in
         ("EXP_MAX", "EXP_MIN", "LOG2_E", "ROUND_TO_INT", "LN2_HIGH", "LN2_LOW")}  # fmt: skip
    x = builder.select(builder.fcmp_ordered(">", x, f["EXP_MAX"]), f["EXP_MAX"], x)
    x = builder.select(builder.fcmp_ordered("<", x, f["EXP_MIN"]), f["EXP_MIN"], x)
    shifted = builder.fadd(builder.fmul(x, f["LOG2_E"]), f["ROUND_TO_INT"])
    n_float = builder.fsub(shifted, f["ROUND_TO_INT"])
    r = builder.fsub(x, builder.fmul(n_float, f["LN2_HIGH"]))
    r = builder.fsub(r, builder.fmul(n_float, f["LN2_LOW"]))
    poly = _constant(x, np.float32(exp_log.EXP_POLY[0]))
    for coefficient in exp_log.EXP_POLY[1:]:
        poly = builder.fadd(builder.fmul(poly, r), _constant(x, np.float32(coefficient)))
    y = builder.fadd(builder.fadd(builder.fmul(poly, builder.fmul(r, r)), r), _constant(x, 1.0))
    pattern = builder.bitcast(shifted, _vector(_INT, width))
    n = builder.sub(pattern, _ints(width, np.float32(exp_log.ROUND_TO_INT).view(np.int32)))
    half = builder.ashr(n, _ints(width, 1))
    for exponent in (half, builder.sub(n, half)):
        power = builder.shl(builder.add(exponent, _ints(width, 127)), _ints(width, 23))
        y = builder.fmul(y, builder.bitcast(power, x.type))
    return y


def _tanh(builder, x):
    """`exp_log.tanh_f32`, operation by operation."""
    zero, one, two = (_constant(x, value) for value in (0.0, 1.0, 2.0))
    size = _size(builder, x)
    large = builder.fsub(one, builder.fdiv(two, builder.fadd(_exp(builder, builder.fadd(size, size)), one)))
    square = builder.fmul(x, x)
    poly = _constant(x, np.float32(exp_log.TANH_POLY[0]))
    for coefficient in exp_log.TANH_POLY[1:]:
        poly = builder.fadd(builder.fmul(poly, square), _constant(x, np.float32(coefficient)))
    small = builder.fadd(builder.fmul(builder.fmul(poly, square), x), x)
    is_small = builder.fcmp_ordered("<", size, _constant(x, np.float32(exp_log.TANH_SMALL)))
    signed = builder.select(builder.fcmp_ordered("<", x, zero), builder.fneg(large), large)
    return builder.select(is_small, small, signed)


def _capper(builder, cap) -> Callable:
    """The soft-cap of [3] and [18], none where `cap` is 0: vector -> (capped, slope of the cap there)."""
    wanted = builder.fcmp_ordered(">", cap, ir.Constant(_FLOAT, 0.0))
    cap = _splat(builder, cap, LANES)
    capped, slope = (cgutils.alloca_once(builder, _vector(_FLOAT, LANES)) for _ in range(2))

    def apply(y):
        builder.store(y, capped)
        builder.store(_constant(y, 1.0), slope)
        with builder.if_then(wanted, likely=False):
            t = _tanh(builder, builder.fdiv(y, cap))
            builder.store(builder.fmul(cap, t), capped)
            builder.store(builder.fsub(_constant(y, 1.0), builder.fmul(t, t)), slope)
        return builder.load(capped), builder.load(slope)

    return apply


def _u32(value):
    return value - (1 << 32) if value >> 31 else value


def _mix(builder, h):
    """`counter_rng._mix`, on an int32 or a vector of them."""

    def constant(value):
        return _int(_u32(value)) if h.type == _INT else _ints(h.type.count, _u32(value))

    for shift, factor in ((16, counter_rng._M1), (15, counter_rng._M2), (16, None)):
        h = builder.xor(h, builder.lshr(h, constant(shift)))
        h = h if factor is None else builder.mul(h, constant(factor))
    return h


def _stream_keys(builder, seed, stream):
    k1 = _mix(builder, builder.add(seed, _int(_u32(counter_rng._A))))
    k2 = _mix(builder, builder.xor(seed, _int(_u32(counter_rng._B))))
    return _mix(builder, builder.xor(k1, stream)), _mix(builder, builder.add(k2, stream))


def _function(module, name, kinds, emit) -> ir.Function:
    """The module's function `name`, out of line: emitted where the module has none yet."""
    name = f"qkpipe_{name}"
    if name in module.globals:
        return module.globals[name]
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), kinds), name)
    function.linkage = "internal"
    function.attributes.add("noinline")
    builder = ir.IRBuilder(function.append_basic_block("entry"))
    emit(builder, *function.args)
    builder.ret_void()
    return function


def _emit_draws(builder, out, seed, point, tile, counter, step):
    """out[lane] = the draw of counter + lane * step in the stream of (point, tile)."""
    stream, _ = _stream_keys(builder, point, tile)
    k1, k2 = _stream_keys(builder, seed, stream)
    lanes = builder.mul(_iota(LANES), _splat(builder, step, LANES))
    h = builder.add(_splat(builder, counter, LANES), lanes)
    h = _mix(builder, builder.xor(h, _splat(builder, k1, LANES)))
    h = _mix(builder, builder.add(h, _splat(builder, k2, LANES)))
    builder.store(h, out)


def _rounder(builder, at, point, tile, step, width=LANES) -> Callable:
    """R of a rounding point: (vector, int64 counter of its first element) -> vector; the next one's is `step` on.

    `point`: a name, or an int64 value.
    """
    number = _int(POINTS[point], _SIZE) if isinstance(point, str) else point
    first = builder.add(builder.mul(number, _int(_FIELDS, _SIZE)), _int(_FIRST, _SIZE))
    fields = [builder.load(builder.gep(at, [builder.add(first, _int(n, _SIZE))])) for n in range(_FIELDS)]
    shift, offset, bit, keep = (_splat(builder, field, width) for field in fields[:4])
    stochastic, amplified = (builder.icmp_signed("!=", fields[n], _int(0)) for n in (4, 6))
    gain = _splat(builder, builder.bitcast(fields[5], _FLOAT), width)
    drop = builder.not_(keep)
    seed = builder.load(builder.gep(at, [_int(_SEED, _SIZE)]))
    increment = cgutils.alloca_once(builder, _vector(_INT, width))
    drawn = cgutils.alloca_once(builder, _vector(_INT, LANES))
    result = cgutils.alloca_once(builder, _vector(_FLOAT, width))
    draws = _function(builder.module, "draws", [drawn.type, *[_INT] * 5], _emit_draws)
    number, tile, step = (builder.trunc(n, _INT) for n in (number, tile, step))

    def rounded(x, counter):
        i = builder.bitcast(x, _vector(_INT, width))
        builder.store(builder.add(offset, builder.and_(builder.lshr(i, shift), bit)), increment)
        with builder.if_then(stochastic, likely=False):
            builder.call(draws, [drawn, seed, number, tile, builder.trunc(counter, _INT), step])
            u = builder.shuffle_vector(
                builder.load(drawn), ir.Constant(_vector(_INT, LANES), None), _iota(width)
            )
            builder.store(builder.and_(u, drop), increment)
        i = builder.and_(builder.add(i, builder.load(increment)), keep)
        r = builder.select(_is_nan(builder, x), x, builder.bitcast(i, x.type))
        builder.store(r, result)
        with builder.if_then(amplified, likely=False):
            y = builder.fadd(x, builder.fmul(builder.fsub(r, x), gain))
            finite = builder.fcmp_ordered("==", builder.fsub(r, r), _constant(r, 0.0))
            builder.store(builder.select(finite, y, r), result)
        return builder.load(result)

    return rounded


def _hidden(builder, hidden, k):
    """Which lanes do not see key k: those before hidden + k."""
    return builder.icmp_signed(
        "<", _iota(LANES), _splat(builder, builder.trunc(builder.add(hidden, k), _INT), LANES)
    )


def _sum(builder, width=LANES):
    """A running sum in float64: (add a float vector, or a double one; read)."""
    kind = _vector(_DOUBLE, width)
    total = cgutils.alloca_once(builder, kind)
    builder.store(ir.Constant(kind, None), total)

    def add(x):
        x = x if x.type == kind else _widened(builder, x)
        builder.store(builder.fadd(builder.load(total), x), total)

    return add, lambda: builder.load(total)


@contextmanager
def _each_key(builder, count) -> Iterator[tuple]:
    """A loop over keys: (key, place of its row of lanes)."""
    with cgutils.for_range(builder, count, intp=_SIZE) as loop:
        yield loop.index, builder.mul(loop.index, _int(LANES, _SIZE))


@contextmanager
def _each_chunk(builder, first, stop, columns) -> Iterator[tuple]:
    """A loop over rows first to stop, and over each one's chunks: (row, column, place)."""
    one, step = _int(1, _SIZE), _int(COLUMNS, _SIZE)
    with cgutils.for_range_slice(builder, first, stop, one, _SIZE) as (row, _):  # noqa: SIM117
        with cgutils.for_range_slice(builder, _int(0, _SIZE), columns, step, _SIZE) as (column, _):
            yield row, column, builder.add(builder.mul(row, columns), column)


def _kernel(emit) -> Callable:
    """An intrinsic from its emission `emit(builder, ...)`: arrays arrive as pointers, numbers as values."""

    def implementation(typing, *arguments):
        wanted = [a if isinstance(a, types.Array) else _scalar(a) for a in arguments]
        signature = types.void(*wanted)

        def codegen(context, builder, signature, args):
            values = [
                context.make_array(kind)(context, builder, arg).data if isinstance(kind, types.Array) else arg
                for kind, arg in zip(signature.args, args)
            ]
            kinds = [value.type for value in values]
            builder.call(_function(builder.module, emit.__name__.strip("_"), kinds, emit), values)
            return context.get_dummy_value()

        return signature, codegen

    implementation.__name__, implementation.__doc__ = emit.__name__, emit.__doc__
    implementation.__signature__ = inspect.signature(emit)
    return intrinsic(implementation)


def _scalar(kind):
    if isinstance(kind, types.Boolean):
        return types.boolean
    return types.float32 if isinstance(kind, types.Float) else types.intp


# Kernels over keys. `hidden` is the number of lanes, the first ones, that do not see the first key; every further
# key is hidden from one more. `counter` and `width` place the block's rows in the tensor of scores.


@_kernel
def forward_scores(builder, x_KL, s_KL, raw_KL, keep_raw, keys, scale, cap, hidden, at, counter, width):
    """[2, 3] float64 dots to scores S and, if asked for, to the scores before any rounding; -inf where hidden."""
    scale, capped = _splat(builder, scale, LANES), _capper(builder, cap)
    zero = _int(0, _SIZE)
    round_qk, round_s = (_rounder(builder, at, point, zero, width) for point in ("qk", "s"))
    with _each_key(builder, keys) as (k, row):
        x = _narrowed(builder, _load(builder, x_KL, row))
        unseen, masked, n = _hidden(builder, hidden, k), _constant(x, -np.inf), builder.add(counter, k)
        with builder.if_then(keep_raw):
            raw = builder.select(unseen, masked, capped(builder.fmul(x, scale))[0])
            _store(builder, raw, raw_KL, row)
        s = round_s(capped(builder.fmul(round_qk(x, n), scale))[0], n)
        _store(builder, builder.select(unseen, masked, s), s_KL, row)


@_kernel
def softmax_tile(builder, s_KL, first, stop, top_L, m_L, l_L, low_L, alpha_L, p_KL, compensated, hidden, first_lane,
                 at, tile, first_row, width):  # fmt: skip
    """[5 to 9, P operand of 10] One tile of keys, given its maximum: m, l and its compensation, alpha, P in float64."""
    one = _int(1, _SIZE)
    over_keys = {p: _rounder(builder, at, p, tile, width) for p in ("s_minus_m", "p", "p_operand")}
    over_lanes = {
        p: _rounder(builder, at, p, tile, one) for p in ("m", "m_step", "rescale", "block_sum", "l", "l_low")
    }
    m_old, l_old, low_old = (_load(builder, x) for x in (m_L, l_L, low_L))
    m = over_lanes["m"](_max_or_nan(builder, _load(builder, top_L), m_old), first_row)
    alpha = over_lanes["rescale"](
        _exp(builder, over_lanes["m_step"](builder.fsub(m_old, m), first_row)), first_row
    )
    counter = builder.mul(first_row, width)
    add, total = _sum(builder)
    with _each_key(builder, builder.sub(stop, first)) as (k, row):
        s = _load(builder, s_KL, builder.add(builder.mul(first, _int(LANES, _SIZE)), row))
        n = builder.add(counter, k)
        p = _exp(builder, over_keys["s_minus_m"](builder.fsub(s, m), n))
        p = over_keys["p"](p, n)
        p = builder.select(_hidden(builder, hidden, k), _constant(p, 0.0), p)
        add(p)
        _store(builder, _widened(builder, over_keys["p_operand"](p, n)), p_KL, row)
    b = over_lanes["block_sum"](_narrowed(builder, total()), first_row)
    scaled = builder.fmul(l_old, alpha)
    scaled = builder.select(
        _splat(builder, compensated, LANES), builder.fadd(scaled, builder.fmul(low_old, alpha)), scaled
    )
    whole = builder.fadd(scaled, b)
    l = over_lanes["l"](whole, first_row)
    low = over_lanes["l_low"](builder.fsub(whole, l), first_row)
    started = builder.icmp_signed(">=", _iota(LANES), _splat(builder, builder.trunc(first_lane, _INT), LANES))
    _store(builder, alpha, alpha_L)
    for new, old, target in ((m, m_old, m_L), (l, l_old, l_L), (low, low_old, low_L)):
        _store(builder, builder.select(started, new, old), target)


@_kernel
def exponentials(builder, raw_KL, top_L, keys, hidden, total_L, spread_L, e_KL):
    """[15] e = exp(raw - top) to float64, its sum, and its dot product with raw - top."""
    top = _load(builder, top_L)
    (add, total), (add_spread, spread) = _sum(builder), _sum(builder)
    with _each_key(builder, keys) as (k, row):
        below = builder.fsub(_load(builder, raw_KL, row), top)
        unseen, zero = _hidden(builder, hidden, k), _constant(below, 0.0)
        e = _widened(builder, builder.select(unseen, zero, _exp(builder, below)))
        add(e)
        add_spread(builder.fmul(e, _widened(builder, builder.select(unseen, zero, below))))
        _store(builder, e, e_KL, row)
    _store(builder, total(), total_L)
    _store(builder, spread(), spread_L)


@_kernel
def backward_probabilities(
    builder, x_KL, p_KL, slope_KL, lse_L, keys, scale, cap, hidden, at, counter, width
):
    """[18, 19] float64 dots to P, in float32 and in place; and the soft-cap's slope."""
    scale, lse, capped = _splat(builder, scale, LANES), _load(builder, lse_L), _capper(builder, cap)
    zero = _int(0, _SIZE)
    round_qk, round_s, round_p = (_rounder(builder, at, p, zero, width) for p in ("bwd_qk", "bwd_s", "bwd_p"))
    with _each_key(builder, keys) as (k, row):
        x = _narrowed(builder, _load(builder, x_KL, row))
        n = builder.add(counter, k)
        y, slope = capped(builder.fmul(round_qk(x, n), scale))
        _store(builder, slope, slope_KL, row)
        s = round_s(y, n)
        p = round_p(_exp(builder, builder.fsub(s, lse)), n)
        p = builder.select(_hidden(builder, hidden, k), _constant(p, 0.0), p)
        _store(builder, p, p_KL, row)
        _store(builder, _widened(builder, p), x_KL, row)


@_kernel
def probability_gradients(builder, x_KL, dp_KL, keys, hidden, at, counter, width):
    """[20] float64 dots to dP; 0 where hidden."""
    rounded = _rounder(builder, at, "dp", _int(0, _SIZE), width)
    with _each_key(builder, keys) as (k, row):
        dp = rounded(_narrowed(builder, _load(builder, x_KL, row)), builder.add(counter, k))
        dp = builder.select(_hidden(builder, hidden, k), _constant(dp, 0.0), dp)
        _store(builder, dp, dp_KL, row)


@_kernel
def score_gradients(builder, p_KL, dp_KL, delta_L, ds_KL, keys, hidden, total_L, size_L, at, counter, width):
    """[22] dS to float64; its row sums, and those of its sizes."""
    delta = _load(builder, delta_L)
    rounded = _rounder(builder, at, "ds", _int(0, _SIZE), width)
    (add, total), (add_size, size) = _sum(builder), _sum(builder)
    with _each_key(builder, keys) as (k, row):
        above = builder.fsub(_load(builder, dp_KL, row), delta)
        ds = rounded(builder.fmul(_load(builder, p_KL, row), above), builder.add(counter, k))
        ds = builder.select(_hidden(builder, hidden, k), _constant(ds, 0.0), ds)
        add(ds)
        add_size(_size(builder, ds))
        _store(builder, _widened(builder, ds), ds_KL, row)
    _store(builder, total(), total_L)
    _store(builder, size(), size_L)


@_kernel
def through_cap(builder, ds_KL, slope_KL, keys, hidden, at, counter, width):
    """[22] dS through the slope of the soft-cap, in float64 and in place."""
    rounded = _rounder(builder, at, "dx", _int(0, _SIZE), width)
    with _each_key(builder, keys) as (k, row):
        ds = _narrowed(builder, _load(builder, ds_KL, row))
        dx = rounded(builder.fmul(ds, _load(builder, slope_KL, row)), builder.add(counter, k))
        dx = builder.select(_hidden(builder, hidden, k), _constant(dx, 0.0), dx)
        _store(builder, _widened(builder, dx), ds_KL, row)


@_kernel
def max_over_keys(builder, x_KL, first, stop, out_L):
    """out[lane] = max of x[first : stop, lane]; NaN if any is."""
    top = cgutils.alloca_once(builder, _vector(_FLOAT, LANES))
    builder.store(ir.Constant(_vector(_FLOAT, LANES), [float("-inf")] * LANES), top)
    with _each_key(builder, builder.sub(stop, first)) as (_, row):
        x = _load(builder, x_KL, builder.add(builder.mul(first, _int(LANES, _SIZE)), row))
        builder.store(_max_or_nan(builder, x, builder.load(top)), top)
    _store(builder, builder.load(top), out_L)


@_kernel
def dot_and_sum_over_keys(builder, x_KL, y_KL, keys, dot_L, sum_L):
    """Sums of x y (exact products) and of x, in float64."""
    (add, total), (add_product, dot) = _sum(builder), _sum(builder)
    with _each_key(builder, keys) as (_, row):
        x, y = (_widened(builder, _load(builder, base, row)) for base in (x_KL, y_KL))
        add(x)
        add_product(builder.fmul(x, y))
    _store(builder, dot(), dot_L)
    _store(builder, total(), sum_L)


# Kernels over rows of `columns` numbers, of which a tensor keeps D; `counter` is the first row's.


def _place(builder, counter, row, D, column):
    return builder.add(builder.add(counter, builder.mul(row, D)), column)


@_kernel
def carry_rows(
    builder, pv_LD, acc_LD, low_LD, alpha_L, first_lane, columns, compensated, at, tile, counter, D
):
    """[10, 11] acc and its compensation, in place, from first_lane on."""
    one = _int(1, _SIZE)
    rounded = {p: _rounder(builder, at, p, tile, one, COLUMNS) for p in ("pv", "acc", "acc_low")}
    with _each_chunk(builder, first_lane, _int(LANES, _SIZE), columns) as (lane, column, place):
        alpha = _splat(builder, builder.load(builder.gep(alpha_L, [lane])), COLUMNS)
        n = _place(builder, counter, lane, D, column)
        pv = rounded["pv"](_narrowed(builder, _load(builder, pv_LD, place, COLUMNS)), n)
        scaled = builder.fmul(_load(builder, acc_LD, place, COLUMNS), alpha)
        with builder.if_else(compensated) as (pair, single):
            with pair:
                low = builder.fmul(_load(builder, low_LD, place, COLUMNS), alpha)
                whole = builder.fadd(builder.fadd(scaled, low), pv)
                acc = rounded["acc"](whole, n)
                _store(builder, acc, acc_LD, place)
                _store(builder, rounded["acc_low"](builder.fsub(whole, acc), n), low_LD, place)
            with single:
                _store(builder, rounded["acc"](builder.fadd(scaled, pv), n), acc_LD, place)


@_kernel
def divide_rows(builder, acc_LD, l_L, o_LD, out_LD, columns, at, tile, counter, D):
    """[12, 13] o = acc / l, and R_o(o)."""
    rounded = _rounder(builder, at, "o", tile, _int(1, _SIZE), COLUMNS)
    with _each_chunk(builder, _int(0, _SIZE), _int(LANES, _SIZE), columns) as (lane, column, place):
        l = _splat(builder, builder.load(builder.gep(l_L, [lane])), COLUMNS)
        o = builder.fdiv(_load(builder, acc_LD, place, COLUMNS), l)
        _store(builder, o, o_LD, place)
        _store(builder, rounded(o, _place(builder, counter, lane, D, column)), out_LD, place)


@_kernel
def widen_rows(builder, x_RD, wide_RD, rows, columns, point, at, counter, D):
    """[1, 16] R of a rounding point, in place and in float64."""
    rounded = _rounder(builder, at, point, _int(0, _SIZE), _int(1, _SIZE), COLUMNS)
    with _each_chunk(builder, _int(0, _SIZE), rows, columns) as (row, column, place):
        x = rounded(_load(builder, x_RD, place, COLUMNS), _place(builder, counter, row, D, column))
        _store(builder, x, x_RD, place)
        _store(builder, _widened(builder, x), wide_RD, place)


@_kernel
def narrow_rows(builder, wide_RD, x_RD, rows, columns, scale, point, at, counter, D):
    """[23 to 25] From float64: rounded to fp32, scaled, then R of a rounding point."""
    scale = _splat(builder, scale, COLUMNS)
    rounded = _rounder(builder, at, point, _int(0, _SIZE), _int(1, _SIZE), COLUMNS)
    with _each_chunk(builder, _int(0, _SIZE), rows, columns) as (row, column, place):
        x = builder.fmul(_narrowed(builder, _load(builder, wide_RD, place, COLUMNS)), scale)
        _store(builder, rounded(x, _place(builder, counter, row, D, column)), x_RD, place)


@_kernel
def round_rows(builder, x_RD, rows, columns, point, at, tile, counter, D):
    """R of a rounding point, in place."""
    rounded = _rounder(builder, at, point, tile, _int(1, _SIZE), COLUMNS)
    with _each_chunk(builder, _int(0, _SIZE), rows, columns) as (row, column, place):
        x = rounded(_load(builder, x_RD, place, COLUMNS), _place(builder, counter, row, D, column))
        _store(builder, x, x_RD, place)


@_kernel
def round_lanes(builder, x_L, point, at, tile, counter):
    """R of a rounding point on one number a row, in place."""
    rounded = _rounder(builder, at, point, tile, _int(1, _SIZE))
    _store(builder, rounded(_load(builder, x_L), counter), x_L)
