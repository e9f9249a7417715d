"""Locus control: the guard's own action on the values instead of the queries and keys."""

from __future__ import annotations

from typing import Any, Literal

from qkpipe.hooks import Hook
from qkpipe.interventions.trigger import Triggered, TriggeredHook


class ValueNorm(Triggered):
    """``value_norm``: once fired, each head's values have unit RMS over the head dimension, without parameters, in fp32."""

    kind: Literal["value_norm"] = "value_norm"

    def label(self) -> str:
        return self.named("value_norm")

    def build(self, context: Any) -> Hook:
        return _ValueNormHook(context, self)


class _ValueNormHook(TriggeredHook):
    def __init__(self, context: Any, config: ValueNorm) -> None:
        super().__init__(context, config)
        for attention in context.model.attentions:
            attention.W_V.register_forward_hook(self._make(attention.d_head))

    def _make(self, d_head: int) -> Any:
        from qkpipe.model.qk_norm import unit_rms

        def normalise(module: Any, inputs: Any, v_BTW: Any) -> Any:
            if not self.active:
                return v_BTW
            return unit_rms(v_BTW.unflatten(-1, (-1, d_head))).flatten(-2)

        return normalise
