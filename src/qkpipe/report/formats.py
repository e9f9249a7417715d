"""How numbers are written in the report."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import groupby
from typing import Any

NONE = "–"


def number(value: float | None, digits: int = 3) -> str:
    """Significant digits without an exponent where that is readable; a dash for nothing."""
    if value is None or math.isnan(value):
        return NONE
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    if value == 0:
        return "0"
    magnitude = math.floor(math.log10(abs(value)))
    if not -4 <= magnitude < 7:
        return f"{value:.{digits - 1}e}".replace("-", "−")
    return f"{value:.{max(digits - 1 - magnitude, 0)}f}".replace("-", "−")


def signed(value: float | None, digits: int = 3) -> str:
    """:func:`number` with a plus sign where it is positive."""
    text = number(value, digits)
    return f"+{text}" if value is not None and value > 0 else text


def factor(log_ratio: float | None, digits: int = 3) -> str:
    """A natural-log ratio as the factor it stands for."""
    return NONE if log_ratio is None or math.isnan(log_ratio) else f"×{number(math.exp(log_ratio), digits)}"


def count(value: float | None) -> str:
    """A whole number with thin spaces between thousands."""
    return NONE if value is None or math.isnan(value) else f"{value:,.0f}".replace(",", "\u202f")


def spans(seeds: str) -> str:
    """A list of seeds with each run of three or more neighbours as its ends: "20,21,22,100" as "20–22, 100"."""
    numbers = sorted({int(seed) for seed in seeds.split(",") if seed.strip()})
    parts = []
    for _, group in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
        run = [number for _, number in group]
        parts += [f"{run[0]}–{run[-1]}"] if len(run) > 2 else map(str, run)
    return ", ".join(parts) or NONE


FILTERS: dict[str, Callable[..., Any]] = {
    "number": number,
    "signed": signed,
    "factor": factor,
    "count": count,
    "spans": spans,
}
