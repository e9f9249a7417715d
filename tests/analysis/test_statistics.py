import itertools

import numpy as np
import pytest
import scipy.stats
from statsmodels.stats.contingency_tables import mcnemar as statsmodels_mcnemar

from qkpipe.analysis import statistics
from qkpipe.analysis.statistics import Pairs, SignFlip, clopper_pearson, upper_bound
from qkpipe.errors import BadInput

ALPHA = 0.05


def pairs(treated, control, role="confirmatory"):
    n = len(treated)
    return Pairs(tuple(range(n)), (role,) * n, np.asarray(treated), np.asarray(control))


def collapses(both=0, treated_only=0, control_only=0, neither=0):
    treated = [True] * (both + treated_only) + [False] * (control_only + neither)
    control = [True] * both + [False] * treated_only + [True] * control_only + [False] * neither
    return pairs(np.array(treated, dtype=bool), np.array(control, dtype=bool))


def test_five_unanimous_pairs_give_one_in_32_in_every_test():
    assert statistics.mcnemar(collapses(treated_only=5), "greater", ALPHA).p_value == 1 / 32
    assert statistics.rescue(collapses(control_only=5), "greater", 0.5, ALPHA).p_value == 1 / 32
    assert statistics.rescue(collapses(both=5), "less", 0.5, ALPHA).p_value == 1 / 32
    up = pairs([2.0, 3.0, 2.5, 2.1, 9.0], [1.0] * 5)
    assert statistics.sign_flip(up, "greater", ALPHA).p_value == 1 / 32
    assert statistics.sign_flip(up, "greater", ALPHA).p_reverse == 1
    near = pairs([1.01, 0.98, 1.0, 1.03, 0.99], [1.0] * 5)
    assert statistics.equivalence(near, 0.1, ALPHA).p_value == 1 / 32


def test_no_p_value_on_tuning_seeds():
    with pytest.raises(BadInput, match="seed 0 has role 'tuning'"):
        pairs([1.0, 2.0], [0.0, 0.0], role="tuning")


@pytest.mark.parametrize(
    ("treated", "control"), [([1.0], [1.0, 2.0]), ([np.nan, 1.0], [0.0, 0.0]), ([np.inf, 1.0], [0.0, 0.0])]
)
def test_pairs_refuse_what_is_not_paired_or_not_finite(treated, control):
    with pytest.raises(ValueError):
        pairs(treated, control)
    with pytest.raises(ValueError, match="twice"):
        Pairs((1, 1), ("extra", "extra"), np.zeros(2), np.zeros(2))


def test_mcnemar_is_the_exact_test_of_statsmodels():
    for both, treated_only, control_only, neither in itertools.product((0, 3), range(7), range(7), (0, 2)):
        data = collapses(both, treated_only, control_only, neither)
        if treated_only + control_only == 0:
            assert statistics.mcnemar_p(data, "two-sided") == 1
            continue
        expected = statsmodels_mcnemar([[both, treated_only], [control_only, neither]], exact=True).pvalue
        assert statistics.mcnemar_p(data, "two-sided") == pytest.approx(min(1, expected))
        one_sided = scipy.stats.binom.sf(treated_only - 1, treated_only + control_only, 0.5)
        assert statistics.mcnemar_p(data, "greater") == pytest.approx(one_sided)


def test_mcnemar_interval_excludes_zero_exactly_when_the_test_rejects():
    for table in itertools.product((0, 2), range(7), range(7), (3,)):
        data = collapses(*table)
        result = statistics.mcnemar(data, "greater", ALPHA)
        assert result.ci_low <= result.effect <= result.ci_high
        assert (result.ci_low > 0) == (result.p_value <= ALPHA)
        assert (result.ci_high < 0) == (result.p_reverse <= ALPHA)


def test_mcnemar_without_discordance_still_says_how_little_is_known():
    result = statistics.mcnemar(collapses(both=3, neither=2), "greater", ALPHA)
    bound = 1 - ALPHA ** (1 / 5)
    assert (result.p_value, result.p_reverse, result.effect) == (1, 1, 0)
    assert (result.ci_low, result.ci_high) == (pytest.approx(-bound), pytest.approx(bound))


def test_rescue_is_never_more_lenient_than_mcnemar():
    for table in itertools.product((0, 1, 3), repeat=4):
        data = collapses(*table)
        assert (
            statistics.rescue(data, "greater", 0.5, ALPHA).p_value
            >= statistics.mcnemar_p(data, "less") - 1e-12
        )


def test_rescue_counts_only_pairs_with_a_collapse_and_failures_of_both_kinds():
    result = statistics.rescue(
        collapses(both=1, treated_only=1, control_only=6, neither=4), "greater", 0.5, ALPHA
    )
    assert (result.n_pairs, result.effect) == (8, 6 / 8)
    assert result.p_value == pytest.approx(scipy.stats.binom.sf(5, 8, 0.5))


def test_rescues_none_is_the_exact_upper_bound():
    result = statistics.rescue(collapses(both=10), "less", 0.5, ALPHA)
    assert result.ci_high == pytest.approx(1 - 0.05 ** (1 / 10))
    assert upper_bound(0, 59) == pytest.approx(1 - 0.05 ** (1 / 59))
    assert upper_bound(0, 59) < 0.05 < upper_bound(0, 58)


def test_clopper_pearson_is_the_beta_quantile():
    low, high = clopper_pearson(3, 10)
    assert low == pytest.approx(scipy.stats.beta.ppf(0.025, 3, 8))
    assert high == pytest.approx(scipy.stats.beta.ppf(0.975, 4, 7))
    assert clopper_pearson(0, 0) == (0, 1)


def brute_p(d, alternative):
    """Every sign pattern, spelt out, in exact integers."""
    sums = [sum(s * x for s, x in zip(signs, d)) for signs in itertools.product((1, -1), repeat=len(d))]
    greater = np.mean([total >= sum(d) for total in sums])
    less = np.mean([total <= sum(d) for total in sums])
    return {"greater": greater, "less": less, "two-sided": min(1, 2 * min(greater, less))}[alternative]


@pytest.mark.parametrize("alternative", ["greater", "less", "two-sided"])
def test_sign_flip_counts_every_pattern_with_ties_and_zeros(alternative):
    rng = np.random.default_rng(1)
    for n in range(1, 9):
        for _ in range(10):
            d = rng.integers(-3, 4, n)
            # Thirds are not representable: sums in another order differ in the last bits and must count as
            # ties.
            assert SignFlip.of(d / 3).p_value(alternative) == brute_p(d.tolist(), alternative)


@pytest.mark.parametrize("alternative", ["greater", "less", "two-sided"])
def test_sign_flip_agrees_with_scipy(alternative):
    rng = np.random.default_rng(2)
    for n in (3, 5, 8):
        x, y = rng.normal(0.5, 1, n), rng.normal(0, 1, n)
        expected = scipy.stats.permutation_test(
            (x, y),
            lambda x, y: np.mean(x - y),
            permutation_type="samples",
            alternative=alternative,
            n_resamples=np.inf,
        )
        assert SignFlip.of(x - y).p_value(alternative) == pytest.approx(expected.pvalue)


@pytest.mark.parametrize("n", [5, 6, 9, 12])
def test_interval_is_the_inverted_test(n):
    d = np.random.default_rng(n).normal(1, 2, n)
    test = SignFlip.of(d)
    low, high = test.interval(ALPHA)
    step = 1e-6
    assert test.p_value("greater", low - step) <= ALPHA < test.p_value("greater", low + step)
    assert test.p_value("less", high + step) <= ALPHA < test.p_value("less", high - step)
    # A shift of the test is a shift of the data.
    assert test.p_value("greater", 0.7) == SignFlip.of(d - 0.7).p_value("greater")


def test_interval_of_five_pairs_is_their_range_and_of_four_is_unbounded():
    d = np.array([0.3, -0.1, 0.8, 0.4, 0.2])
    assert SignFlip.of(d).interval(ALPHA) == (-0.1, 0.8)
    assert SignFlip.of(d[:4]).interval(ALPHA) == (-np.inf, np.inf)


def test_interval_covers_the_mean():
    rng = np.random.default_rng(3)
    trials = 1000
    intervals = [SignFlip.of(rng.normal(2, 1, 7)).interval(ALPHA) for _ in range(trials)]
    misses = sum(not low <= 2 <= high for low, high in intervals)
    assert misses <= scipy.stats.binom.ppf(0.9999, trials, 2 * ALPHA)
    assert misses > 0  # an interval that never misses is not of this level


def test_more_pairs_than_can_be_enumerated_give_a_valid_p_value_near_the_t_test():
    d = np.random.default_rng(4).normal(0.3, 1, 30)
    test = SignFlip.of(d)
    expected = scipy.stats.ttest_1samp(d, 0, alternative="greater").pvalue
    assert test.p_value("greater") == pytest.approx(expected, abs=0.01)
    assert SignFlip.of(np.ones(30)).p_value("greater") == 2**-16


def test_equivalence_is_the_larger_of_two_sign_flips():
    d = np.array([0.02, -0.01, 0.06, 0.11, 0.0, 0.03])
    result = statistics.equivalence(pairs(d, np.zeros(6)), 0.1, ALPHA)
    assert result.p_value == max(
        SignFlip.of(d + 0.1).p_value("greater"), SignFlip.of(d - 0.1).p_value("less")
    )
    assert result.p_value > 1 / 64  # one pair is outside the margin


def test_difference_outside_the_margin_reverses_equivalence_from_six_pairs_on():
    far = [statistics.equivalence(pairs(np.full(n, 0.5), np.zeros(n)), 0.1, ALPHA) for n in (5, 6)]
    assert [result.p_value for result in far] == [1, 1]
    assert [result.p_reverse for result in far] == [2 / 32, 2 / 64]


@pytest.mark.parametrize("value", [0.0, 0.05])
def test_zero_variance(value):
    same = pairs(np.full(5, value), np.zeros(5))
    result = statistics.sign_flip(same, "greater", ALPHA)
    assert result.p_value == (1 if value == 0 else 1 / 32)
    assert (result.ci_low, result.ci_high) == (pytest.approx(value), pytest.approx(value))
    assert statistics.equivalence(same, 0.1, ALPHA).p_value == 1 / 32


def test_no_pairs_is_no_evidence():
    nothing = pairs(np.zeros(0), np.zeros(0))
    for result in (
        statistics.mcnemar(nothing, "greater", ALPHA),
        statistics.rescue(nothing, "less", 0.5, ALPHA),
        statistics.sign_flip(nothing, "less", ALPHA),
        statistics.equivalence(nothing, 0.1, ALPHA),
    ):
        assert (result.n_pairs, result.p_value, result.p_reverse) == (0, 1, 1)
        assert np.isnan(result.effect)


def test_claim_of_several_parts_needs_every_part():
    assert statistics.all_parts([0.01, 0.2], [1.0, 0.9]) == (0.2, 1.0)
    assert statistics.all_parts([1.0, 0.01], [0.01, 1.0]) == (1.0, 0.02)


def test_fixed_order_stops_the_family_at_the_first_failure():
    np.testing.assert_array_equal(statistics.fixed_order([0.01, 0.03, 0.2, 0.001]), [0.01, 0.03, 0.2, 0.2])
    reverse = statistics.fixed_order_reverse([0.01, 1.0, 1.0], [1.0, 0.02, 0.001])
    np.testing.assert_array_equal(reverse, [1.0, 0.02, 1.0])
    assert len(statistics.fixed_order([])) == len(statistics.fixed_order_reverse([], [])) == 0


def test_holm():
    np.testing.assert_allclose(statistics.holm([0.01, 0.04, 0.03]), [0.03, 0.06, 0.06])
    assert len(statistics.holm([])) == 0
