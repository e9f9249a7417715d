"""Locus control: a lower learning rate everywhere."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from qkpipe.hooks import Hook
from qkpipe.interventions.trigger import Triggered, TriggeredHook


class LearningRateCut(Triggered):
    """``lr_cut``: once fired, the scheduled learning rate times ``factor``, from the next update on."""

    kind: Literal["lr_cut"] = "lr_cut"
    factor: Annotated[float, Field(gt=0, lt=1)] = 0.1

    def label(self) -> str:
        return self.named(f"lr_cut({self.factor:g})")

    def build(self, context: Any) -> Hook:
        return _LearningRateCutHook(context, self)


class _LearningRateCutHook(TriggeredHook):
    def before_update(self, step: int) -> None:
        if self.active:
            for group in self.context.optimizer.param_groups:
                group["lr"] *= self.config.factor
