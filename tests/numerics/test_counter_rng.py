"""The counter-based generator: equal bits in both languages, and draws that look random."""

import numpy as np
import pytest
import torch
from numba import njit

from qkpipe.errors import BadInput
from qkpipe.numerics.counter_rng import fold_in, hash_u32, hash_u32_nb, stream_keys

N = 1 << 18
U32 = (1 << 32) - 1


@njit
def fill(seed, stream, counter, out):
    for i in range(counter.size):
        out[i] = hash_u32_nb(seed, stream, counter[i])


def draws(seed, stream, n=N):
    return hash_u32(seed, stream, torch.arange(n))


@pytest.mark.parametrize("seed", [0, 1, 12345, U32])
@pytest.mark.parametrize("stream", [0, 7, 1 << 31, U32])
def test_torch_and_numba_give_equal_bits(seed, stream):
    counter = np.concatenate([np.arange(1000), np.arange(U32 - 1000, U32 + 1)]).astype(np.uint32)
    out = np.empty_like(counter)
    fill(np.uint32(seed), np.uint32(stream), counter, out)
    reference = hash_u32(seed, stream, torch.from_numpy(counter.astype(np.int64)))
    assert torch.equal(reference, torch.from_numpy(out.astype(np.int64)))


def test_first_draws_are_pinned():
    # A change here changes the bits of every stochastically rounded run.
    assert hash_u32(0, 0, torch.arange(3)).tolist() == [3592546125, 838894499, 3564424922]
    assert hash_u32(1, 2, torch.arange(3)).tolist() == [729093152, 3408106894, 3806811123]


def test_values_are_u32_and_shape_is_kept():
    u = hash_u32(3, 4, torch.arange(24).view(2, 3, 4))
    assert u.shape == (2, 3, 4) and u.dtype == torch.int64
    assert u.min() >= 0 and u.max() <= U32


def test_counter_is_taken_modulo_2_to_the_32():
    counter = torch.arange(10)
    assert torch.equal(hash_u32(5, 6, counter), hash_u32(5, 6, counter + (1 << 32)))


def test_a_stream_is_a_bijection_of_the_counter():
    assert draws(9, 9).unique().numel() == N


def test_every_bit_is_fair():
    u = draws(0, 0)
    for bit in range(32):
        ones = ((u >> bit) & 1).double().mean().item()
        assert abs(ones - 0.5) < 5 * 0.5 / N**0.5, f"bit {bit}: {ones}"


@pytest.mark.parametrize("shift", [0, 12, 24])
def test_bytes_are_uniform(shift):
    counts = torch.bincount((draws(1, 1) >> shift) & 255, minlength=256).double()
    chi2 = ((counts - N / 256) ** 2 / (N / 256)).sum().item()
    assert 255 - 5 * 510**0.5 < chi2 < 255 + 5 * 510**0.5


def test_successive_draws_are_uncorrelated():
    u = draws(2, 3).double() / 2**32 - 0.5
    for lag in (1, 2, 32, 768):
        assert abs((u[lag:] * u[:-lag]).mean().item() * 12) < 5 / N**0.5


@pytest.mark.parametrize("other", [(0, 1), (1, 0), (1, 1), (0, 1 << 31), (1 << 31, 0)])
def test_neighbouring_streams_and_seeds_are_independent(other):
    a, b = draws(0, 0), draws(*other)
    flipped = a ^ b
    for bit in range(32):
        assert abs(((flipped >> bit) & 1).double().mean().item() - 0.5) < 5 * 0.5 / N**0.5
    correlation = ((a.double() / 2**32 - 0.5) * (b.double() / 2**32 - 0.5)).mean().item() * 12
    assert abs(correlation) < 5 / N**0.5


def test_one_input_bit_flips_half_of_the_output_bits():
    counter = torch.arange(4096)
    base = hash_u32(0, 0, counter)
    for bit in range(32):
        changed = base ^ hash_u32(0, 0, counter ^ (1 << bit))
        flips = sum(((changed >> b) & 1).sum().item() for b in range(32)) / 4096
        assert 15.5 < flips < 16.5, f"counter bit {bit}: {flips}"


def test_fold_in_separates_places():
    places = {fold_in(0, step, layer, what) for step in range(20) for layer in range(12) for what in range(8)}
    assert len(places) == 20 * 12 * 8
    assert fold_in(0, 1, 2) != fold_in(0, 2, 1)


@pytest.mark.parametrize("seed, stream", [(-1, 0), (0, -1), (1 << 32, 0), (0, 1 << 32)])
def test_out_of_range_is_refused(seed, stream):
    with pytest.raises(BadInput, match=r"\[0, 2\^32\)"):
        stream_keys(seed, stream)
