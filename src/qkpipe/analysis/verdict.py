"""Did a run collapse? The crash rules, as pure functions of a training-loss curve.

Both rules look at the smoothed loss e_t (exponential moving average, e_0 = the first loss) and its running minimum M_t, and
follow *excursions*: one opens when e_t is too far above M_t, and closes when e_t is back near M, the value of M_t at the
opening. A run has collapsed if an excursion is still open at its end. So a spike that recovers is no collapse.

Decided here, where neither the paper nor the study's text says: the thresholds are reached with >= (opening) and <= (closing)
in both rules; a non-finite loss is a collapse in both rules, and what follows it is not looked at; the paper's rule knows no
censoring.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray


@dataclass(frozen=True)
class CrashRule:
    """Constants of a crash rule: nat, or a fraction of the progress e_0 - M made so far; the larger of the two counts.

    An excursion opens at ``e_t - M_t >= max(open_fraction * (e_0 - M_t), open_nat)`` and closes at ``e_t - M <=
    max(close_fraction * (e_0 - M), close_nat)``. One opened in the last ``censor_steps`` steps of a run whose losses are
    finite is censored: too late to tell from a spike.
    """

    open_fraction: float = 0.2
    open_nat: float = 0.1
    close_fraction: float = 0.1
    close_nat: float = 0.0
    smoothing: float = 0.95
    censor_steps: int = 50


PRIMARY = CrashRule()
"""Scale-free: the same for a model that learns 1 nat and one that learns 8."""

PAPER = CrashRule(open_fraction=0.0, open_nat=1.5, close_fraction=0.0, close_nat=0.75, censor_steps=0)
"""The paper's: 1.5 nat above the running minimum, never again within 0.75 nat of it."""


@dataclass(frozen=True)
class Verdict:
    """``index`` points into the loss curve: where the collapse began, or where a censored excursion opened, else None."""

    collapsed: bool
    censored: bool
    index: int | None

    @property
    def collapse_index(self) -> int | None:
        return self.index if self.collapsed else None


def smooth(loss: ArrayLike, smoothing: float = PRIMARY.smoothing) -> NDArray[np.float64]:
    """Exponential moving average of the losses before the first non-finite one, started at the first loss."""
    values = np.asarray(loss, dtype=np.float64)
    out = values[: finite_length(values)].copy()
    for t in range(1, len(out)):
        out[t] = smoothing * out[t - 1] + (1.0 - smoothing) * out[t]
    return out


def finite_length(loss: ArrayLike) -> int:
    """How many losses come before the first non-finite one."""
    broken = ~np.isfinite(np.asarray(loss, dtype=np.float64))
    return int(broken.argmax()) if broken.any() else broken.size


def judge(loss: ArrayLike, rule: CrashRule = PRIMARY) -> Verdict:
    """Verdict on the training losses of one run, one a step from the first step on.

    An empty curve, or one too short to open an excursion, has not collapsed. Null losses are to be given as NaN.
    """
    losses = np.asarray(loss, dtype=np.float64)
    if losses.ndim != 1:
        raise ValueError(f"loss must be one curve, got shape {losses.shape}")
    opening = _open_excursion(smooth(losses, rule.smoothing), rule)
    first_broken = finite_length(losses)
    if first_broken < losses.size:
        return Verdict(collapsed=True, censored=False, index=first_broken if opening is None else opening)
    if opening is None:
        return Verdict(collapsed=False, censored=False, index=None)
    censored = losses.size - opening <= rule.censor_steps
    return Verdict(collapsed=not censored, censored=censored, index=opening)


def _open_excursion(ema: NDArray[np.float64], rule: CrashRule) -> int | None:
    """Where the excursion opened that is still open at the end."""
    opening: int | None = None
    start, minimum, minimum_at_opening = (float(ema[0]), float(ema[0]), 0.0) if ema.size else (0.0, 0.0, 0.0)
    for t, value in enumerate(ema.tolist()):
        minimum = min(minimum, value)
        if opening is None:
            if value - minimum >= max(rule.open_fraction * (start - minimum), rule.open_nat):
                opening, minimum_at_opening = t, minimum
        elif value - minimum_at_opening <= max(
            rule.close_fraction * (start - minimum_at_opening), rule.close_nat
        ):
            opening = None
    return opening
