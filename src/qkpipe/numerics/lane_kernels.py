"""Operations along the lanes of a block, emitted as LLVM IR with vector types.

A block of scores x_KL holds one row of `LANES` neighbours a key. LLVM unrolls so short a loop before its vectoriser
sees it, and then finds no proof that the arrays do not overlap: it stays scalar. Here each row is one vector value,
and running results stay in registers. Arrays are contiguous, float32 unless said otherwise; nothing is checked.
"""

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

LANES = 16
_SIZE = ir.IntType(64)
_F32 = ir.VectorType(ir.FloatType(), LANES)
_F64 = ir.VectorType(ir.DoubleType(), LANES)


def _pointer(context, builder, array_type, array, vector):
    data = context.make_array(array_type)(context, builder, array).data
    return builder.bitcast(data, vector.as_pointer())


def _fold(initial, step, vector):
    """An intrinsic: out[lane] = step(... step(initial, x[first], y[first]) ..., x[stop - 1], y[stop - 1])."""

    @intrinsic
    def fold(typing, x_KL, y_KL, first, stop, out_L):
        signature = types.void(x_KL, y_KL, types.intp, types.intp, out_L)

        def codegen(context, builder, signature, args):
            x, y, out = (
                _pointer(context, builder, signature.args[n], args[n], kind)
                for n, kind in ((0, _F32), (1, _F32), (4, vector))
            )
            first, stop = args[2:4]
            total = cgutils.alloca_once(builder, vector)
            builder.store(ir.Constant(vector, [initial] * LANES), total)
            with cgutils.for_range_slice(builder, first, stop, ir.Constant(_SIZE, 1), _SIZE) as (k, _):
                rows = (builder.load(builder.gep(p, [k]), align=4) for p in (x, y))
                builder.store(step(builder, builder.load(total), *rows), total)
            builder.store(builder.load(total), out, align=4)
            return context.get_dummy_value()

        return signature, codegen

    return fold


def _max_or_nan(builder, top, x, _):
    above, nan = builder.fcmp_ordered(">", x, top), builder.fcmp_unordered("uno", x, x)
    return builder.select(builder.or_(above, nan), x, top)


def _add(builder, total, x, _):
    return builder.fadd(total, builder.fpext(x, _F64))


def _add_size(builder, total, x, _):
    size = builder.select(builder.fcmp_ordered("<", x, ir.Constant(_F32, [0.0] * LANES)), builder.fneg(x), x)
    return builder.fadd(total, builder.fpext(size, _F64))


def _add_product(builder, total, x, y):
    return builder.fadd(total, builder.fmul(builder.fpext(x, _F64), builder.fpext(y, _F64)))


max_over_keys = _fold(float("-inf"), _max_or_nan, _F32)  # of x; NaN if any is
sum_over_keys = _fold(0.0, _add, _F64)  # of x, in float64
sum_sizes_over_keys = _fold(0.0, _add_size, _F64)  # of |x|, in float64
dot_over_keys = _fold(0.0, _add_product, _F64)  # of x y, in float64 (exact products)


@intrinsic
def subtract_row(typing, x_KL, first, keys, row_L, out_KL):
    """out[k] = x[first + k] - row for k < keys; out may be x if first is 0."""
    signature = types.void(x_KL, types.intp, types.intp, row_L, out_KL)

    def codegen(context, builder, signature, args):
        x, row, out = (_pointer(context, builder, signature.args[n], args[n], _F32) for n in (0, 3, 4))
        first, keys = args[1:3]
        row = builder.load(row, align=4)
        with cgutils.for_range(builder, keys, intp=_SIZE) as loop:
            value = builder.load(builder.gep(x, [builder.add(first, loop.index)]), align=4)
            builder.store(builder.fsub(value, row), builder.gep(out, [loop.index]), align=4)
        return context.get_dummy_value()

    return signature, codegen
