"""Leading eigenpairs of a small symmetric matrix, compiled: for a few pairs of 64x64 a third of LAPACK's
time.

The textbook route (Golub & Van Loan, *Matrix Computations*, 4th ed., sections 8.3 and 8.4): Householder
tridiagonalisation, the rank-2 update of one step fused with the product of the next so that the matrix is
read once a step; eigenvalues by Sturm counts, eight shifts at a time; eigenvectors by inverse iteration,
orthogonalised against those before; back-transformation. The caller checks ``ok``, which reports the residual
test, and has LAPACK to fall back on.
"""

from __future__ import annotations

import numpy as np

from qkpipe.numerics._numba import njit

_SHIFTS = 8
_SWEEPS = 13  # to 9^-13 of the range; the Rayleigh quotient of the vector squares that error
_TINY = 1e-290

# Sums may be reordered (never across runs: the compiled code is fixed), NaN and infinity keep their meaning.
_fast = njit(cache=True, nogil=True, error_model="numpy", fastmath={"reassoc", "contract", "nsz"})


@_fast
def _tridiagonalise(A, d, e, tau, X):
    """A (n, n) symmetric, destroyed, to diagonal d and off-diagonal e; reflector j is I - tau[j] X[j] X[j]'."""
    n = A.shape[0]
    p, w = np.zeros(n), np.zeros(n)
    u = np.zeros(n)
    for j in range(n - 1):
        row = A[j]
        for c in range(j, n):
            row[c] -= u[j] * w[c] + w[j] * u[c]
        d[j] = row[j]
        x = X[j]
        tail = 0.0
        for c in range(j + 2, n):
            tail += row[c] * row[c]
        first = row[j + 1]
        if tail == 0.0:
            tau[j], e[j] = 0.0, first
            x[j + 1 :] = 0.0
        else:
            beta = -np.copysign(np.sqrt(first * first + tail), first)
            tau[j], e[j] = (beta - first) / beta, beta
            inverse = 1.0 / (first - beta)
            for c in range(j + 2, n):
                x[c] = row[c] * inverse
            x[j + 1] = 1.0
        for c in range(j + 1, n):
            p[c] = 0.0
        for i in range(j + 1, n - 1, 2):  # two rows at a time, for half the loads
            row0, u0, w0, x0 = A[i], u[i], w[i], x[i]
            row1, u1, w1, x1 = A[i + 1], u[i + 1], w[i + 1], x[i + 1]
            corner = row0[i] - 2.0 * u0 * w0
            row0[i] = corner
            total0, total1 = corner * x0, 0.0
            for c in range(i + 1, n):
                uc, wc, xc = u[c], w[c], x[c]
                a0 = row0[c] - (u0 * wc + w0 * uc)
                a1 = row1[c] - (u1 * wc + w1 * uc)
                row0[c], row1[c] = a0, a1
                total0 += a0 * xc
                total1 += a1 * xc
                p[c] += a0 * x0 + a1 * x1
            p[i] += total0
            p[i + 1] += total1 - row1[i + 1] * x1
        if (n - 1 - j) % 2:
            A[n - 1, n - 1] -= 2.0 * u[n - 1] * w[n - 1]
            p[n - 1] += A[n - 1, n - 1] * x[n - 1]
        dot = 0.0
        for c in range(j + 1, n):
            p[c] *= tau[j]
            dot += p[c] * x[c]
        half = 0.5 * tau[j] * dot
        for c in range(j + 1, n):
            w[c] = p[c] - half * x[c]
            u[c] = x[c]
    d[n - 1] = A[n - 1, n - 1] - 2.0 * u[n - 1] * w[n - 1]


@_fast
def _eigenvalue(d, e2, index, low, high):
    """The eigenvalue with ``index`` larger ones, known to lie in [low, high]."""
    n = d.shape[0]
    shifts, q, count = np.empty(_SHIFTS), np.empty(_SHIFTS), np.empty(_SHIFTS)
    for _ in range(_SWEEPS):
        step = (high - low) / (_SHIFTS + 1)
        for s in range(_SHIFTS):
            shifts[s] = low + (s + 1) * step
            q[s], count[s] = 1.0, 0.0
        for i in range(n):
            coupling = e2[i]
            for s in range(_SHIFTS):
                value = d[i] - shifts[s] - coupling / q[s]
                value = value if abs(value) > _TINY else _TINY
                q[s] = value
                count[s] += 1.0 if value > 0.0 else 0.0
        for s in range(_SHIFTS):
            if count[s] > index:  # more than `index` eigenvalues lie above the shift
                low = max(low, shifts[s])
            else:
                high = min(high, shifts[s])
    return 0.5 * (low + high)


@_fast
def _solve(d, e, shift, z, smallest):
    """z <- (T - shift)^-1 z by elimination with row exchanges; pivots are kept off zero by ``smallest``."""
    n = d.shape[0]
    diagonal, upper, second = np.empty(n), np.zeros(n), np.zeros(n)
    pivot, above = d[0] - shift, e[0] if n > 1 else 0.0
    for i in range(n - 1):
        below, centre = e[i], d[i + 1] - shift
        right = e[i + 1] if i + 2 < n else 0.0
        if abs(below) > abs(pivot):
            factor = pivot / below
            diagonal[i], upper[i], second[i] = below, centre, right
            z[i], z[i + 1] = z[i + 1], z[i] - factor * z[i + 1]
            pivot, above = above - factor * centre, -factor * right
        else:
            if abs(pivot) < smallest:
                pivot = smallest
            factor = below / pivot
            diagonal[i], upper[i] = pivot, above
            z[i + 1] -= factor * z[i]
            pivot, above = centre - factor * above, right
    diagonal[n - 1] = pivot if abs(pivot) > smallest else smallest
    for i in range(n - 1, -1, -1):
        value = z[i]
        if i + 1 < n:
            value -= upper[i] * z[i + 1]
        if i + 2 < n:
            value -= second[i] * z[i + 2]
        z[i] = value / diagonal[i]


@_fast
def _leading(A, k, values, vectors):
    """One matrix: fills values (k,) and vectors (k, n), destroys A; False if a residual is not at rounding
    level.
    """
    n = A.shape[0]
    d, e, tau, X = np.empty(n), np.zeros(n), np.zeros(n), np.empty((n, n))
    _tridiagonalise(A, d, e, tau, X)
    e2 = np.zeros(n)
    low, high = d[0], d[0]
    for i in range(n):
        left = abs(e[i - 1]) if i > 0 else 0.0
        e2[i] = left * left
        reach = left + abs(e[i])
        low, high = min(low, d[i] - reach), max(high, d[i] + reach)
    size = max(abs(low), abs(high))
    Tz = np.empty(n)
    ok = True
    for index in range(k):
        # Off the eigenvalue by more than it is uncertain: all vectors of a repeated one then grow alike, and
        # orthogonalisation leaves more than rounding of the later ones.
        shift = _eigenvalue(d, e2, index, low, high) + 4e-12 * size
        z = vectors[index]
        for i in range(n):
            z[i] = 1.0 + 0.5 * np.sin(1.0 + i + 7.0 * index)
        for _ in range(4):
            _solve(d, e, shift, z, 2.3e-16 * size)
            for _twice in range(2):
                for other in range(index):
                    dot = 0.0
                    for i in range(n):
                        dot += vectors[other, i] * z[i]
                    for i in range(n):
                        z[i] -= dot * vectors[other, i]
                largest = 0.0
                for i in range(n):
                    largest = max(largest, abs(z[i]))
                square = 0.0
                for i in range(n):
                    z[i] /= largest
                    square += z[i] * z[i]
                inverse = 1.0 / np.sqrt(square)
                for i in range(n):
                    z[i] *= inverse
        quotient = 0.0
        for i in range(n):
            Tz[i] = d[i] * z[i]
            if i > 0:
                Tz[i] += e[i - 1] * z[i - 1]
            if i + 1 < n:
                Tz[i] += e[i] * z[i + 1]
            quotient += Tz[i] * z[i]
        values[index] = quotient
        worst = 0.0
        for i in range(n):
            worst += (Tz[i] - quotient * z[i]) ** 2
        ok = ok and worst <= (1e-13 * n * size) ** 2
    for index in range(k):
        z = vectors[index]
        for j in range(n - 2, -1, -1):
            x = X[j]
            dot = 0.0
            for i in range(j + 1, n):
                dot += x[i] * z[i]
            dot *= tau[j]
            for i in range(j + 1, n):
                z[i] -= dot * x[i]
    return ok


@_fast
def leading_eigenpairs(stack, k):
    """The k largest eigenvalues of each matrix of ``stack`` (B, n, n), float64, symmetric, destroyed.

    Returns values (B, k), descending, vectors (B, k, n), and ok: whether every residual is at rounding level.
    It is not for a matrix of zeros, or one that is not finite.
    """
    count, n = stack.shape[0], stack.shape[1]
    values, vectors = np.empty((count, k)), np.empty((count, k, n))
    ok = True
    for b in range(count):
        ok = _leading(stack[b], k, values[b], vectors[b]) and ok
    return values, vectors, ok
