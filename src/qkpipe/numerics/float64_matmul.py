"""A float64 matrix product for compiled loops, with a defined order of summation.

BLAS and LLVM's own vectoriser either reorder a sum or leave it scalar. This micro-kernel keeps the order
(every element of the result is one chain over the contracted index, first to last) and vectorises over the
columns: 4 rows by
8 columns of running sums stay in registers, which saturates two fused multiply-adds a cycle on AVX2. It is emitted as
LLVM IR with vector types, so the same code serves SSE, NEON and AVX-512.
"""

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

COLUMNS = 8  # the number of columns must be a multiple of it
_ROWS = 4
_SIZE = ir.IntType(64)
_VECTOR = ir.VectorType(ir.DoubleType(), COLUMNS)
_LANE_0 = ir.Constant(ir.VectorType(ir.IntType(32), COLUMNS), None)
# Lets LLVM fuse a*b + c where the CPU can. The caller's operands must make products exact (fp32 values do), so
# that fused and unfused agree in every bit.
_FUSABLE = ("contract",)


@intrinsic
def matmul(typing, c, c0, c_row, a, a0, a_row, a_k, b, b0, b_k, rows, columns, depth, accumulate):
    """c[i, j] (+)= sum_k a[i, k] b[k, j] with k rising, in flat float64 arrays.

    c[i, j] is c[c0 + i c_row + j], a[i, k] is a[a0 + i a_row + k a_k], b[k, j] is b[b0 + k b_k + j]; i <
    rows, j < columns (a multiple of `COLUMNS`), k < depth. The sum starts from c if `accumulate`, else from
    +0. Nothing is checked.
    """
    sizes = [types.intp] * 3
    signature = types.void(c, *sizes[:2], a, *sizes, b, *sizes[:2], *sizes, types.boolean)

    def codegen(context, builder, signature, args):
        def pointer(array, offset):
            data = context.make_array(signature.args[array])(context, builder, args[array]).data
            return builder.gep(data, [args[offset]])

        c, a, b = pointer(0, 1), pointer(3, 4), pointer(7, 8)
        function = _kernel(builder.module, c.type)
        _, _, c_row, _, _, a_row, a_k, _, _, b_k, rows, columns, depth, accumulate = args
        builder.call(function, [c, c_row, a, a_row, a_k, b, b_k, rows, columns, depth, accumulate])
        return context.get_dummy_value()

    return signature, codegen


def _kernel(module: ir.Module, pointer: ir.Type) -> ir.Function:
    """The kernel as a function of the module, emitted at its first use there."""
    name = "qkpipe_float64_matmul"
    if name in module.globals:
        return module.globals[name]
    arguments = [pointer, _SIZE, pointer, _SIZE, _SIZE, pointer, *[_SIZE] * 4, ir.IntType(1)]
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), arguments), name)
    function.linkage = "internal"
    function.attributes.add("noinline")
    _, _, _, _, _, _, _, rows, columns, _, _ = function.args
    builder = ir.IRBuilder(function.append_basic_block("entry"))
    sums = [cgutils.alloca_once(builder, _VECTOR) for _ in range(_ROWS)]  # LLVM keeps them in registers
    whole = builder.and_(rows, ir.Constant(_SIZE, -_ROWS))
    for first, stop, height in ((ir.Constant(_SIZE, 0), whole, _ROWS), (whole, rows, 1)):
        with cgutils.for_range_slice(builder, first, stop, ir.Constant(_SIZE, height), _SIZE) as (row, _):
            zero, step = ir.Constant(_SIZE, 0), ir.Constant(_SIZE, COLUMNS)
            with cgutils.for_range_slice(builder, zero, columns, step, _SIZE) as (column, _):
                _emit_tile(builder, function.args, row, column, sums[:height])
    builder.ret_void()
    return function


def _emit_tile(builder: ir.IRBuilder, args, row, column, sums: list) -> None:
    """c[row : row + len(sums), column : column + COLUMNS]."""
    c, c_row, a, a_row, a_k, b, b_k, _, _, depth, accumulate = args
    row_numbers = [builder.add(row, ir.Constant(_SIZE, r)) for r in range(len(sums))]

    def vector_at(base, index):
        return builder.bitcast(builder.gep(base, [index]), _VECTOR.as_pointer())

    targets = [vector_at(c, builder.add(builder.mul(r, c_row), column)) for r in row_numbers]
    for total in sums:
        builder.store(ir.Constant(_VECTOR, None), total)
    with builder.if_then(accumulate):
        for total, target in zip(sums, targets):
            builder.store(builder.load(target, align=8), total)
    with cgutils.for_range(builder, depth, intp=_SIZE) as loop:
        right = builder.load(vector_at(b, builder.add(builder.mul(loop.index, b_k), column)), align=8)
        for total, r in zip(sums, row_numbers):
            at = builder.add(builder.mul(r, a_row), builder.mul(loop.index, a_k))
            left = _broadcast(builder, builder.load(builder.gep(a, [at])))
            product = builder.fmul(left, right, flags=_FUSABLE)
            builder.store(builder.fadd(builder.load(total), product, flags=_FUSABLE), total)
    for total, target in zip(sums, targets):
        builder.store(builder.load(total), target, align=8)


def _broadcast(builder: ir.IRBuilder, scalar):
    undefined = ir.Constant(_VECTOR, ir.Undefined)
    first = builder.insert_element(undefined, scalar, ir.Constant(ir.IntType(32), 0))
    return builder.shuffle_vector(first, undefined, _LANE_0)
