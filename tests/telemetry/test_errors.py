"""Gradient errors: size, mean, and coherence from one step to the next."""

import math

import pytest
import torch

from qkpipe.telemetry.errors import EMA, GradientErrors

A = torch.tensor([1.0, -2.0, 3.0, -4.0])


def coherence(errors, step, name="W"):
    return errors.row(step, [name], [4])["coherence"]


def test_size_and_mean():
    errors = GradientErrors()
    errors.observe(0, "W", A)
    row = errors.row(0, ["W"], [4])
    assert row["error_norm"] == pytest.approx(30**0.5)
    assert row["error_mean"] == pytest.approx(-0.5)
    assert row["coherence"] is None, "one step has no predecessor"


def test_coherence_by_hand():
    errors = GradientErrors()
    expected = None
    flips = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 1], [-1, 1, 1, 1], [1, -1, -1, -1]])
    for step, (signs, agreement) in enumerate(zip(flips, [None, 1.0, 0.5, -1.0], strict=True)):
        errors.observe(step, "W", A * signs)
        if agreement is not None:
            expected = agreement if expected is None else EMA * expected + (1 - EMA) * agreement
        assert coherence(errors, step) == (None if expected is None else pytest.approx(expected))


def test_parameters_together():
    errors = GradientErrors()
    for step in range(2):
        errors.observe(step, "a", A)
        errors.observe(step, "b", torch.full((12,), 2.0) * (-1) ** step)
    row = errors.row(1, ["a", "b", "unseen"], [4, 12, 7])
    assert row["error_norm"] == pytest.approx((30 + 48) ** 0.5)
    assert row["error_mean"] == pytest.approx((-2 - 24) / 16)
    assert row["coherence"] == pytest.approx((4 - 12) / 16)


def test_a_step_without_error_is_null():
    errors = GradientErrors()
    errors.observe(0, "W", A)
    assert errors.row(1, ["W"], [4]) == {"error_norm": None, "error_mean": None, "coherence": None}
    assert errors.seen("W", 0) and not errors.seen("W", 1) and not errors.seen("V", 0)


def test_errors_of_a_step_add_up():
    """Two faults on one matrix: the row is that of their sum, the coherence too."""
    parts, whole = GradientErrors(), GradientErrors()
    for step, sign in enumerate((1, -1, 1)):
        first, second = A * sign, -1.5 * A.flip(0)
        parts.observe(step, "W", first)
        parts.observe(step, "W", second)
        whole.observe(step, "W", first + second)
        assert parts.row(step, ["W"], [4]) == whole.row(step, ["W"], [4])


def test_a_total_takes_the_place_of_its_parts():
    parts, whole = GradientErrors(), GradientErrors()
    for step in range(3):
        parts.observe(step, "W", A.flip(0))
        parts.observe_total(step, "W", A * (-1) ** step)
        whole.observe(step, "W", A * (-1) ** step)
        assert parts.row(step, ["W"], [4]) == whole.row(step, ["W"], [4])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_bad_step_is_shown_and_does_not_poison_what_follows(bad):
    errors = GradientErrors()
    errors.observe(0, "W", A)
    errors.observe(1, "W", torch.full((4,), bad))
    assert not math.isfinite(errors.row(1, ["W"], [4])["error_norm"])
    for step in range(2, 60):
        errors.observe(step, "W", A)
    assert coherence(errors, 59) == pytest.approx(1.0, abs=0.01)


def test_state_round_trip():
    errors, resumed = GradientErrors(), GradientErrors()
    for step in range(3):
        errors.observe(step, "W", A * (-1) ** (step // 2))
    resumed.load_state_dict(errors.state_dict())
    for tracker in (errors, resumed):
        tracker.observe(3, "W", A)
    assert errors.row(3, ["W"], [4]) == resumed.row(3, ["W"], [4])
