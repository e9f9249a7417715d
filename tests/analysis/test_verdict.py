"""Hand-made loss curves. With ``RAW`` (no smoothing) the EMA is the curve itself, so thresholds can be hit exactly."""

from dataclasses import replace

import numpy as np
import pytest

from qkpipe.analysis.verdict import PAPER, PRIMARY, Verdict, finite_length, judge, smooth

RAW = replace(PRIMARY, smoothing=0.0, censor_steps=5)
PAPER_RAW = replace(PAPER, smoothing=0.0)
HEALTHY = Verdict(collapsed=False, censored=False, index=None)


def collapse(index: int) -> Verdict:
    return Verdict(collapsed=True, censored=False, index=index)


def curve(*pieces: tuple[float, int]) -> np.ndarray:
    """(level, steps) pieces, one after the other."""
    return np.concatenate([np.full(steps, level) for level, steps in pieces])


def test_smoothing_starts_at_the_first_loss_and_stops_before_the_first_non_finite_one():
    assert smooth([4.0, 2.0, 2.0]) == pytest.approx([4.0, 3.9, 3.805])
    assert smooth([4.0, 2.0, np.inf, 2.0]) == pytest.approx([4.0, 3.9])
    assert finite_length([1.0, np.nan, 2.0]) == 1
    assert finite_length([]) == 0


def test_healthy_curve():
    loss = 2.3 + 3.2 * np.exp(-np.arange(600) / 60)
    assert judge(loss) == judge(loss, PAPER) == HEALTHY


def test_late_rise_is_a_collapse_at_the_step_the_smoothed_loss_crosses():
    loss = np.concatenate([2.3 + 3.2 * np.exp(-np.arange(300) / 40), np.full(300, 4.6)])
    ema = smooth(loss)
    expected = int(
        np.argmax((ema - np.minimum.accumulate(ema)) >= 0.2 * (ema[0] - np.minimum.accumulate(ema).min()))
    )
    assert judge(loss) == collapse(expected)
    paper = judge(loss, PAPER)
    assert paper.collapsed and paper.index > expected


def test_opening_threshold_is_reached_not_passed():
    assert judge(curve((4.0, 1), (2.0, 20), (2.39, 20)), RAW) == HEALTHY
    assert judge(curve((4.0, 1), (2.0, 20), (2.5, 20)), RAW) == collapse(21)
    # 0.25 of the progress exactly, in numbers that binary represents
    quarter = replace(RAW, open_fraction=0.25)
    assert judge(curve((4.0, 1), (2.0, 20), (2.5, 20)), quarter) == collapse(21)


def test_spike_that_recovers_is_no_collapse():
    loss = curve((5.0, 1), (2.0, 50), (4.5, 10), (2.1, 50))
    assert judge(loss, RAW) == HEALTHY
    assert judge(loss, PAPER_RAW) == HEALTHY


def test_recovery_must_reach_a_tenth_of_the_progress():
    # progress 3: opens at +0.6, closes at +0.3
    assert judge(curve((5.0, 1), (2.0, 20), (3.0, 5), (2.35, 20)), RAW) == collapse(21)
    assert judge(curve((5.0, 1), (2.0, 20), (3.0, 5), (2.25, 20)), RAW) == HEALTHY


def test_of_two_excursions_the_one_still_open_counts():
    loss = curve((5.0, 1), (2.0, 20), (3.0, 5), (2.0, 20), (3.0, 20))
    assert judge(loss, RAW) == collapse(46)


def test_excursion_that_only_half_closes_keeps_its_first_opening():
    loss = curve((5.0, 1), (2.0, 20), (3.0, 5), (2.5, 5), (4.0, 20))
    assert judge(loss, RAW) == collapse(21)


def test_minimum_of_the_opening_is_kept_and_later_minima_count_for_later_excursions():
    # After a recovery to 1.0 the progress is 4: +0.8 opens, so +0.7 does not.
    loss = curve((5.0, 1), (2.0, 20), (3.0, 5), (1.0, 20), (1.7, 20))
    assert judge(loss, RAW) == HEALTHY
    assert judge(curve((5.0, 1), (2.0, 20), (3.0, 5), (1.0, 20), (1.9, 20)), RAW) == collapse(46)


def test_opened_in_the_last_steps_is_censored():
    censored = Verdict(collapsed=False, censored=True, index=21)
    assert judge(curve((5.0, 1), (2.0, 20), (4.0, 5)), RAW) == censored
    assert judge(curve((5.0, 1), (2.0, 20), (4.0, 6)), RAW) == collapse(21)
    assert censored.collapse_index is None
    assert judge(curve((5.0, 1), (2.0, 20), (4.0, 5)), PAPER_RAW) == collapse(21)


def test_fifty_steps_are_the_primary_rules_window():
    rule = replace(PRIMARY, smoothing=0.0)
    assert judge(curve((5.0, 1), (2.0, 100), (4.0, 50)), rule).censored
    assert judge(curve((5.0, 1), (2.0, 100), (4.0, 51)), rule) == collapse(101)


@pytest.mark.parametrize("broken", [np.nan, np.inf, -np.inf])
def test_non_finite_loss_is_a_collapse_under_both_rules(broken):
    loss = curve((5.0, 1), (2.0, 20), (broken, 1), (2.0, 20))
    assert judge(loss, RAW) == judge(loss, PAPER_RAW) == collapse(21)


def test_excursion_open_when_the_loss_breaks_is_the_earlier_collapse_never_censored():
    loss = curve((5.0, 1), (2.0, 20), (4.0, 2), (np.nan, 1))
    assert judge(loss, RAW) == collapse(21)


def test_excursion_closed_before_the_loss_breaks_does_not_count():
    loss = curve((5.0, 1), (2.0, 20), (4.0, 2), (2.0, 20), (np.nan, 1))
    assert judge(loss, RAW) == collapse(43)


def test_paper_rule_opens_at_one_and_a_half_nat_and_closes_within_three_quarters():
    assert judge(curve((5.0, 1), (2.0, 20), (3.4375, 90)), PAPER_RAW) == HEALTHY
    assert judge(curve((5.0, 1), (2.0, 20), (3.5, 90)), PAPER_RAW) == collapse(21)
    assert judge(curve((5.0, 1), (2.0, 20), (3.5, 5), (2.8125, 90)), PAPER_RAW) == collapse(21)
    assert judge(curve((5.0, 1), (2.0, 20), (3.5, 5), (2.75, 90)), PAPER_RAW) == HEALTHY


def test_run_that_never_learns_opens_at_the_floor_and_closes_at_the_start_only():
    assert judge(np.linspace(5.0, 5.09, 200), RAW) == HEALTHY
    assert judge(curve((5.0, 10), (5.125, 100)), RAW) == collapse(10)
    assert judge(curve((5.0, 10), (5.125, 10), (5.0, 100)), RAW) == HEALTHY


def test_tiny_initial_drop_uses_the_floor_of_a_tenth_nat():
    assert judge(curve((5.0, 1), (4.9, 20), (4.98, 100)), RAW) == HEALTHY
    assert judge(curve((5.0, 1), (4.9, 20), (5.05, 100)), RAW) == collapse(21)


def test_monotone_rise_and_plateau():
    assert judge(np.linspace(2.0, 6.0, 400)).collapsed
    assert judge(np.full(400, 3.0)) == HEALTHY


@pytest.mark.parametrize("loss", [[], [5.0], [5.0, 4.0]])
def test_short_series_have_not_collapsed(loss):
    assert judge(loss) == judge(loss, PAPER) == HEALTHY


def test_first_loss_non_finite():
    assert judge([np.nan]) == judge([np.nan, 2.0], PAPER) == collapse(0)


def test_a_curve_must_have_one_dimension():
    with pytest.raises(ValueError, match="one curve"):
        judge(np.zeros((2, 3)))


@pytest.mark.parametrize("shift", [0.0, 3.0])
@pytest.mark.parametrize("factor", [1.0, 2.0, 8.0])
def test_primary_rule_is_scale_free_above_its_floor(factor, shift):
    loss = np.concatenate([2.3 + 3.2 * np.exp(-np.arange(300) / 40), np.linspace(2.3, 4.6, 300)])
    assert judge(factor * loss + shift) == judge(loss)
