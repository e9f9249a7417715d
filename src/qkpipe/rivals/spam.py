"""SPAM, Spike-Aware Adam with Momentum Reset (Huang et al., arXiv 2501.06842), on top of torch's Adam or AdamW."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from qkpipe.errors import BadInput
from qkpipe.rivals.base import Rival

FLOOR = 0.01
"""Share of the learning rate right after a reset, where the cosine re-warm starts (the authors' code)."""


class SPAM(Rival):
    """Clip gradient spikes by element, reset Adam's moments now and then, and re-warm the learning rate after a reset.

    An element with g^2 > ``spike`` * v, v Adam's second moment before the step, becomes sign(g) sqrt(``spike`` * v). Both moments
    are set to zero in every ``reset_every``-th step, counted from 1, before it is made (Adam's bias correction goes on counting);
    the learning rate of the c-th step from then on (c = 0 at the reset) is multiplied by 1 - 0.99 (1 + cos(pi c / (N + 1))) / 2
    while c < N = ``rewarm``. As in the authors' code, no element is clipped in the first ``settle`` steps of training and after a
    reset, where v is not yet an average.

    Args:
        on_reset: called after each reset.

    Raises:
        BadInput: not an optimizer with Adam's moments, or an option out of range.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        spike: float = 5000.0,
        reset_every: int = 500,
        rewarm: int = 150,
        settle: int = 20,
        on_reset: Callable[[], None] | None = None,
    ) -> None:
        if any("betas" not in group for group in optimizer.param_groups):
            raise BadInput(f"SPAM: {type(optimizer).__name__} has no Adam moments; allowed: Adam, AdamW")
        if not spike > 0 or reset_every < 1 or rewarm < 0 or settle < 0:
            raise BadInput(
                f"SPAM: spike={spike!r}, reset_every={reset_every!r}, rewarm={rewarm!r}, settle={settle!r}; "
                "allowed: above 0, 1 or more, 0 or more, 0 or more"
            )
        super().__init__(optimizer)
        self.spike, self.reset_every, self.rewarm, self.settle = spike, reset_every, rewarm, settle
        self.on_reset = on_reset
        self._step = 0
        self._scheduled: list[float] | None = None

    @property
    def since_reset(self) -> int | None:
        """Steps since the latest reset, 0 in the step that made it; None before the first."""
        return self._step % self.reset_every if self._step >= self.reset_every else None

    @property
    def lr_scale(self) -> float:
        """What the learning rate of the current step is multiplied by."""
        since = self.since_reset
        if since is None or since >= self.rewarm:
            return 1.0
        return 1 - (1 - FLOOR) * (1 + math.cos(math.pi * since / (self.rewarm + 1))) / 2

    @torch.no_grad()
    def before_step(self) -> None:
        self._step += 1
        if self.since_reset == 0:
            for p in self.parameters():
                for moment in ("exp_avg", "exp_avg_sq"):
                    if moment in self.optimizer.state[p]:
                        self.optimizer.state[p][moment].zero_()
            if self.on_reset is not None:
                self.on_reset()
        if self._step % self.reset_every >= self.settle:
            for p in self.parameters():
                if "exp_avg_sq" in self.optimizer.state[p]:
                    square = self.spike * self.optimizer.state[p]["exp_avg_sq"]
                    p.grad.copy_(torch.where(p.grad**2 > square, p.grad.sign() * square.sqrt(), p.grad))
        self._scheduled = [group["lr"] for group in self.optimizer.param_groups]
        for group in self.optimizer.param_groups:
            group["lr"] = group["lr"] * self.lr_scale

    def after_step(self) -> None:
        """Give the schedule its learning rate back."""
        for group, lr in zip(self.optimizer.param_groups, self._scheduled, strict=True):
            group["lr"] = lr

    def state_dict(self) -> dict[str, Any]:
        return {"step": self._step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._step = state["step"]
