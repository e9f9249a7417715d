"""Generic stressor: weights that do not learn (study.md, source 6)."""

from __future__ import annotations

from typing import Any, Literal

from qkpipe.config.base import Mechanism
from qkpipe.faults.quantizer import Routes
from qkpipe.hooks import Hook


class FrozenWeights(Mechanism):
    """``frozen``: the named routes stay at their initial weights; their gradients count in no norm and no moment."""

    kind: Literal["frozen"] = "frozen"
    routes: Routes

    def label(self) -> str:
        return f"frozen({'+'.join(self.routes)})"

    def build(self, context: Any) -> Hook:
        return _FrozenWeightsHook([parameter for _, parameter in context.parameters(self.routes)])


class _FrozenWeightsHook(Hook):
    def __init__(self, parameters: list[Any]) -> None:
        self._parameters = parameters

    def reduced_gradient(self, step: int) -> None:
        for parameter in self._parameters:
            parameter.grad.zero_()

    def before_update(self, step: int) -> None:
        for parameter in self._parameters:
            parameter.grad = None  # the optimizer passes it by, weight decay included
