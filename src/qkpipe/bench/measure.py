"""Times of functions taken turn about in one process, and the machine's own ceilings there."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import numpy as np
import torch

Quantiles = tuple[float, float, float]
"""p20, p50 and p80 in seconds. The ratios use p20: other work on the machine only ever adds time."""


def quantiles(seconds: list[float]) -> Quantiles:
    """p20, p50, p80."""
    return tuple(float(q) for q in np.percentile(seconds, [20, 50, 80]))


def interleaved(functions: Mapping[str, Callable[[], object]], budget_s: float) -> dict[str, Quantiles]:
    """Call all functions in turn for about ``budget_s`` seconds, three rounds or more, after a round of warming up."""
    for function in functions.values():
        function()
    times: dict[str, list[float]] = {name: [] for name in functions}
    end = time.perf_counter() + budget_s
    rounds = 0
    while rounds < 3 or time.perf_counter() < end:
        for name, function in functions.items():
            start = time.perf_counter()
            function()
            times[name].append(time.perf_counter() - start)
        rounds += 1
    return {name: quantiles(seconds) for name, seconds in times.items()}


def ceilings(budget_s: float) -> tuple[float, float]:
    """(flop/s of a 512x512 fp32 product, bytes/s read and written by a copy of 32 MB), both measured."""
    a, b, product = (torch.randn(512, 512) for _ in range(3))
    source, target = torch.randn(2, 8 << 20)
    took = interleaved(
        {"matmul": lambda: torch.mm(a, b, out=product), "copy": lambda: target.copy_(source)}, budget_s
    )
    return 2 * 512**3 / took["matmul"][0], 2 * source.numel() * 4 / took["copy"][0]
