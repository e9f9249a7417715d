"""Matrix product of two MXFP4 matrices on the tensor cores that take them (Blackwell): the native path of the
`operand` placement, where both operands of a weight gradient's product are quantized along the contracted axis.

Elsewhere Triton multiplies the same numbers, decoded to bfloat16, in which each is exact.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from qkpipe_kernels.launch import Launch, capability_of
from qkpipe_kernels.mx import BLOCK, pack_mxfp4
from qkpipe_kernels.rounding import HARDWARE_BF16

from qkpipe.errors import BadInput

_BLOCK_K = 128


@triton.jit
def _decode(codes, scales, ROWS: tl.constexpr, K: tl.constexpr):
    """fp32 (ROWS, K) of packed codes (ROWS, K/2) and scales (ROWS, K/32)."""
    code = tl.reshape(tl.join(codes & 15, codes >> 4), (ROWS, K)).to(tl.int32)
    magnitude = code & 7
    exponent = magnitude >> 1
    value = tl.where(
        exponent == 0,
        (magnitude & 1) * 0.5,
        (1.0 + (magnitude & 1) * 0.5) * ((1 << exponent) >> 1).to(tl.float32),
    )
    value = tl.where((code & 8) != 0, -value, value)
    byte = scales.to(tl.int32)
    scale = tl.maximum(byte << 23, 0x00400000).to(tl.float32, bitcast=True)
    scale = tl.where(byte == 255, float("nan"), scale)
    value = tl.reshape(value, (ROWS, K // 32, 32)) * tl.reshape(scale, (ROWS, K // 32, 1))
    return tl.reshape(value, (ROWS, K))


@triton.jit
def mxfp4_matmul(
    a_ptr, a_scale_ptr, b_ptr, b_scale_ptr, c_ptr, M, N, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """c (M, N) fp32 = a (M, K) b (N, K)'. Grid (blocks of M, blocks of N). K is a multiple of BLOCK_K."""
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    pair = tl.arange(0, BLOCK_K // 2)
    block = tl.arange(0, BLOCK_K // 32)
    a_at = a_ptr + m[:, None].to(tl.int64) * (K // 2) + pair[None, :]
    b_at = b_ptr + n[None, :].to(tl.int64) * (K // 2) + pair[:, None]
    a_scale_at = a_scale_ptr + m[:, None] * (K // 32) + block[None, :]
    b_scale_at = b_scale_ptr + n[:, None] * (K // 32) + block[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for _ in range(0, K, BLOCK_K):
        a = tl.load(a_at, mask=m[:, None] < M, other=0)
        b = tl.load(b_at, mask=n[None, :] < N, other=0)
        a_scale = tl.load(a_scale_at, mask=m[:, None] < M, other=0)
        b_scale = tl.load(b_scale_at, mask=n[:, None] < N, other=0)
        if HARDWARE_BF16:
            acc = tl.dot_scaled(a, a_scale, "e2m1", b, b_scale, "e2m1", acc)
        else:  # the interpreter has no scaled product
            a_32 = _decode(a, a_scale, BLOCK_M, BLOCK_K)
            acc += tl.dot(
                a_32, tl.trans(_decode(tl.trans(b), b_scale, BLOCK_N, BLOCK_K)), input_precision="ieee"
            )
        a_at += BLOCK_K // 2
        b_at += BLOCK_K // 2
        a_scale_at += BLOCK_K // 32
        b_scale_at += BLOCK_K // 32
    at = m[:, None].to(tl.int64) * N + n[None, :]
    tl.store(c_ptr + at, acc, mask=(m[:, None] < M) & (n[None, :] < N))


def mxfp4_gemm(
    a: torch.Tensor, a_scale: torch.Tensor, b: torch.Tensor, b_scale: torch.Tensor
) -> torch.Tensor:
    """a b' of two matrices from `pack_mxfp4`: a (M, K), b (N, K); fp32 (M, N), accumulated in fp32."""
    for name, codes, scales in (("a", a, a_scale), ("b", b, b_scale)):
        if codes.dtype != torch.uint8 or scales.dtype != torch.uint8:
            raise BadInput(f"{name}: dtypes {codes.dtype}, {scales.dtype}; allowed: torch.uint8")
        if scales.shape != (codes.shape[0], codes.shape[1] * 2 // BLOCK) or codes.shape[1] * 2 % _BLOCK_K:
            raise BadInput(
                f"{name}: {tuple(codes.shape)}, {tuple(scales.shape)}; allowed: (M, K/2), (M, K/32)"
            )
    if a.shape[1] != b.shape[1]:
        raise BadInput(f"a, b: {a.shape[1] * 2} and {b.shape[1] * 2} columns; allowed: equal numbers")
    launch = gemm_launch(a, a_scale, b, b_scale)
    launch.run()
    return launch.arguments["c_ptr"]


def gemm_launch(a, a_scale, b, b_scale, capability: int | None = None) -> Launch:
    """capability: of a's device by default; before 10.0 operands are decoded in registers, so blocks are smaller."""
    M, N, K = a.shape[0], b.shape[0], a.shape[1] * 2
    rows, columns = (128, 128) if (capability or capability_of(a.device)) >= 100 else (64, 64)
    arguments = {
        "a_ptr": a.contiguous(),
        "a_scale_ptr": a_scale.contiguous(),
        "b_ptr": b.contiguous(),
        "b_scale_ptr": b_scale.contiguous(),
        "c_ptr": torch.empty(M, N, device=a.device),
        "M": M,
        "N": N,
        "K": K,
        "BLOCK_M": rows,
        "BLOCK_N": columns,
        "BLOCK_K": _BLOCK_K,
    }
    grid = (triton.cdiv(M, rows), triton.cdiv(N, columns))
    return Launch(mxfp4_matmul, grid, arguments, {"num_warps": 4, "num_stages": 2, "enable_fp_fusion": True})


def weight_gradient(dy_NO: torch.Tensor, x_NI: torch.Tensor, *, scale_rule: str = "floor") -> torch.Tensor:
    """dy' x, (O, I) fp32, both operands MXFP4 with blocks along the tokens: the `operand` fault, natively."""
    a, b = (pack_mxfp4(t, axis=0, scale_rule=scale_rule) for t in (dy_NO, x_NI))
    return mxfp4_gemm(*a, *b)
