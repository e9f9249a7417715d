"""ZClip (Kumar et al., arXiv 2504.02507): clip gradient norms that are outliers of their own recent history."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from qkpipe.errors import BadInput
from qkpipe.rivals.base import Rival, clip_to, norm, usable


class ZClip(Rival):
    """Clip the global gradient norm n to mu + z* sd / (z / z*) where z = (n - mu) / sd exceeds z* (``z_threshold``).

    mu and sd^2 are exponential averages (``decay``) of the norm as clipped by that rule and of its squared distance from the new
    mu; they start from the mean and the variance of the first ``warmup`` norms, which are not judged. ``max_norm`` is the
    authors' constant clip on top, from the first step on; None for none. A norm that is zero or not finite is left alone and not
    learned from.

    Raises:
        BadInput: an option out of range.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        z_threshold: float = 2.5,
        decay: float = 0.97,
        warmup: int = 25,
        max_norm: float | None = 1.0,
    ) -> None:
        if not z_threshold > 0 or not 0 <= decay < 1 or warmup < 2:
            raise BadInput(
                f"ZClip: z_threshold={z_threshold!r}, decay={decay!r}, warmup={warmup!r}; "
                "allowed: above 0, 0 to below 1, 2 or more"
            )
        super().__init__(optimizer)
        self.z_threshold, self.decay, self.warmup, self.max_norm = z_threshold, decay, warmup, max_norm
        self.clipped_norm: float | None = None
        self._first: list[float] = []
        self._mean = self._variance = 0.0

    def before_step(self) -> None:
        gradients = self.gradients()
        size = norm(gradients)
        self.clipped_norm = size
        if usable(size):
            limit = self._judge(size)
            self.clipped_norm = clip_to(
                gradients, size, limit if self.max_norm is None else min(limit, self.max_norm)
            )

    def _judge(self, size: float) -> float:
        """The norm that the rule allows this gradient; learns from it."""
        if len(self._first) < self.warmup:
            self._first.append(size)
            self._mean = sum(self._first) / len(self._first)
            self._variance = sum((x - self._mean) ** 2 for x in self._first) / len(self._first)
            return size
        sd = self._variance**0.5
        excess = size - self._mean
        # z > z*, and the limit, written without dividing by an sd that may be 0: then whatever exceeds mu is clipped to it.
        outlier = excess > self.z_threshold * sd
        allowed = self._mean + (self.z_threshold * sd) ** 2 / excess if outlier else size
        self._mean = self.decay * self._mean + (1 - self.decay) * allowed
        self._variance = self.decay * self._variance + (1 - self.decay) * (allowed - self._mean) ** 2
        return allowed

    def state_dict(self) -> dict[str, Any]:
        return {"first": list(self._first), "mean": self._mean, "variance": self._variance}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._first, self._mean, self._variance = list(state["first"]), state["mean"], state["variance"]
