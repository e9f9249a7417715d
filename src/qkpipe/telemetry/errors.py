"""Gradient errors by layer and route: their size, mean, and temporal sign-coherence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

EMA = 0.9


@dataclass
class _Track:
    signs: Tensor
    coherence: float | None = None
    norm: float = 0.0
    mean: float = 0.0
    step: int = -1


class GradientErrors:
    """Keeps, for every parameter, the running coherence of the error that faults put into its gradient.

    Errors of one parameter and step add up: two faults on a route leave the sum of what they did. Coherence is the EMA (0.9)
    of mean(sign(E_t) * sign(E_t-1)): 1 for a fixed sign pattern, about 0 for one redrawn every step. A parameter's track
    starts with its first error; an element without error, or with NaN, has sign 0.
    """

    def __init__(self) -> None:
        self._tracks: dict[str, _Track] = {}
        self._latest: dict[
            str, tuple[Tensor, _Track | None]
        ] = {}  # this step's error, and the track before it

    @torch.no_grad()
    def observe(self, step: int, name: str, error: Tensor) -> None:
        """Add ``error``, what a fault did to the gradient of parameter ``name`` in ``step``."""
        before = self._tracks.get(name)
        if self.seen(name, step):
            earlier, before = self._latest[name]
            error = earlier + error
        self._record(step, name, error, before)

    @torch.no_grad()
    def observe_total(self, step: int, name: str, error: Tensor) -> None:
        """Record ``error`` = faulty - clean gradient: all that faults did in ``step``, in place of what they said themselves."""
        before = self._latest[name][1] if self.seen(name, step) else self._tracks.get(name)
        self._record(step, name, error, before)

    def _record(self, step: int, name: str, error: Tensor, before: _Track | None) -> None:
        # A NaN has no sign: one bad step must not turn the running coherence into NaN for good.
        signs = error.sign().nan_to_num(nan=0.0)
        coherence = None
        if before is not None:
            agreement = float((signs * before.signs).mean())
            previous = before.coherence
            coherence = agreement if previous is None else EMA * previous + (1 - EMA) * agreement
        self._latest[name] = error, before
        self._tracks[name] = _Track(signs, coherence, float(error.norm()), float(error.mean()), step)

    def row(self, step: int, names: list[str], sizes: list[int]) -> dict[str, float | None]:
        """error_norm, error_mean and coherence of the parameters ``names`` together; null where ``step`` saw no error.

        The mean and the coherence weigh each parameter by its number of elements.
        """
        seen = [(self._tracks[n], size) for n, size in zip(names, sizes, strict=True) if self.seen(n, step)]
        if not seen:
            return {"error_norm": None, "error_mean": None, "coherence": None}
        total = sum(size for _, size in seen)
        known = [(t.coherence, size) for t, size in seen if t.coherence is not None]
        return {
            "error_norm": sum(t.norm**2 for t, _ in seen) ** 0.5,
            "error_mean": sum(t.mean * size for t, size in seen) / total,
            "coherence": sum(c * size for c, size in known) / sum(s for _, s in known) if known else None,
        }

    def seen(self, name: str, step: int) -> bool:
        """Whether an error of this parameter was recorded in ``step``."""
        return name in self._tracks and self._tracks[name].step == step

    def state_dict(self) -> dict[str, Any]:
        return {name: vars(track).copy() for name, track in self._tracks.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._tracks = {name: _Track(**values) for name, values in state.items()}
