"""Batches as a pure function of (seed, step): a resumed run, another rank count and a twin all see the same tokens."""

from __future__ import annotations

import numpy as np


def training_batch(tokens: np.ndarray, *, seed: int, step: int, sequences: int, context: int) -> np.ndarray:
    """Windows drawn uniformly with replacement, shape (sequences, context + 1), int64.

    The draw is Philox keyed by (seed, step), so no generator state has to be saved.
    """
    generator = np.random.Generator(np.random.Philox(key=[seed, step]))
    starts = generator.integers(0, len(tokens) - context, size=sequences)
    return tokens[starts[:, None] + np.arange(context + 1)].astype(np.int64)


def validation_batches(tokens: np.ndarray, *, batches: int, sequences: int, context: int) -> list[np.ndarray]:
    """The same evenly spaced windows for every run, each batch (sequences, context + 1), int64."""
    wanted = batches * sequences
    starts = np.linspace(0, len(tokens) - context - 1, num=wanted).astype(np.int64)
    windows = tokens[starts[:, None] + np.arange(context + 1)].astype(np.int64)
    return np.split(windows, batches)
