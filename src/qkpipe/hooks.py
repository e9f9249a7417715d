"""Where mechanisms enter a step, in this order (study.md, order inside a step).

begin_step        before the forward; sees the pre-step weights
micro_gradient    a micro-batch's own gradients, before accumulation and all-reduce (``pre_reduction`` faults)
reduced_gradient  the accumulated, reduced gradients (``post_reduction`` and injected faults)
splice            replaces gradients by clean ones
(global clip)
before_update     what the optimizer is about to use
(optimizer)
after_update      the realised update (probes)
end_step          guards: what they decide holds from the next forward on
"""

from __future__ import annotations

from typing import Any


class Hook:
    """A mechanism at work. Every stage does nothing unless overridden; gradients are changed in place in ``parameter.grad``."""

    active = False
    """Whether an intervention has switched itself on (``steps.guard_active``)."""

    fire_step: int | None = None
    """Step at which an intervention's trigger fired."""

    clipped_norm: float | None = None
    """The gradient's global norm after this mechanism's own clipping, if it has any (``steps.clipped_norm``)."""

    def begin_step(self, step: int) -> None: ...

    def micro_gradient(self, step: int, micro: int) -> None: ...

    def reduced_gradient(self, step: int) -> None: ...

    def splice(self, step: int) -> None: ...

    def before_update(self, step: int) -> None: ...

    def after_update(self, step: int) -> None: ...

    def end_step(self, step: int) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        """State that changes later bits; empty for a stateless mechanism."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...
