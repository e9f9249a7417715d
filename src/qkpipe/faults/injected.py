"""Injected error: the size of a quantizer's own error with a chosen structure in time (paper section 4.1, entry)."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import Field

from qkpipe.config.base import Mechanism
from qkpipe.errors import BadInput
from qkpipe.faults.quantizer import QuantizerFormat, Routes
from qkpipe.hooks import Hook
from qkpipe.lazy import torch


class Injected(Mechanism):
    """``injected``: with E = Q(g) - g of each gradient matrix, add gain * X, |X| = |E| in Frobenius norm, X one of

    ``native`` E; ``coherent`` |E|*s, one sign pattern s for the whole run; ``resampled`` |E|*s_t, redrawn every step; ``held``
    redrawn every ``hold`` steps; ``mean_removed`` E - mean(E); ``mean_only`` mean(E) everywhere; ``dc`` one positive constant.
    """

    kind: Literal["injected"] = "injected"
    routes: Routes
    structure: Literal["native", "coherent", "resampled", "held", "mean_removed", "mean_only", "dc"]
    hold: Annotated[int, Field(ge=1)] | None = None
    gain: Annotated[float, Field(gt=0)] = 1.0
    format: QuantizerFormat = QuantizerFormat()

    def label(self) -> str:
        structure = f"held{self.hold}" if self.structure == "held" else self.structure
        gain = "" if self.gain == 1.0 else f"x{self.gain:g}"
        return f"{structure}({'+'.join(self.routes)}){gain}"

    def check(self, run: Any) -> None:
        if (self.structure == "held") != (self.hold is not None):
            raise BadInput(
                f"faults.hold: goes with structure 'held' and only with it "
                f"(got structure {self.structure!r}, hold {self.hold!r})"
            )

    def build(self, context: Any) -> Hook:
        return _InjectedHook(context, self)


class _InjectedHook(Hook):
    def __init__(self, context: Any, config: Injected) -> None:
        self._context, self._config = context, config
        self._targets = [(n, p) for n, p in context.parameters(config.routes) if p.dim() == 2]
        hold = {"coherent": None, "resampled": 1, "held": config.hold}
        self._signed = config.structure in hold
        self._hold = hold.get(config.structure)
        self._signs: dict[int, tuple[int, Any]] = {}

    def reduced_gradient(self, step: int) -> None:
        from qkpipe.numerics.counter_rng import fold_in

        for index, (name, parameter) in enumerate(self._targets):
            draw = fold_in(self._context.run.seed, step, index)
            own = self._config.format.quantize(parameter.grad, axis=-1, draw=draw) - parameter.grad
            error = self._structured(own, index, step)
            norm = _norm(error)
            if norm > 0 and math.isfinite(norm):
                error.mul_(self._config.gain * _norm(own) / norm)
                parameter.grad.add_(error)
                self._context.errors.observe(step, name, error)

    def _structured(self, own: Any, index: int, step: int) -> Any:
        if self._signed:
            return own.abs() * self._sign_pattern(own, index, step)
        match self._config.structure:
            case "mean_removed":
                return own - own.mean()
            case "mean_only":
                return torch.full_like(own, float(own.mean()))
            case "dc":
                return torch.ones_like(own)
        return own.clone()

    def _sign_pattern(self, like: Any, index: int, step: int) -> Any:
        """+1 or -1, a function of (seed, matrix, step // hold), so that a resumed run draws the same."""
        from qkpipe.numerics.counter_rng import fold_in

        period = 0 if self._hold is None else step // self._hold
        if self._signs.get(index, (-1, None))[0] != period:
            generator = torch.Generator().manual_seed(fold_in(self._context.run.seed, index, period))
            bits = torch.randint(0, 2, like.shape, generator=generator, dtype=like.dtype)
            self._signs[index] = (period, (bits * 2 - 1).to(like.device))
        return self._signs[index][1]


def _norm(x: Any) -> float:
    return float(torch.linalg.vector_norm(x, dtype=torch.float64))
