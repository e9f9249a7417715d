"""ZClip as an arm (the object is :class:`qkpipe.rivals.ZClip`)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from qkpipe.config.base import Mechanism
from qkpipe.hooks import Hook
from qkpipe.interventions.gradient_clip import GradientClipHook, check_no_other_clip


class ZClip(Mechanism):
    """``zclip``: clips gradient norms that are outliers of their own history, in the place of the run's global clip."""

    kind: Literal["zclip"] = "zclip"
    z_threshold: Annotated[float, Field(gt=0)] = 2.5
    decay: Annotated[float, Field(ge=0, lt=1)] = 0.97
    warmup: Annotated[int, Field(ge=2)] = 25
    max_norm: Annotated[float, Field(gt=0)] | None = 1.0

    def check(self, run: Any) -> None:
        check_no_other_clip(self.kind, run)

    def build(self, context: Any) -> Hook:
        from qkpipe.rivals import ZClip as Clip

        return GradientClipHook(Clip(context.optimizer, **self.model_dump(exclude={"kind"})))
