"""Injected error: the size of a quantizer's own error with a chosen structure in time (paper section 4.1, entry)."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import Field

from qkpipe.config.base import later
from qkpipe.errors import BadInput
from qkpipe.faults.quantizer import GradientFault, QuantizerFormat
from qkpipe.hooks import Hook
from qkpipe.lazy import torch


class Injected(GradientFault):
    """``injected``: with E = Q(g) - g of each gradient matrix, add gain * X, |X| = |E| in Frobenius norm, X one of

    ``native`` E; ``coherent`` |E|*s, one sign pattern s for the whole run; ``resampled`` |E|*s_t, redrawn every step; ``held``
    redrawn every ``hold`` steps; ``mean_removed`` E - mean(E); ``mean_only`` mean(E) everywhere; ``dc`` one positive constant.

    ``match``: ``gradient_norm`` (the paper) leaves the rest to the optimizer. Adam takes smaller steps under errors that change
    sign, so that structures of equal gradient norm differ in how far they move the weights, too; ``update_norm`` takes that out:
    every matrix's realised update is rescaled to the norm that the native error would have had (:class:`_ReferenceUpdates`).
    """

    kind: Literal["injected"] = "injected"
    structure: Literal["native", "coherent", "resampled", "held", "mean_removed", "mean_only", "dc"]
    hold: Annotated[int, Field(ge=1)] | None = None
    gain: Annotated[float, Field(gt=0)] = 1.0
    format: QuantizerFormat = QuantizerFormat()
    match: Literal["gradient_norm", "update_norm"] = later("gradient_norm")

    def label(self) -> str:
        structure = f"held{self.hold}" if self.structure == "held" else self.structure
        gain = "" if self.gain == 1.0 else f"x{self.gain:g}"
        match = "" if self.match == "gradient_norm" else f"@{self.match}"
        return f"{structure}({self.where()}){gain}{match}"

    def check(self, run: Any) -> None:
        super().check(run)
        if self.match == "update_norm" and self.structure == "native":
            raise BadInput(
                "faults.match: 'update_norm' matches to structure 'native', which is its own reference"
            )
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
        self._targets = config.targets(context)
        self._reference = _ReferenceUpdates(context, self._targets) if config.match == "update_norm" else None
        hold = {"coherent": None, "resampled": 1, "held": config.hold}
        self._signed = config.structure in hold
        self._hold = hold.get(config.structure)
        self._signs: dict[int, tuple[int, Any]] = {}

    def reduced_gradient(self, step: int) -> None:
        from qkpipe.numerics.counter_rng import fold_in

        for index, (name, parameter) in enumerate(self._targets):
            draw = fold_in(self._context.run.seed, step, index)
            own = self._config.format.quantize(parameter.grad, axis=-1, draw=draw) - parameter.grad
            if self._reference is not None:
                self._reference.gradients[index] = parameter.grad + self._config.gain * own
            error = self._structured(own, index, step)
            norm = _norm(error)
            if norm > 0 and math.isfinite(norm):
                error.mul_(self._config.gain * _norm(own) / norm)
                parameter.grad.add_(error)
                self._context.errors.observe(step, name, error)
        if self._reference is not None:
            self._reference.unclipped_norm = _total_norm(p.grad for _, p in self._targets)

    def before_update(self, step: int) -> None:
        if self._reference is not None:
            self._reference.update()

    def after_update(self, step: int) -> None:
        if self._reference is not None:
            self._reference.rescale(step)

    def state_dict(self) -> dict[str, Any]:
        return {} if self._reference is None else self._reference.optimizer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self._reference is not None:
            self._reference.optimizer.load_state_dict(state)

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


class _ReferenceUpdates:
    """The updates that the native error would have made, on the weights and batches of this run.

    A second optimizer, with moments of its own, is fed g + gain * E in every step, clipped to the same global norm, and steps
    from the same weights. Its moments are not those of the faulty run: nine tenths of these are past errors of the structure
    under test, so that one step from them would show next to no difference.
    """

    def __init__(self, context: Any, targets: list[tuple[str, Any]]) -> None:
        self._context = context
        self._targets = [parameter for _, parameter in targets]
        self._shadows = [torch.nn.Parameter(parameter.detach().clone()) for parameter in self._targets]
        self.optimizer = context.make_optimizer(self._shadows)
        self.gradients: list[Any] = [None] * len(targets)
        self.unclipped_norm = 0.0
        self._before: list[Any] = []
        self._norms: list[float] = []

    def update(self) -> None:
        """Take the reference's step: needs the clipped gradients, and the weights before the update."""
        context, own = self._context, {id(parameter) for parameter in self._targets}
        rest = [p.grad for p in context.model.parameters() if id(p) not in own]
        clipped_norm = _total_norm(p.grad for p in self._targets)
        kept = clipped_norm / self.unclipped_norm if self.unclipped_norm > 0 else 1.0
        scale = 0.0  # where the trainer has zeroed non-finite gradients, as it would the reference's
        if kept > 0:
            norm = math.hypot(_total_norm(rest) / kept, _total_norm(self.gradients))
            limit = context.run.optimizer.clip
            scale = 1.0 if limit is None or norm <= limit else limit / norm
        for group, faulty_group in zip(self.optimizer.param_groups, context.optimizer.param_groups):
            group["lr"] = faulty_group["lr"]
        self._before = [parameter.detach().clone() for parameter in self._targets]
        for shadow, weight, gradient in zip(self._shadows, self._before, self.gradients):
            shadow.data.copy_(weight)
            shadow.grad = gradient * scale if scale else torch.zeros_like(gradient)
        self.optimizer.step()
        self._norms = [_norm(s.detach() - w) for s, w in zip(self._shadows, self._before)]

    def rescale(self, step: int) -> None:
        """Give every realised update the reference's norm; both norms, over all targets, are in ``events`` on sensed steps."""
        taken = [parameter.detach() - weight for parameter, weight in zip(self._targets, self._before)]
        norms = [_norm(update) for update in taken]
        for parameter, weight, update, norm, wanted in zip(
            self._targets, self._before, taken, norms, self._norms
        ):
            if norm > 0 and math.isfinite(wanted):
                parameter.data.copy_(weight + update * (wanted / norm))
        if step % self._context.run.train.telemetry_every == 0:
            self._context.event(
                step,
                "update_matched",
                update_norm=math.hypot(*norms),
                reference_norm=math.hypot(*self._norms),
            )


def _total_norm(tensors: Any) -> float:
    return math.hypot(*(_norm(x) for x in tensors))


def _norm(x: Any) -> float:
    return float(torch.linalg.vector_norm(x, dtype=torch.float64))
