"""Leading singular triplets at the price of a few thin products; the spectral norm of the QK form.

Spectra are watched while training, so a full SVD (O(n^3)) is out of proportion: weights move little between
two looks, and the leading singular space moves less still. :func:`leading_triplets` starts from the previous
space, multiplies, applies Rayleigh-Ritz, and stops on a residual test; where there is no previous space, or
the test cannot be met, it solves the full problem in float64. Small matrices are always solved directly.

Error estimate (second-order perturbation theory; Stewart & Sun, *Matrix Perturbation Theory*, 1990, ch. V).
Rayleigh-Ritz makes each residual r_i = W'u_i - s_i v_i orthogonal to the block, so to second order the true
value differs from the Ritz value by at most |r_i|^2 / (s_i - s_out), s_out being the largest singular value
outside the block; the smallest Ritz value of the block stands for s_out. |r_i| alone is a first-order bound
that needs no gap.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

from qkpipe.errors import BadInput
from qkpipe.lazy import torch
from qkpipe.numerics._numba import HAVE_NUMBA
from qkpipe.numerics.leading_eigen import leading_eigenpairs

if TYPE_CHECKING:
    from torch import Tensor

# Relative error of sigma at which the iteration stops: a fifth of the promised 1e-4, since the estimate is
# asymptotic.
SIGMA_TOLERANCE = 2e-5
# Products run in the dtype of W: in fp32 their rounding, about 1e-7 of the largest value, leaves 1e-4 of a
# value only down to this fraction of the largest. (A Gram matrix in float64 still has 10 digits there.) Below
# it the float64 SVD takes over.
_SMALLEST_RATIO = 1e-3
# Up to this shorter side the Gram eigenproblem costs less than the passes of the iteration, and needs no state.
_DIRECT_UP_TO = 96
# Up to this many pairs the compiled eigenproblem is the faster one (64x64, k = 3: 0.11 ms, LAPACK 0.33).
_COMPILED_UP_TO = 8
_OVERSAMPLING = 13


@cache
def _sentinel(n: int) -> Tensor:
    """A fixed random unit vector (n, 1): it lets in directions of which the previous space knows nothing."""
    g = torch.randn(n, 1, generator=torch.Generator().manual_seed(n), dtype=torch.float64)
    return g / g.norm()


def leading_triplets(
    W: Tensor, k: int, state: Tensor | None = None, *, tolerance: float = SIGMA_TOLERANCE
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The k largest singular values of W and their vectors, ``(U, S, V, state)``: W v_i = s_i u_i.

    Shapes: W (..., m, n), any float dtype; float64 U (..., m, k), S (..., k) descending and V (..., n, k). U
    and V have orthonormal columns to float64 accuracy. A stack of matrices is iterated as one batch.

    Pass the returned ``state`` (float64, (..., n, block)) back on the next call for about the same W;
    ``None`` starts cold, with a float64 factorisation, and is deterministic. ``state`` stays None where W is
    so small (shorter side up to 96) or k so large that the factorisation is always taken: such results depend
    on W alone. The bits of a warm result depend on the state, so a resumable caller saves it.

    Accuracy: relative error of each value below five times ``tolerance`` (an estimate: module docstring), for
    values above 1e-3 of the largest; smaller ones come from the float64 SVD. A matrix that holds NaN or
    infinity gives NaN triplets. Two limits of a warm start: within a cluster of values equal to ``tolerance``
    the vectors are one of many equivalent bases; and a *new* direction, orthogonal to everything iterated so
    far, that overtakes s_k by little may take a few calls to appear (a random column in every block finds a
    large one at once).

    Raises BadInput unless 1 <= k <= min(m, n).
    """
    m, n = W.shape[-2:]
    shortest = min(m, n)
    if not 1 <= k <= shortest:
        raise BadInput(f"k: {k} is not allowed for a {m}x{n} matrix: 1 to {shortest}")
    width = k + _OVERSAMPLING
    W = W.detach()
    if W.dtype not in (torch.float32, torch.float64):
        W = W.float()
    if shortest <= _DIRECT_UP_TO or 2 * width > shortest:
        return *_direct(W, k), None
    if state is not None:
        found = _iterate(W, k, state, tolerance, passes=4 + shortest // 32)
        if found is not None:
            return found
    U, S, V = _direct(W, width)
    return U[..., :k], S[..., :k], V[..., :k], V.nan_to_num()


def _gram(W: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``(W64, W64'W64, scale, broken)``: W = scale * W64 in float64, zeros where W is ``broken`` (holds NaN
    or infinity).

    The squares of any fp32 number fit into float64, so only float64 input needs a scale. scale and broken:
    (..., 1, 1).
    """
    W64, scale = W.double(), torch.ones(*W.shape[:-2], 1, 1, dtype=torch.float64, device=W.device)
    if W.dtype == torch.float64:
        largest = W.abs().amax((-2, -1), keepdim=True)
        scale = torch.where(largest.isfinite() & (largest > 0), largest, scale)
        W64 = W64 / scale
    gram = W64.mT @ W64
    broken = ~gram.sum((-2, -1), keepdim=True).isfinite()
    if broken.any():
        W64, gram = W64.masked_fill(broken, 0.0), gram.masked_fill(broken, 0.0)
    return W64, gram, scale, broken


def _direct(W: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """The k leading triplets in float64: from the smaller Gram matrix, or by SVD where that loses digits."""
    if W.shape[-2] < W.shape[-1]:
        V, S, U = _direct(W.mT, k)
        return U, S, V
    W64, gram, scale, broken = _gram(W)
    squares, V = _leading_eigenpairs(gram, k)
    S = squares.clamp_min(0.0).sqrt()
    if (S[..., -1] > _SMALLEST_RATIO * S[..., 0]).all():
        U = W64 @ V / S[..., None, :]
    else:
        U, S, Vh = torch.linalg.svd(W64, full_matrices=False)
        U, S, V = U[..., :k], S[..., :k], Vh.mT[..., :k]
    S = (S * scale[..., 0]).masked_fill(broken[..., 0], math.nan)
    return U.masked_fill(broken, math.nan), S, V.masked_fill(broken, math.nan)


def _leading_eigenpairs(gram: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest eigenvalues (..., k), descending, and eigenvectors (..., n, k) of float64 ``gram``."""
    n = gram.shape[-1]
    if HAVE_NUMBA and gram.device.type == "cpu" and n <= _DIRECT_UP_TO and k <= _COMPILED_UP_TO:
        stack = gram.reshape(-1, n, n).clone(memory_format=torch.contiguous_format)
        values, vectors, ok = leading_eigenpairs(stack.numpy(), k)
        if ok:
            shape = gram.shape[:-2]
            return torch.from_numpy(values).view(*shape, k), torch.from_numpy(vectors).view(*shape, k, n).mT
    values, vectors = torch.linalg.eigh(gram)
    return values[..., -k:].flip(-1), vectors[..., -k:].flip(-1)


def _iterate(
    W: Tensor, k: int, state: Tensor, tolerance: float, passes: int
) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
    """Block iteration on W'W from ``state``; None where it does not meet the residual test in ``passes``."""
    block = torch.cat([state[..., :-1], state[..., -1:] + _sentinel(W.shape[-1]).to(state.device)], -1)
    for _ in range(passes):
        Q = torch.linalg.qr(block).Q
        B = (W @ Q.to(W.dtype)).double()
        gram = B.mT @ B
        if not math.isfinite(gram.sum()):
            return None
        values, P = torch.linalg.eigh(gram)
        s = values.flip(-1).clamp_min(0.0).sqrt()
        if not (s[..., k - 1] > _SMALLEST_RATIO * s[..., 0]).all():
            return None
        P = P.flip(-1)
        V = Q @ P
        U = B @ P / s[..., None, :].clamp_min(torch.finfo(torch.float64).tiny)
        block = (U.mT.to(W.dtype) @ W).mT.double()
        if not math.isfinite(block.sum()):
            return None
        wanted = s[..., :k]
        residual = (block[..., :k] - V[..., :k] * wanted[..., None, :]).norm(dim=-2)
        gap = (wanted - s[..., -2, None]).clamp_min(torch.finfo(torch.float64).tiny)
        error = torch.minimum(residual, residual**2 / gap)
        # |W'u_j| is a lower bound on a singular value orthogonal to the wanted ones: above s_k, one is
        # missing from them.
        missed = block[..., k:].norm(dim=-2).amax(-1) > s[..., k - 1] * (1 + tolerance)
        if bool((error <= tolerance * wanted).all()) and not bool(missed.any()):
            return U[..., :k], wanted, V[..., :k], block / s[..., :1, None]
    return None


def leading_values_batched(
    matrices: Sequence[Tensor], k: int, state: list[Tensor | None] | None = None
) -> tuple[Tensor, list[Tensor | None]]:
    """The k largest singular values of each of N matrices: ``(values, state)``, values (N, k) in float64.

    Small matrices (shorter side up to 96) share one batched float64 Gram eigenproblem a size: exact to
    1e-8 of the largest value, stateless. Larger ones are followed as in :func:`leading_triplets`, with
    one state each. NaN where a matrix is not finite. Raises BadInput if k exceeds the shorter side of
    any.
    """
    shortest = [min(W.shape) for W in matrices]
    if k < 1 or k > min(shortest):
        raise BadInput(
            f"k: {k} is not allowed for matrices with a shorter side of {min(shortest)}: 1 to {min(shortest)}"
        )
    state = list(state) if state is not None else [None] * len(matrices)
    values = torch.empty(len(matrices), k, dtype=torch.float64, device=matrices[0].device)
    by_size: dict[tuple[int, int], list[int]] = {}
    for index, W in enumerate(matrices):
        if shortest[index] <= _DIRECT_UP_TO:
            by_size.setdefault((max(W.shape), min(W.shape)), []).append(index)
        else:
            _, values[index], _, state[index] = leading_triplets(W, k, state[index])
    for (tall, short), members in by_size.items():
        stack = torch.stack(
            [W if W.shape == (tall, short) else W.mT for W in (matrices[i].detach() for i in members)]
        )
        _, gram, scale, broken = _gram(stack)
        squares = torch.linalg.eigvalsh(gram)[..., -k:].flip(-1).clamp_min(0.0)
        values[members] = (squares.sqrt() * scale[..., 0]).masked_fill(broken[..., 0], math.nan)
    return values, state


def sigma_qk_max(
    W_Q: Tensor, W_K: Tensor, n_heads: int, n_kv_heads: int, gain: Tensor | None = None
) -> Tensor:
    """Largest singular value, over heads, of the QK form W_Q^h' W_K^h (d_model x d_model).

    W_Q (..., n_heads * d_head, d_model) and W_K (..., n_kv_heads * d_head, d_model) as torch stores them;
    leading axes (layers) are a batch, and the shape of the float64 result. ``gain`` (..., d_model) of the
    normalisation before attention scales the columns of both, so this is the form that acts on normalised
    inputs. Unlike sigma(W_Q) it does not change when W_Q grows and W_K shrinks. With grouped-query heads
    query head h meets key head h // (n_heads / n_kv_heads). The logit scale is not included.

    Only d_head x d_head problems are solved: with W_K^h' = Q R the value is that of R W_Q^h. NaN if a weight
    is not finite.
    """
    if (
        n_heads % n_kv_heads
        or W_Q.shape[-2] % n_heads
        or W_K.shape[-2] * n_heads != W_Q.shape[-2] * n_kv_heads
    ):
        raise BadInput(
            f"n_heads: {n_heads} query heads (and {n_kv_heads} key heads) are not allowed: they must divide "
            f"{W_Q.shape[-2]} (and {W_K.shape[-2]}) rows into heads of one size"
        )
    q, k = W_Q.detach().double(), W_K.detach().double()
    if gain is not None:
        q, k = q * gain.detach().double()[..., None, :], k * gain.detach().double()[..., None, :]
    q = q.unflatten(-2, (n_heads, -1))
    R = torch.linalg.qr(k.unflatten(-2, (n_kv_heads, -1)).mT, mode="r").R
    form = R.repeat_interleave(n_heads // n_kv_heads, dim=-3) @ q
    scale = form.abs().amax(
        (-2, -1), keepdim=True
    )  # the square of a product of two large weights may overflow
    form = form / torch.where(scale == 0, 1.0, scale)
    gram = form @ form.mT
    broken = ~gram.sum((-2, -1)).isfinite()
    largest = (
        torch.linalg.eigvalsh(gram.masked_fill(broken[..., None, None], 0.0))[..., -1].clamp_min(0.0).sqrt()
    )
    return (largest * scale[..., 0, 0]).masked_fill(broken, math.nan).amax(-1)
