"""What the rivals share: they act inside ``optimizer.step()``, right before or right after the update."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class Rival:
    """Attached to an optimizer until :meth:`detach`. Whatever it changes it changes in place."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self._handles: list[Any] = [
            optimizer.register_step_pre_hook(lambda *_: self.before_step()),
            optimizer.register_step_post_hook(lambda *_: self.after_step()),
        ]

    def before_step(self) -> None:
        """Sees the gradients that the optimizer is about to use."""

    def after_step(self) -> None:
        """Sees the updated weights."""

    def detach(self) -> None:
        """Take it off: the optimizer is what it was."""
        for handle in self._handles:
            handle.remove()

    def parameters(self) -> Iterator[Tensor]:
        """Parameters that have a gradient, in the optimizer's order."""
        for group in self.optimizer.param_groups:
            yield from (p for p in group["params"] if p.grad is not None)

    def gradients(self) -> list[Tensor]:
        return [p.grad for p in self.parameters()]


def norm(tensors: list[Tensor]) -> float:
    """Euclidean norm over all tensors, shards on other ranks included (DTensor); 0 without any."""
    if not tensors:
        return 0.0
    total = torch.nn.utils.get_total_norm(tensors)
    return float(total.full_tensor() if hasattr(total, "full_tensor") else total)


def clip_to(tensors: list[Tensor], size: float, limit: float) -> float:
    """Scale tensors of joint norm ``size`` down to ``limit``, in place; returns their norm now."""
    if size <= limit:
        return size
    torch._foreach_mul_(tensors, limit / size)
    return limit


def usable(size: float) -> bool:
    """Whether a gradient norm says anything: neither NaN nor infinite, nor 0 as of gradients that were thrown away."""
    return math.isfinite(size) and size > 0
