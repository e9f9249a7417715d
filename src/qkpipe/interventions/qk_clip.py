"""QK-Clip as an arm (the object is :class:`qkpipe.rivals.QKClip`)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from qkpipe.config.base import Mechanism
from qkpipe.errors import BadInput
from qkpipe.hooks import Hook


class QKClip(Mechanism):
    """``qk_clip``: after each step W_Q and W_K of a head with S_max > ``threshold`` are scaled by sqrt(threshold / S_max)."""

    kind: Literal["qk_clip"] = "qk_clip"
    threshold: Annotated[float, Field(gt=0)] = 100.0

    def label(self) -> str:
        return f"qk_clip({self.threshold:g})"

    def check(self, run: Any) -> None:
        if run.model.qk_norm != "none":
            raise BadInput(
                f"interventions.kind: 'qk_clip' cannot reach logits under model.qk_norm={run.model.qk_norm!r}; allowed: none"
            )

    def build(self, context: Any) -> Hook:
        return _QKClipHook(context, self)


class _QKClipHook(Hook):
    """Its first clipping is its firing."""

    def __init__(self, context: Any, config: QKClip) -> None:
        from qkpipe.rivals import QKClip as Clip

        self._context, self._step = context, 0
        self._clip = Clip(context.model, context.optimizer, threshold=config.threshold, on_clip=self._clipped)

    def begin_step(self, step: int) -> None:
        self._step = step

    def _clipped(self, layer: int, peak_H: Any, gamma_H: Any) -> None:
        if self.fire_step is None:
            self.fire_step = self._step
            detail = {"layer": layer, "head": int(gamma_H.argmin()), "logit": float(peak_H.max())}
            self._context.event(self._step, "qk_clip_fired", threshold=self._clip.threshold, **detail)

    @property
    def active(self) -> bool:
        return self.fire_step is not None

    def state_dict(self) -> dict[str, Any]:
        return {"fire_step": self.fire_step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.fire_step = state["fire_step"]
