"""Clean splice: a route's gradient comes from a clean forward and backward on the same weights and batch (paper section 3)."""

from __future__ import annotations

from typing import Any, Literal

from qkpipe.config.base import Mechanism
from qkpipe.faults.quantizer import Routes
from qkpipe.hooks import Hook


class Splice(Mechanism):
    """``splice``: the named routes are clean. The clean pass has the arm's own attention structure with every quantity in fp32
    and no gradient fault, so that over clean attention it changes no bit of another route's gradient.
    """

    kind: Literal["splice"] = "splice"
    routes: Routes

    @property
    def passes(self) -> int:
        return 1

    @property
    def sharded(self) -> bool:
        return True

    def label(self) -> str:
        return f"splice({'+'.join(self.routes)})"

    def build(self, context: Any) -> Hook:
        return _SpliceHook(context, {name for name, _ in context.parameters(self.routes)})


class FaultOnly(Mechanism):
    """``fault_only``: the complement; only the named routes keep their faulty gradient, all else is clean."""

    kind: Literal["fault_only"] = "fault_only"
    routes: Routes

    @property
    def passes(self) -> int:
        return 1

    @property
    def sharded(self) -> bool:
        return True

    def label(self) -> str:
        return f"fault_only({'+'.join(self.routes)})"

    def build(self, context: Any) -> Hook:
        faulty = {name for name, _ in context.parameters(self.routes)}
        return _SpliceHook(context, {name for name, _ in context.model.named_parameters()} - faulty)


class _SpliceHook(Hook):
    def __init__(self, context: Any, cleaned: set[str]) -> None:
        self._context, self._cleaned = context, cleaned

    def splice(self, step: int) -> None:
        clean, whole = self._context.clean_gradients(), self._context.ranks.whole
        for name, parameter in self._context.model.named_parameters():
            # The clean pass shows the true error of every route, cleaned or not.
            self._context.errors.observe_total(step, name, whole(parameter.grad) - whole(clean[name]))
            if name in self._cleaned:
                parameter.grad.copy_(clean[name])
