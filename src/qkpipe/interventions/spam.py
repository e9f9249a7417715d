"""SPAM as an arm (the object is :class:`qkpipe.rivals.SPAM`)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from qkpipe.config.base import Mechanism
from qkpipe.errors import BadInput
from qkpipe.hooks import Hook


class SPAM(Mechanism):
    """``spam``: clips gradient spikes by element, resets Adam's moments every ``reset_every`` steps and re-warms after it.

    ``steps.lr`` is the schedule's; the re-warm multiplies it after a ``moments_reset`` event.
    """

    kind: Literal["spam"] = "spam"
    spike: Annotated[float, Field(gt=0)] = 5000.0
    reset_every: Annotated[int, Field(ge=1)] = 500
    rewarm: Annotated[int, Field(ge=0)] = 150
    settle: Annotated[int, Field(ge=0)] = 20

    def label(self) -> str:
        return f"spam({self.spike:g},{self.reset_every})"

    def check(self, run: Any) -> None:
        if run.optimizer.name != "adamw":
            raise BadInput(
                f"interventions.kind: 'spam' acts on Adam's moments; optimizer.name must be adamw, got {run.optimizer.name!r}"
            )

    def build(self, context: Any) -> Hook:
        return _SPAMHook(context, self)


class _SPAMHook(Hook):
    def __init__(self, context: Any, config: SPAM) -> None:
        from qkpipe.rivals import SPAM as Spam

        self._context, self._step = context, 0
        self._spam = Spam(context.optimizer, on_reset=self._reset, **config.model_dump(exclude={"kind"}))

    def begin_step(self, step: int) -> None:
        self._step = step

    def _reset(self) -> None:
        self._context.event(self._step, "moments_reset", rewarm=self._spam.rewarm)

    def state_dict(self) -> dict[str, Any]:
        return self._spam.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._spam.load_state_dict(state)
