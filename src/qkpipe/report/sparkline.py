"""Small curves as inline SVG: no axis, one shared scale a measure, marks where something happened."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import pandas as pd
from markupsafe import Markup
from numpy.typing import ArrayLike, NDArray

WIDTH, HEIGHT, PAD = 180.0, 44.0, 3.0


@dataclass(frozen=True)
class Scale:
    """Maps steps and values to the drawing; the same for all runs, so that small curves can be compared."""

    last_step: float
    low: float
    high: float
    log: bool

    @classmethod
    def over(cls, curves: pd.DataFrame, measure: str, log: bool) -> Scale:
        values = _plottable(curves[measure], log)
        finite = values[np.isfinite(values)]
        low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 1.0)
        return cls(float(curves["step"].max()) if len(curves) else 1.0, low, high, log)

    def x(self, steps: ArrayLike) -> NDArray[np.float64]:
        return PAD + np.asarray(steps, float) / max(self.last_step, 1.0) * (WIDTH - 2 * PAD)

    def y(self, values: ArrayLike) -> NDArray[np.float64]:
        share = (_plottable(values, self.log) - self.low) / max(self.high - self.low, 1e-12)
        return HEIGHT - PAD - share * (HEIGHT - 2 * PAD)


def sparkline(
    steps: ArrayLike, values: ArrayLike, scale: Scale, marks: Iterable[tuple[str, int | None]] = ()
) -> Markup:
    """SVG of one curve; ``marks`` are (CSS class, step) of vertical lines, a None step draws nothing. Gaps stay gaps."""
    x, y = scale.x(steps), scale.y(values)
    seen = np.isfinite(y)
    path = " ".join(
        f"{'L' if i and seen[i - 1] else 'M'}{x[i]:.1f} {y[i]:.1f}" for i in range(len(x)) if seen[i]
    )
    lines = "".join(
        f'<line class="{kind}" x1="{at:.1f}" x2="{at:.1f}" y1="0" y2="{HEIGHT:g}"/>'
        for kind, step in marks
        if step is not None
        for at in [float(scale.x(step))]
    )
    box = f'viewBox="0 0 {WIDTH:g} {HEIGHT:g}"'
    return Markup(
        f'<svg class="spark" {box} preserveAspectRatio="none" aria-hidden="true">{lines}<path d="{path}"/></svg>'
    )


def _plottable(values: ArrayLike, log: bool) -> NDArray[np.float64]:
    array = np.asarray(values, float)
    if not log:
        return array
    return np.log10(array, where=array > 0, out=np.full(array.shape, np.nan))
