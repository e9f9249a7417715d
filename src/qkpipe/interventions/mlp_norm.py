"""Locus control: normalisation of what the MLPs write into the residual stream."""

from __future__ import annotations

from typing import Any, Literal

from qkpipe.hooks import Hook
from qkpipe.interventions.trigger import Triggered, TriggeredHook


class MLPNorm(Triggered):
    """``mlp_norm``: once fired, every MLP's output has unit RMS over the model's width, without parameters, in fp32."""

    kind: Literal["mlp_norm"] = "mlp_norm"

    def label(self) -> str:
        return self.named("mlp_norm")

    def build(self, context: Any) -> Hook:
        return _MLPNormHook(context, self)


class _MLPNormHook(TriggeredHook):
    def __init__(self, context: Any, config: MLPNorm) -> None:
        super().__init__(context, config)
        for block in context.model.blocks:
            block.mlp.register_forward_hook(self._normalise)

    def _normalise(self, module: Any, inputs: Any, out_BTD: Any) -> Any:
        from qkpipe.model.qk_norm import unit_rms

        return unit_rms(out_BTD) if self.active else out_BTD
