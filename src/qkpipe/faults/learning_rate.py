"""Generic stressor: a hot learning rate (study.md, source 6)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from qkpipe.config.base import Mechanism
from qkpipe.hooks import Hook


class LearningRate(Mechanism):
    """``learning_rate``: the scheduled learning rate times ``factor`` from the first step on, whatever the scale's is."""

    kind: Literal["learning_rate"] = "learning_rate"
    factor: Annotated[float, Field(gt=0)]

    @property
    def sharded(self) -> bool:
        return True

    def label(self) -> str:
        return f"lr_x{self.factor:g}"

    def build(self, context: Any) -> Hook:
        return _LearningRateHook(context.optimizer, self.factor)


class _LearningRateHook(Hook):
    def __init__(self, optimizer: Any, factor: float) -> None:
        self._optimizer, self._factor = optimizer, factor

    def before_update(self, step: int) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] *= self._factor
