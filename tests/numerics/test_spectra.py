"""Leading singular triplets, their batched values and the QK form, against the float64 SVD."""

import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qkpipe.errors import BadInput
from qkpipe.numerics.spectra import leading_triplets, leading_values_batched, sigma_qk_max


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def orthonormal(n, k, seed):
    return torch.linalg.qr(torch.randn(n, k, generator=generator(seed), dtype=torch.float64)).Q


def with_spectrum(values, m, n, seed=0):
    """An m x n fp32 matrix with these singular values (to fp32 rounding)."""
    k = len(values)
    values = torch.as_tensor(values, dtype=torch.float64)
    return ((orthonormal(m, k, seed) * values) @ orthonormal(n, k, seed + 1).T).float()


def trained_like(m, n, seed=0):
    """A bulk of random singular values below a few larger ones, as trained projections have."""
    bulk = torch.randn(m, n, generator=generator(seed)) / max(m, n) ** 0.5
    return bulk + with_spectrum(torch.linspace(6.0, 2.5, 8), m, n, seed + 1)


def reference(W, k):
    return torch.linalg.svdvals(W.double())[..., :k]


def assert_triplets(W, U, S, V, rtol=1e-4, atol=0.0):
    torch.testing.assert_close(S, reference(W, S.shape[-1]), rtol=rtol, atol=atol)
    eye = torch.eye(S.shape[-1], dtype=torch.float64).expand(*S.shape, -1)
    torch.testing.assert_close(U.mT @ U, eye, rtol=0, atol=1e-9)
    torch.testing.assert_close(V.mT @ V, eye, rtol=0, atol=1e-9)
    # The residual of a triplet is the root of its value's error, in units of the largest value.
    largest = S[..., :1, None].clamp_min(1e-300)
    assert ((W.double() @ V - U * S[..., None, :]) / largest).abs().max() < 1e-5
    assert ((W.double().mT @ U - V * S[..., None, :]) / largest).abs().max() < 2e-2


@pytest.mark.parametrize("shape", [(64, 64), (64, 256), (256, 64), (5, 3), (1, 1), (300, 260), (260, 300)])
def test_cold_start_is_the_svd_and_deterministic(shape):
    W = torch.randn(shape, generator=generator())
    k = min(3, *shape)
    first, second = leading_triplets(W, k), leading_triplets(W, k)
    assert_triplets(W, *first[:3], rtol=1e-9)
    assert all(torch.equal(a, b) for a, b in zip(first[:3], second[:3]))


@pytest.mark.parametrize("shape", [(256, 256), (128, 320), (320, 128)])
def test_warm_start_follows_a_drifting_weight(shape):
    W = trained_like(*shape)
    state = leading_triplets(W, 3)[3]
    g = generator(7)
    pull = with_spectrum([1.0], *shape, seed=11)  # a direction that grows from nothing to the largest of all
    for _ in range(25):
        W = W + 0.01 * torch.randn(shape, generator=g) / max(shape) ** 0.5 + 0.4 * pull
        U, S, V, state = leading_triplets(W, 3, state)
        assert_triplets(W, U, S, V)
    assert S[0] > 9


def test_a_warm_start_takes_a_pass_not_a_factorisation(monkeypatch):
    W = trained_like(256, 256)
    state = leading_triplets(W, 3)[3]
    monkeypatch.setattr(torch.linalg, "svd", lambda *_, **__: pytest.fail("fell back"))
    monkeypatch.setattr("qkpipe.numerics.spectra._direct", lambda *_: pytest.fail("fell back"))
    W = W + 1e-3 * trained_like(256, 256, 5)
    assert_triplets(W, *leading_triplets(W, 3, state)[:3])


@pytest.mark.parametrize(
    "values",
    [
        [5.0, 5.0, 5.0, 5.0] + [1.0] * 100,  # repeated across the cut at k = 3
        [2.0] * 256,  # all equal
        [3.0, 2.0, 1.0001, 1.0] + [0.9999] * 100,  # clustered
        [4.0, 2.0] + [0.0] * 100,  # rank 2
        [4.0, 2.0, 1e-9],  # beyond fp32's reach
        [1e30, 5e29, 2e29] + [1e28] * 50,
        [1e-30, 5e-31, 2e-31] + [1e-32] * 50,
        [0.0],
    ],
    ids=["repeated", "equal", "clustered", "rank-2", "tiny-third", "huge", "tiny", "zero"],
)
def test_hard_spectra_cold_and_warm(values):
    W = with_spectrum(values, 256, 256)
    state = None
    for _ in range(4):
        U, S, V, state = leading_triplets(W, 3, state)
        assert_triplets(W, U, S, V, atol=1e-7 * max(values))


def test_a_new_leading_direction_orthogonal_to_the_state_is_found():
    values = torch.linspace(10, 1, 256)
    W = torch.diag(values)
    state = leading_triplets(W, 3)[3]
    W[200, 200] = 100.0
    assert_triplets(W, *leading_triplets(W, 3, state)[:3])


def test_stack_equals_its_members():
    W = torch.stack([trained_like(64, 64, seed) for seed in range(3)])
    U, S, V, state = leading_triplets(W, 3)
    assert state is None
    assert_triplets(W, U, S, V, rtol=1e-9)
    W = torch.stack([trained_like(128, 128, seed) for seed in range(2)])
    state = leading_triplets(W, 3)[3]
    W = W * 1.01
    assert_triplets(W, *leading_triplets(W, 3, state)[:3])


@pytest.mark.parametrize("k", [1, 20, 40])
def test_any_k(k):
    W = torch.randn(40, 50, generator=generator())
    assert_triplets(W, *leading_triplets(W, k)[:3], rtol=1e-9)


@pytest.mark.parametrize("k", [0, 41])
def test_k_out_of_range(k):
    with pytest.raises(BadInput, match="1 to 40"):
        leading_triplets(torch.zeros(40, 50), k)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("size", [32, 128])
def test_not_finite_gives_nan_and_recovers(bad, size):
    W = torch.stack([trained_like(size, size), trained_like(size, size, 3)])
    _, _, _, state = leading_triplets(W, 3)
    broken = W.clone()
    broken[0, 1, 2] = bad
    U, S, V, state = leading_triplets(broken, 3, state)
    assert S[0].isnan().all() and U[0].isnan().all() and V[0].isnan().all()
    torch.testing.assert_close(S[1], reference(W[1], 3), rtol=1e-4, atol=0)
    assert_triplets(W, *leading_triplets(W, 3, state)[:3])


@settings(max_examples=40, deadline=None)
@given(m=st.integers(1, 40), n=st.integers(1, 40), exponent=st.integers(-37, 37), seed=st.integers(0, 2**20))
def test_random_shapes_and_scales(m, n, exponent, seed):
    W = torch.randn(m, n, generator=generator(seed)) * 10.0**exponent
    k = min(m, n)
    U, S, V, _ = leading_triplets(W, k)
    assert_triplets(W, U, S, V, atol=1e-7 * reference(W, 1).item())


def test_values_batched_mixed_shapes():
    shapes = [(64, 64), (256, 64), (64, 256), (64, 64), (130, 128), (3, 7)]
    matrices = [torch.randn(shape, generator=generator(i)) * 10.0**i for i, shape in enumerate(shapes)]
    values, state = leading_values_batched(matrices, 3)
    for row, W in zip(values, matrices):
        torch.testing.assert_close(row, reference(W, 3), rtol=1e-6, atol=0)
    again, _ = leading_values_batched(matrices, 3, state)
    torch.testing.assert_close(again, values, rtol=1e-4, atol=0)


def test_values_batched_degenerate():
    broken = torch.ones(8, 8)
    broken[0, 0] = float("nan")
    values, _ = leading_values_batched([torch.zeros(8, 8), broken, torch.full((8, 8), 1e38)], 2)
    assert values[0].tolist() == [0.0, 0.0]
    assert values[1].isnan().all()
    torch.testing.assert_close(values[2, 0].item(), 8e38, rtol=1e-6, atol=0)
    with pytest.raises(BadInput, match="1 to 3"):
        leading_values_batched([torch.zeros(8, 3)], 4)


@pytest.mark.parametrize("heads, kv_heads", [(2, 2), (4, 2), (4, 1), (1, 1)])
@pytest.mark.parametrize("with_gain", [False, True])
def test_sigma_qk_max(heads, kv_heads, with_gain):
    d_model, d_head, layers = 24, 6, 3
    W_Q = torch.randn(layers, heads * d_head, d_model, generator=generator(1))
    W_K = torch.randn(layers, kv_heads * d_head, d_model, generator=generator(2))
    gain = torch.rand(layers, d_model, generator=generator(3)) * 3 if with_gain else None
    expected = torch.zeros(layers, dtype=torch.float64)
    scale = gain.double() if with_gain else torch.ones(layers, d_model, dtype=torch.float64)
    for layer in range(layers):
        for h in range(heads):
            g = h // (heads // kv_heads)
            form = (
                W_Q[layer, h * d_head : (h + 1) * d_head].double().T
                @ W_K[layer, g * d_head : (g + 1) * d_head].double()
            )
            form = torch.diag(scale[layer]) @ form @ torch.diag(scale[layer])
            expected[layer] = max(expected[layer], torch.linalg.matrix_norm(form, 2))
    torch.testing.assert_close(sigma_qk_max(W_Q, W_K, heads, kv_heads, gain), expected, rtol=1e-10, atol=0)


def test_sigma_qk_max_invariance_and_degenerate():
    W_Q, W_K = torch.randn(2, 8, 16, generator=generator())
    base = sigma_qk_max(W_Q, W_K, 2, 2)
    torch.testing.assert_close(sigma_qk_max(W_Q * 8, W_K / 8, 2, 2), base, rtol=1e-12, atol=0)
    huge = sigma_qk_max(W_Q * 1e30, W_K * 1e30, 2, 2)
    torch.testing.assert_close(huge, base * 1e60, rtol=1e-6, atol=0)
    assert sigma_qk_max(torch.zeros(8, 16), W_K, 2, 2) == 0
    W_K[3, 3] = float("nan")
    assert sigma_qk_max(W_Q, W_K, 2, 2).isnan()
    W_K[3, 3] = float("inf")
    assert sigma_qk_max(W_Q, W_K, 2, 2).isnan()
    with pytest.raises(BadInput, match="n_heads"):
        sigma_qk_max(W_Q, W_K, 3, 3)


def test_sigma_qk_max_of_nearly_orthogonal_heads():
    """The product may be far smaller than its factors; the small value must not drown in their rounding."""
    basis = orthonormal(16, 8, 4)
    W_Q = torch.diag(torch.tensor([1e3, 1e-3], dtype=torch.float64)) @ basis[:, :2].T
    W_K = torch.diag(torch.tensor([1e-9, 1e3], dtype=torch.float64)) @ basis[:, 2:4].T
    expected = torch.linalg.matrix_norm(W_Q.T @ W_K, 2)
    torch.testing.assert_close(sigma_qk_max(W_Q, W_K, 1, 1), expected, rtol=1e-9, atol=0)


@pytest.mark.slow
def test_speed_against_the_svd():
    """768x768, k = 3, warm, one thread: at least 30 times faster than the SVD, at 1e-4."""
    W = trained_like(768, 768)
    state = leading_triplets(W, 3)[3]
    warm, svd = [], []
    for i in range(5):
        W = W + 1e-3 * torch.randn(768, 768, generator=generator(i)) / 768**0.5
        start = time.perf_counter()
        U, S, V, state = leading_triplets(W, 3, state)
        warm.append(time.perf_counter() - start)
        start = time.perf_counter()
        torch.linalg.svd(W)
        svd.append(time.perf_counter() - start)
        assert_triplets(W, U, S, V)
    assert sorted(svd)[2] > 30 * sorted(warm)[2]
