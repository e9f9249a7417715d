"""The live trigger that locus controls share with QK-Guard: the same sensor, the same threshold, the same firing step."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from qkpipe.config.base import Mechanism
from qkpipe.hooks import Hook
from qkpipe.interventions.guard import Guard


class Triggered(Mechanism):
    """A control that is dormant until the largest attention logit passes ``threshold``, and acts from the next forward on.

    It senses with a QK-Guard in log mode, so that controls, guard and log arms that train alike until then fire at one step.
    """

    threshold: Annotated[float, Field(gt=0)] = 30.0
    every: Annotated[int, Field(ge=1)] = 1

    def named(self, action: str) -> str:
        return f"{action}@{self.threshold:g}"


class TriggeredHook(Hook):
    """A hook that is ``active`` once its trigger has fired. ``extra_state`` is a subclass's own part of the checkpoint."""

    def __init__(self, context: Any, config: Triggered) -> None:
        self.context, self.config = context, config
        self._sensor = Guard(threshold=config.threshold, every=config.every, mode="log").build(context)

    @property
    def active(self) -> bool:
        return self._sensor.fire_step is not None

    @property
    def fire_step(self) -> int | None:
        return self._sensor.fire_step

    def fired_just_before(self, step: int) -> bool:
        """Whether ``step`` is the first one after firing."""
        return self.active and step == self.fire_step + 1

    def end_step(self, step: int) -> None:
        self._sensor.end_step(step)

    def extra_state(self) -> dict[str, Any]:
        return {}

    def load_extra_state(self, state: dict[str, Any]) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        return {"sensor": self._sensor.state_dict(), **self.extra_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._sensor.load_state_dict(state["sensor"])
        self.load_extra_state(state)
