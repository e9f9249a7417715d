"""AdaGC as an arm (the object is :class:`qkpipe.rivals.AdaGC`)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from qkpipe.config.base import Mechanism
from qkpipe.hooks import Hook
from qkpipe.interventions.gradient_clip import GradientClipHook, check_no_other_clip


class AdaGC(Mechanism):
    """``adagc``: clips every tensor's gradient by its own history, in the place of the run's global clip."""

    kind: Literal["adagc"] = "adagc"
    relative: Annotated[float, Field(gt=0)] = 1.05
    decay: Annotated[float, Field(ge=0, lt=1)] = 0.98
    warmup: Annotated[int, Field(ge=1)] = 100
    absolute: Annotated[float, Field(gt=0)] = 1.0

    def check(self, run: Any) -> None:
        check_no_other_clip(self.kind, run)

    def build(self, context: Any) -> Hook:
        from qkpipe.rivals import AdaGC as Clip

        return GradientClipHook(Clip(context.optimizer, **self.model_dump(exclude={"kind"})))
