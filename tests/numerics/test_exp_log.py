import numpy as np
import pytest
import torch

from qkpipe.numerics.exp_log import exp_f32, exp_nb, log_f32, log_nb, tanh_f32


def ulp(x64: torch.Tensor) -> torch.Tensor:
    """Spacing of fp32 at |x|."""
    x = x64.abs().float()
    return (torch.nextafter(x, torch.tensor(torch.inf)) - x).double()


def patterns(n: int) -> torch.Tensor:
    """fp32 values of every exponent, NaNs and infinities among them."""
    g = torch.Generator().manual_seed(0)
    return torch.randint(-(2**31), 2**31, (n,), generator=g).to(torch.int32).view(torch.float32)


def test_exp_is_within_1_1_ulp_of_float64():
    x = torch.cat([torch.linspace(-103.9, 88.7, 300_001), torch.linspace(-1, 1, 100_001)])
    true = x.double().exp()
    assert ((exp_f32(x).double() - true).abs() / ulp(true)).max() < 1.1


def test_log_is_within_1_1_ulp_of_float64():
    x = torch.cat([torch.logspace(-44, 38.5, 300_001), torch.linspace(0.5, 2, 100_001)])
    x = x[(x > 0) & x.isfinite()]
    true = x.double().log()
    assert ((log_f32(x).double() - true).abs() <= 1.1 * ulp(true)).all()


def test_tanh_is_within_2_ulp_of_float64():
    x = torch.cat(
        [torch.linspace(-12, 12, 300_001), torch.linspace(-0.7, 0.7, 100_001), torch.logspace(-38, 0, 999)]
    )
    true = x.double().tanh()
    assert ((tanh_f32(x).double() - true).abs() <= 2 * ulp(true)).all()
    assert torch.equal(tanh_f32(-x), -tanh_f32(x))


@pytest.mark.parametrize(
    ("function", "x", "expected"),
    [
        (exp_f32, 0.0, 1.0),
        (exp_f32, -0.0, 1.0),
        (exp_f32, -np.inf, 0.0),
        (exp_f32, np.inf, np.inf),
        (exp_f32, 89.5, np.inf),
        (exp_f32, -103.97, 2.0**-149),
        (exp_f32, -105.5, 0.0),
        (exp_f32, np.nan, np.nan),
        (log_f32, 1.0, 0.0),
        (log_f32, 0.0, -np.inf),
        (log_f32, np.inf, np.inf),
        (log_f32, -1.0, np.nan),
        (log_f32, np.nan, np.nan),
        (tanh_f32, 0.0, 0.0),
        (tanh_f32, np.inf, 1.0),
        (tanh_f32, -np.inf, -1.0),
        (tanh_f32, 100.0, 1.0),
        (tanh_f32, np.nan, np.nan),
    ],
)
def test_edges(function, x, expected):
    np.testing.assert_array_equal(
        function(torch.tensor([x], dtype=torch.float32)).numpy(), [np.float32(expected)]
    )


def test_compiled_scalars_have_the_bits_of_the_tensors():
    numba = pytest.importorskip("numba")

    @numba.njit(error_model="numpy")
    def both(x, e, l):
        for n in range(x.size):
            e[n] = exp_nb(x[n])
            l[n] = log_nb(x[n])

    x = torch.cat([patterns(200_000), torch.linspace(-110, 95, 100_001)])
    e, l = np.empty(x.numel(), np.float32), np.empty(x.numel(), np.float32)
    both(x.numpy(), e, l)
    for got, expected in ((e, exp_f32(x)), (l, log_f32(x))):
        expected = expected.numpy()
        assert ((got.view(np.int32) == expected.view(np.int32)) | (np.isnan(got) & np.isnan(expected))).all()
