"""The compiled leading eigenpairs against LAPACK, on spectra that are hard for inverse iteration too."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qkpipe.numerics._numba import HAVE_NUMBA
from qkpipe.numerics.leading_eigen import leading_eigenpairs

pytestmark = pytest.mark.skipif(not HAVE_NUMBA, reason="numba is not installed")


def symmetric(values, seed=0):
    rng = np.random.default_rng(seed)
    Q = np.linalg.qr(rng.standard_normal((len(values), len(values))))[0]
    A = (Q * np.asarray(values, dtype=float)) @ Q.T
    return (A + A.T) / 2


def assert_pairs(A, k):
    values, vectors, ok = leading_eigenpairs(A[None].copy(), k)
    assert ok
    expected = np.linalg.eigvalsh(A)[::-1][:k]
    size = np.abs(A).sum(0).max()
    np.testing.assert_allclose(values[0], expected, rtol=0, atol=1e-13 * size)
    Z = vectors[0].T
    np.testing.assert_allclose(Z.T @ Z, np.eye(k), rtol=0, atol=1e-12)
    np.testing.assert_allclose(A @ Z, Z * values[0], rtol=0, atol=1e-11 * size)


@settings(max_examples=60, deadline=None)
@given(n=st.integers(1, 70), k=st.integers(1, 8), exponent=st.integers(-100, 100), seed=st.integers(0, 2**20))
def test_random_matrices(n, k, exponent, seed):
    A = np.random.default_rng(seed).standard_normal((n, n))
    assert_pairs((A + A.T) * 10.0**exponent, min(k, n))


@pytest.mark.parametrize(
    "A",
    [
        np.eye(20),
        np.diag(np.arange(20.0)),
        np.kron(np.eye(4), symmetric([5, 3, 1, 0.5])),
        symmetric([7, 7, 7, 7, 1, 1, 0, 0]),
        symmetric([4, 1, 0, 0, 0, 0]),
        symmetric([1, 1 - 1e-9, 1 - 2e-9, 1 - 1e-8, 0.5, 0.1]),
        symmetric([1, 1e-5, 1e-10, 1e-15, 0, 0]),
        np.diag(np.full(21, 2.0)) + np.diag(np.ones(20), 1) + np.diag(np.ones(20), -1),
        np.diag(np.abs(np.arange(-10.0, 11)))
        + np.diag(np.ones(20), 1)
        + np.diag(np.ones(20), -1),  # Wilkinson
        -np.ones((6, 6)),
    ],
    ids=[
        "identity",
        "diagonal",
        "blocks",
        "repeated",
        "rank-2",
        "clustered",
        "graded",
        "toeplitz",
        "W21+",
        "negative",
    ],
)
def test_hard_spectra(A):
    assert_pairs(A, 4)


def test_stack():
    stack = np.stack([symmetric(np.arange(12.0) + i, seed=i) for i in range(5)])
    values, _, ok = leading_eigenpairs(stack.copy(), 3)
    assert ok
    np.testing.assert_allclose(values, [[11.0 + i, 10.0 + i, 9.0 + i] for i in range(5)])


@pytest.mark.parametrize("fill", [0.0, np.nan, np.inf])
def test_what_it_cannot_do_it_says(fill):
    stack = np.stack([symmetric(np.arange(8.0)), np.full((8, 8), fill)])
    assert not leading_eigenpairs(stack, 2)[2]
