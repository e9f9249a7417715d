"""Locus controls on the optimizer's memory: is the runaway carried by the momentum?"""

from __future__ import annotations

from typing import Any, Literal

from qkpipe.errors import BadInput
from qkpipe.faults.quantizer import Routes
from qkpipe.hooks import Hook
from qkpipe.interventions.trigger import Triggered, TriggeredHook
from qkpipe.lazy import torch


class Moments(Triggered):
    """``moments``: once, before the first update after firing, change what the optimizer remembers of the named routes.

    ``reset`` forgets: both of Adam's moments and its bias correction, or SGD's momentum, start anew. ``flip`` changes the sign of
    the first moment; ``shuffle`` permutes its elements within each tensor, so that its size stays and its direction goes.
    The second moment keeps its place in both.
    """

    kind: Literal["moments"] = "moments"
    action: Literal["reset", "flip", "shuffle"]
    routes: Routes

    def label(self) -> str:
        return self.named(f"moments_{self.action}({'+'.join(self.routes)})")

    def check(self, run: Any) -> None:
        if self.action != "reset" and run.optimizer.name == "sgd" and run.optimizer.momentum == 0:
            raise BadInput(
                f"interventions.action: {self.action!r} needs a first moment; optimizer.momentum must be above 0"
            )

    def build(self, context: Any) -> Hook:
        return _MomentsHook(context, self)


class _MomentsHook(TriggeredHook):
    def before_update(self, step: int) -> None:
        if not self.fired_just_before(step):
            return
        for index, (_, parameter) in enumerate(self.context.parameters(self.config.routes)):
            state = self.context.optimizer.state[parameter]
            if self.config.action == "reset":
                state.clear()  # torch starts an empty state anew
                continue
            moment = state["exp_avg" if "exp_avg" in state else "momentum_buffer"]
            if self.config.action == "flip":
                moment.neg_()
            else:
                moment.copy_(moment.flatten()[self._permutation(moment, index)].view_as(moment))

    def _permutation(self, moment: Any, index: int) -> Any:
        from qkpipe.numerics.counter_rng import fold_in

        generator = torch.Generator().manual_seed(fold_in(self.context.run.seed, index))
        return torch.randperm(moment.numel(), generator=generator).to(moment.device)
