"""Batches: pure functions of (seed, step), inside the tokens, the same for every validation."""

import numpy as np
import pytest

from qkpipe.data.batches import training_batch, validation_batches

CONTEXT = 8


@pytest.fixture
def tokens():
    return np.arange(200, dtype=np.uint8)


def draw(tokens, seed=0, step=0, sequences=6):
    return training_batch(tokens, seed=seed, step=step, sequences=sequences, context=CONTEXT)


def test_a_batch_is_a_function_of_seed_and_step(tokens):
    before = draw(tokens, seed=3, step=7)
    np.random.random(5)  # another generator's state plays no part
    draw(tokens, seed=3, step=8)
    np.testing.assert_array_equal(draw(tokens, seed=3, step=7), before)


def test_seeds_and_steps_differ_and_are_not_interchanged(tokens):
    batches = [draw(tokens, seed, step) for seed in range(4) for step in range(4)]
    assert len({batch.tobytes() for batch in batches}) == 16


def test_windows_are_consecutive_tokens_in_range(tokens):
    windows = draw(tokens, sequences=500)
    assert windows.shape == (500, CONTEXT + 1)
    assert windows.dtype == np.int64
    assert (np.diff(windows, axis=1) == 1).all()
    assert windows.min() == 0
    assert windows.max() == 199, "the last token must be reachable"


def test_one_window_fits_exactly():
    tokens = np.arange(CONTEXT + 1, dtype=np.uint8)
    np.testing.assert_array_equal(draw(tokens, sequences=2), np.stack([tokens, tokens]))
    for batch in validation_batches(tokens, batches=2, sequences=1, context=CONTEXT):
        np.testing.assert_array_equal(batch, tokens[None])


def test_starts_are_uniform(tokens):
    starts = draw(tokens, sequences=20000)[:, 0]
    counts = np.bincount(starts, minlength=192)
    assert len(counts) == 192
    # 104 expected in each: six standard deviations on either side.
    assert counts.min() > 43
    assert counts.max() < 166


def test_validation_is_fixed_and_covers_the_split(tokens):
    first, second = (validation_batches(tokens, batches=3, sequences=2, context=CONTEXT) for _ in range(2))
    np.testing.assert_array_equal(first, second)
    assert [batch.shape for batch in first] == [(2, CONTEXT + 1)] * 3
    assert first[0][0, 0] == 0
    assert first[-1][-1, -1] == 199
