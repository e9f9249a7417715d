"""Locus control: gradients clipped to a smaller global norm."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from qkpipe.hooks import Hook
from qkpipe.interventions.trigger import Triggered, TriggeredHook
from qkpipe.lazy import torch


class TightClip(Triggered):
    """``tight_clip``: once fired, the gradient's global norm is clipped to ``limit``, after the run's own clip."""

    kind: Literal["tight_clip"] = "tight_clip"
    limit: Annotated[float, Field(gt=0)] = 0.1

    def label(self) -> str:
        return self.named(f"tight_clip({self.limit:g})")

    def build(self, context: Any) -> Hook:
        return _TightClipHook(context, self)


class _TightClipHook(TriggeredHook):
    def before_update(self, step: int) -> None:
        if self.active:
            norm = float(torch.nn.utils.clip_grad_norm_(self.context.model.parameters(), self.config.limit))
            self.clipped_norm = min(norm, self.config.limit)
