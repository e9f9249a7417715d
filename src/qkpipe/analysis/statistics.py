"""Exact statistics of paired seeds: an arm and its control share the seed, so the seed is the pair.

Everything is exact at the small n of this study: no test uses a normal approximation. A test takes
:class:`Pairs`, which cannot be made of tuning seeds, so no p-value is ever computed on them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.stats import binomtest
from statsmodels.stats.multitest import multipletests
from statsmodels.stats.proportion import proportion_confint

from qkpipe.errors import BadInput

Alternative = Literal["greater", "less", "two-sided"]

ENUMERATED_PAIRS = 20
"""Up to here all 2^n sign flips are enumerated; beyond, 2^16 are drawn, and the p-value is valid, not exact."""


@dataclass(frozen=True)
class Pairs:
    """Outcomes of two arms in the same seeds; booleans for counts, finite floats else."""

    seeds: tuple[int, ...]
    roles: tuple[str, ...]
    treated: NDArray
    control: NDArray

    def __post_init__(self) -> None:
        if len({len(self.seeds), len(self.roles), len(self.treated), len(self.control)}) != 1:
            raise ValueError("seeds, roles, treated and control must have one length")
        if len(set(self.seeds)) != len(self.seeds):
            raise ValueError(f"a seed is there twice: {sorted(self.seeds)}")
        for seed, role in zip(self.seeds, self.roles):
            if role == "tuning":
                raise BadInput(f"seed {seed} has role 'tuning': no p-value is computed on tuning seeds")
        if not (np.isfinite(self.treated).all() and np.isfinite(self.control).all()):
            raise ValueError("outcomes must be finite")

    def __len__(self) -> int:
        return len(self.seeds)

    @property
    def difference(self) -> NDArray[np.float64]:
        """treated - control, float64[n]."""
        return np.asarray(self.treated, dtype=float) - np.asarray(self.control, dtype=float)


@dataclass(frozen=True)
class TestResult:
    """``p_value`` speaks for the declared direction, ``p_reverse`` for its opposite; each is valid alone.

    The interval has level 1 - 2*alpha, so that each end agrees with the one-sided test at alpha. It is
    infinite where n is too small for any value to be rejected. ``effect`` is NaN without a pair.
    """

    __test__ = False  # for pytest: not a test class

    n_pairs: int
    effect: float
    ci_low: float
    ci_high: float
    p_value: float
    p_reverse: float


# ---- counts


def clopper_pearson(k: int, n: int, level: float = 0.95) -> tuple[float, float]:
    """Exact two-sided interval of a proportion seen as k of n; (0, 1) at n = 0."""
    if n == 0:
        return 0.0, 1.0
    low, high = proportion_confint(k, n, 1 - level, method="beta")
    return float(low), float(high)


def upper_bound(k: int, n: int, level: float = 0.95) -> float:
    """Exact one-sided upper bound of a proportion seen as k of n; "none of n" gives 1 - (1 - level)^(1/n)."""
    return clopper_pearson(k, n, 2 * level - 1)[1]


def mcnemar_p(pairs: Pairs, alternative: Alternative) -> float:
    """Exact McNemar test: the sign test on discordant pairs. 1 if there are none."""
    treated, control = np.asarray(pairs.treated, dtype=bool), np.asarray(pairs.control, dtype=bool)
    only_treated, only_control = int((treated & ~control).sum()), int((control & ~treated).sum())
    return _binomial_p(only_treated, only_treated + only_control, 0.5, alternative)


def mcnemar(pairs: Pairs, alternative: Literal["greater", "less"], alpha: float) -> TestResult:
    """Does treated collapse more (``greater``) or less often than control?

    The effect is the difference of the two proportions. Its interval is exact given the number of discordant
    pairs, scaled from Clopper-Pearson on their split, so it excludes 0 exactly when the test rejects; without
    a discordant pair, it is what 0 of n allows on either side.
    """
    n = len(pairs)
    if n == 0:
        return TestResult(0, np.nan, -1.0, 1.0, 1.0, 1.0)
    difference = pairs.difference
    discordant = int(np.abs(difference).sum())
    if discordant:
        low, high = clopper_pearson(int((difference > 0).sum()), discordant, 1 - 2 * alpha)
        low, high = (2 * low - 1) * discordant / n, (2 * high - 1) * discordant / n
    else:
        high = upper_bound(0, n, 1 - alpha)
        low = -high
    return TestResult(
        n,
        float(difference.mean()),
        low,
        high,
        mcnemar_p(pairs, alternative),
        mcnemar_p(pairs, _opposite(alternative)),
    )


def rescue(pairs: Pairs, alternative: Literal["greater", "less"], margin: float, alpha: float) -> TestResult:
    """Is the share of rescued seeds above (``greater``: rescues) or below (``less``: does not rescue)
    ``margin``?

    Counted are the seeds in which at least one arm of the pair collapses (:func:`collapse_at_stake`); rescued
    are those in which ``treated`` does not. So a seed in which both collapse, or ``treated`` alone, counts
    against the rescue; at a margin of 1/2 the test is never more lenient than McNemar's, and "rescues none"
    is a Clopper-Pearson upper bound.
    """
    pairs = collapse_at_stake(pairs)
    n = len(pairs)
    rescued = n - int(np.asarray(pairs.treated, dtype=bool).sum())
    low, high = clopper_pearson(rescued, n, 1 - 2 * alpha)
    return TestResult(
        n,
        rescued / n if n else np.nan,
        low,
        high,
        _binomial_p(rescued, n, margin, alternative),
        _binomial_p(rescued, n, margin, _opposite(alternative)),
    )


def collapse_at_stake(pairs: Pairs) -> Pairs:
    """The pairs in which at least one arm collapses: elsewhere there is nothing to rescue."""
    kept = np.flatnonzero(np.asarray(pairs.treated, dtype=bool) | np.asarray(pairs.control, dtype=bool))
    return Pairs(
        tuple(pairs.seeds[i] for i in kept),
        tuple(pairs.roles[i] for i in kept),
        np.asarray(pairs.treated)[kept],
        np.asarray(pairs.control)[kept],
    )


def _binomial_p(k: int, n: int, share: float, alternative: Alternative) -> float:
    return float(binomtest(k, n, share, alternative=alternative).pvalue) if n else 1.0


# ---- continuous outcomes


@dataclass(frozen=True)
class SignFlip:
    """The sign-flip permutation test of a mean paired difference, at every shift at once.

    Under the null hypothesis that differences are symmetric about theta, all sign patterns of d - theta are
    equally likely. A pattern's sum reaches the observed one exactly when the mean of d over the flipped pairs
    is at most theta. So the means of d over all subsets of pairs, sorted, hold every p-value and every
    confidence bound (Hartigan 1969, typical values). The empty subset is the observed pattern, and always
    counts.
    """

    subset_means: NDArray[np.float64]
    tolerance: float

    @classmethod
    def of(cls, difference: ArrayLike) -> SignFlip:
        d = np.asarray(difference, dtype=float)
        if len(d) <= ENUMERATED_PAIRS:
            sums, sizes = np.zeros(1), np.zeros(1)
            for value in d:
                sums, sizes = np.concatenate([sums, sums + value]), np.concatenate([sizes, sizes + 1])
            means = sums[1:] / sizes[1:]
        else:
            flipped = np.random.default_rng(0).random((2**16 - 1, len(d))) < 0.5
            sizes = flipped.sum(axis=1)
            means = (flipped[sizes > 0] @ d) / sizes[sizes > 0]
        # Sums of the same numbers in another order differ in the last bits; they are ties.
        return cls(np.sort(means), 1e-12 * float(np.abs(d).max(initial=0.0)))

    def p_value(self, alternative: Alternative, shift: float = 0.0) -> float:
        """Of the hypothesis that the mean is ``shift``, against the mean being greater or less, or either."""
        patterns = len(self.subset_means) + 1
        reaching = {
            "greater": np.searchsorted(self.subset_means, shift + self.tolerance, side="right") + 1,
            "less": patterns - np.searchsorted(self.subset_means, shift - self.tolerance, side="left"),
        }
        if alternative == "two-sided":
            return min(1.0, 2 * float(min(reaching.values())) / patterns)
        return float(reaching[alternative]) / patterns

    def interval(self, alpha: float) -> tuple[float, float]:
        """Every shift that neither one-sided test rejects at ``alpha``: level 1 - 2*alpha or more, by
        inversion.

        Infinite where 2^-n > alpha: so few pairs reject nothing, whatever their values (n < 5 at alpha =
        0.05). At n = 5 it runs from the smallest difference to the largest.
        """
        rejected = int(alpha * (len(self.subset_means) + 1) * (1 + 1e-12))
        if rejected < 1:
            return -np.inf, np.inf
        return float(self.subset_means[rejected - 1]), float(self.subset_means[-rejected])


def sign_flip(pairs: Pairs, alternative: Literal["greater", "less"], alpha: float) -> TestResult:
    """Is the mean of treated - control above (``greater``) or below 0? Exact if differences are symmetric
    under the null.
    """
    return _continuous(
        pairs, alpha, lambda test: (test.p_value(alternative), test.p_value(_opposite(alternative)))
    )


def equivalence(pairs: Pairs, margin: float, alpha: float) -> TestResult:
    """Is the mean of treated - control inside +-``margin``? Two one-sided sign-flip tests (TOST); p is the
    larger.

    The reverse, a mean outside, may be shown on either side, so its p is twice the smaller: five pairs cannot
    show it.
    """

    def p_values(test: SignFlip) -> tuple[float, float]:
        inside = max(test.p_value("greater", -margin), test.p_value("less", margin))
        outside = min(test.p_value("greater", margin), test.p_value("less", -margin))
        return inside, min(1.0, 2 * outside)

    return _continuous(pairs, alpha, p_values)


def _continuous(
    pairs: Pairs, alpha: float, p_values: Callable[[SignFlip], tuple[float, float]]
) -> TestResult:
    if len(pairs) == 0:
        return TestResult(0, np.nan, -np.inf, np.inf, 1.0, 1.0)
    test = SignFlip.of(pairs.difference)
    return TestResult(len(pairs), float(pairs.difference.mean()), *test.interval(alpha), *p_values(test))


def _opposite(alternative: Literal["greater", "less"]) -> Literal["greater", "less"]:
    return "less" if alternative == "greater" else "greater"


# ---- families


def all_parts(p_values: Sequence[float], p_reverses: Sequence[float]) -> tuple[float, float]:
    """p-values of a claim of several parts: it needs every part (the largest p, an intersection-union test),
    and one part in reverse refutes it (Bonferroni over the parts).
    """
    return max(p_values), min(1.0, len(p_reverses) * min(p_reverses))


def fixed_order(p_values: Sequence[float]) -> NDArray[np.float64]:
    """Adjusted p-values of a family tested in its order, each at the full level, which stops at the first
    failure: the running maximum, so nothing after a failure can be supported, and the error rate of the
    *family* stays at the level.
    """
    return np.maximum.accumulate(np.asarray(p_values, dtype=float))


def fixed_order_reverse(p_values: Sequence[float], p_reverses: Sequence[float]) -> NDArray[np.float64]:
    """Adjusted p-values of the reverse of each claim: reached only if every claim before it was supported."""
    before = np.concatenate([[0.0], fixed_order(p_values)[:-1]]) if len(p_values) else np.zeros(0)
    return np.maximum(before, np.asarray(p_reverses, dtype=float))


def holm(p_values: Sequence[float]) -> NDArray[np.float64]:
    """Holm's adjusted p-values."""
    if len(p_values) == 0:
        return np.zeros(0)
    return multipletests(p_values, method="holm")[1]
