"""AdaGC (Wang et al., arXiv 2502.11034): clip every tensor's gradient by its own history."""

from __future__ import annotations

import math
from typing import Any

from torch.optim import Optimizer

from qkpipe.errors import BadInput
from qkpipe.rivals.base import Rival, clip_to, norm, usable


class AdaGC(Rival):
    """Clip each tensor's gradient g_i to ``relative`` * gamma_i, gamma_i the exponential average (``decay``) of its clipped norm.

    In the first ``warmup`` steps the global norm is clipped to ``absolute`` instead, and gamma_i is the smallest clipped norm so
    far. A gradient that is zero or not finite is left alone and not learned from.

    Raises:
        BadInput: an option out of range.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        relative: float = 1.05,
        decay: float = 0.98,
        warmup: int = 100,
        absolute: float = 1.0,
    ) -> None:
        if not relative > 0 or not 0 <= decay < 1 or warmup < 1 or not absolute > 0:
            raise BadInput(
                f"AdaGC: relative={relative!r}, decay={decay!r}, warmup={warmup!r}, absolute={absolute!r}; "
                "allowed: above 0, 0 to below 1, 1 or more, above 0"
            )
        super().__init__(optimizer)
        self.relative, self.decay, self.warmup, self.absolute = relative, decay, warmup, absolute
        self.clipped_norm: float | None = None
        self._step = 0
        self._gamma: dict[int, float] = {}  # by the parameter's place in the optimizer

    def before_step(self) -> None:
        if self._step < self.warmup:
            gradients = self.gradients()
            size = norm(gradients)
            if usable(size):
                clip_to(gradients, size, self.absolute)
        clipped = [self._tensor(index, g) for index, g in self._places()]
        self.clipped_norm = math.sqrt(sum(size * size for size in clipped))
        self._step += 1

    def _places(self) -> list[tuple[int, Any]]:
        everything = (p for group in self.optimizer.param_groups for p in group["params"])
        return [(index, p.grad) for index, p in enumerate(everything) if p.grad is not None]

    def _tensor(self, index: int, gradient: Any) -> float:
        """Clip one tensor's gradient and learn from it; returns its norm then."""
        size, gamma = norm([gradient]), self._gamma.get(index)
        if not usable(size):
            return size
        if self._step < self.warmup or gamma is None:
            self._gamma[index] = size if gamma is None else min(gamma, size)
            return size
        size = clip_to([gradient], size, self.relative * gamma)
        self._gamma[index] = self.decay * gamma + (1 - self.decay) * size
        return size

    def state_dict(self) -> dict[str, Any]:
        return {"step": self._step, "gamma": dict(self._gamma)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._step, self._gamma = state["step"], dict(state["gamma"])
