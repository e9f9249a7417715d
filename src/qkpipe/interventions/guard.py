"""QK-Guard as an arm of the study (the library is :mod:`qkpipe.guard`)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from qkpipe.config.base import Mechanism
from qkpipe.hooks import Hook


class Guard(Mechanism):
    """``guard``: past ``threshold``, latch per-head QK normalisation on from the next forward. ``mode: log`` only records."""

    kind: Literal["guard"] = "guard"
    threshold: Annotated[float, Field(gt=0)] = 30.0
    mode: Literal["act", "log"] = "act"
    every: Annotated[int, Field(ge=1)] = 1

    @property
    def sharded(self) -> bool:
        return True

    def label(self) -> str:
        kind = "guard" if self.mode == "act" else "guard-log"
        return f"{kind}({self.threshold:g})" + ("" if self.every == 1 else f"/{self.every}")

    def build(self, context: Any) -> Hook:
        return GuardHook(context, self)


class GuardHook(Hook):
    """Drives a :class:`qkpipe.guard.QKGuard` by optimizer steps and records its firing as an event."""

    def __init__(self, context: Any, config: Guard) -> None:
        from qkpipe.guard import QKGuard

        self._context = context
        self.guard = QKGuard(
            context.model,
            config.threshold,
            config.mode,
            every=config.every,
            explicit_steps=True,
            on_fire=self._record,
        )

    def _record(self, firing: Any) -> None:
        detail = {"layer": firing.layer, "head": firing.head, "logit": firing.logit}
        self._context.event(
            firing.step, "guard_fired", threshold=self.guard.threshold, mode=self.guard.mode, **detail
        )

    @property
    def active(self) -> bool:
        return self.guard.active

    @property
    def fire_step(self) -> int | None:
        return self.guard.firing.step if self.guard.firing else None

    def end_step(self, step: int) -> None:
        self.guard.step()

    def state_dict(self) -> dict[str, Any]:
        return self.guard.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.guard.load_state_dict(state)
