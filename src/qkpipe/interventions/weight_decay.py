"""Locus control: weight decay where the queries and keys are not."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from qkpipe.faults.quantizer import Routes
from qkpipe.hooks import Hook
from qkpipe.interventions.trigger import Triggered, TriggeredHook
from qkpipe.lazy import torch


class WeightDecay(Triggered):
    """``weight_decay``: once fired, the named routes' matrices shrink by a share lr * ``rate`` after every optimizer step,
    beside the optimizer's own decay.
    """

    kind: Literal["weight_decay"] = "weight_decay"
    rate: Annotated[float, Field(gt=0)] = 1.0
    routes: Routes

    def label(self) -> str:
        return self.named(f"weight_decay({self.rate:g},{'+'.join(self.routes)})")

    def build(self, context: Any) -> Hook:
        return _WeightDecayHook(context, self)


class _WeightDecayHook(TriggeredHook):
    def __init__(self, context: Any, config: WeightDecay) -> None:
        super().__init__(context, config)
        self._weights = [p for _, p in context.parameters(config.routes) if p.dim() == 2]

    def after_update(self, step: int) -> None:
        if self.active:
            lr = self.context.optimizer.param_groups[0]["lr"]
            with torch.no_grad():
                torch._foreach_mul_(self._weights, 1 - lr * self.config.rate)
