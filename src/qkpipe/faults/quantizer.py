"""Weight-gradient quantizer (paper section 3): an emulated microscaling format on the gradients of named routes."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from qkpipe.config.base import Frozen, Mechanism
from qkpipe.errors import BadInput
from qkpipe.hooks import Hook

Route = Literal["qk", "value", "proj", "vo", "mlp", "embed", "all"]
Routes = Annotated[tuple[Route, ...], Field(min_length=1)]
Format = Literal["mxfp4", "mxfp6_e2m3", "mxfp6_e3m2", "mxfp8_e4m3", "mxfp8_e5m2", "nvfp4"]


class QuantizerFormat(Frozen):
    """Which format, and how its scales and elements are rounded (:func:`qkpipe.numerics.quantize_mx`)."""

    fmt: Format = "mxfp4"
    scale_rule: Literal["floor", "even", "rceil"] = "floor"
    rounding: Literal["even", "stochastic"] = "even"

    @model_validator(mode="after")
    def _own_scale_rule(self) -> QuantizerFormat:
        if self.fmt == "nvfp4" and self.scale_rule != "floor":
            raise ValueError(
                f"scale_rule={self.scale_rule}: nvfp4 has a rule of its own; leave scale_rule out"
            )
        return self

    def quantize(self, x: Any, *, axis: int, draw: int) -> Any:
        """Dequantized copy of ``x``; blocks lie along ``axis``, ``draw`` seeds stochastic rounding."""
        from qkpipe.numerics import quantize_mx

        return quantize_mx(
            x, self.fmt, axis=axis, block=None, scale_rule=self.scale_rule, rounding=self.rounding, seed=draw
        )


class Quantizer(Mechanism):
    """``quantizer``: g becomes g + gain * (Q(g) - g) on the named routes.

    ``placement``: ``post_reduction`` quantizes the accumulated gradient, ``pre_reduction`` each micro-batch's or rank's own,
    ``operand`` both operands of the weight-gradient GEMM, with blocks along the contracted token axis. Blocks of a gradient lie
    along its input axis (the last, as torch stores weights).
    """

    kind: Literal["quantizer"] = "quantizer"
    routes: Routes
    format: QuantizerFormat = QuantizerFormat()
    placement: Literal["post_reduction", "pre_reduction", "operand"] = "post_reduction"
    gain: Annotated[float, Field(ge=0)] = 1.0

    def label(self) -> str:
        where = "" if self.placement == "post_reduction" else f"@{self.placement}"
        gain = "" if self.gain == 1.0 else f"x{self.gain:g}"
        return f"{self.format.fmt}({'+'.join(self.routes)}){where}{gain}"

    def check(self, run: Any) -> None:
        if self.placement == "pre_reduction" and run.train.accumulation < 2:
            raise BadInput(
                "faults.placement: 'pre_reduction' equals 'post_reduction' with one micro-batch; "
                "train.accumulation must be at least 2"
            )
        if self.placement == "operand" and "embed" in self.routes:
            raise BadInput(
                "faults.routes: 'embed' has no weight-gradient GEMM of its own to quantize at placement 'operand'; "
                "allowed: qk, value, proj, vo, mlp, all"
            )

    def build(self, context: Any) -> Hook:
        return (_OperandHook if self.placement == "operand" else _GradientHook)(context, self)


class _GradientHook(Hook):
    def __init__(self, context: Any, config: Quantizer) -> None:
        self._context, self._config = context, config
        # A gain is a vector: quantizing it along its only axis would be another fault than that of the matrices.
        self._targets = [(n, p) for n, p in context.parameters(config.routes) if p.dim() == 2]
        # Micro-batches' errors of one step add up to the error of its gradient.
        self._sums: dict[str, Any] = {}

    def micro_gradient(self, step: int, micro: int) -> None:
        if self._config.placement == "pre_reduction":
            for index, (name, parameter) in enumerate(self._targets):
                error = self._apply(parameter, step, index, micro)
                self._sums[name] = self._sums[name] + error if name in self._sums else error

    def reduced_gradient(self, step: int) -> None:
        if self._config.placement == "post_reduction":
            for index, (name, parameter) in enumerate(self._targets):
                self._context.errors.observe(step, name, self._apply(parameter, step, index, 0))
        for name, error in self._sums.items():
            self._context.errors.observe(step, name, error)
        self._sums = {}

    def _apply(self, parameter: Any, step: int, index: int, micro: int) -> Any:
        """Put the error into ``parameter.grad`` and return it."""
        from qkpipe.numerics.counter_rng import fold_in

        draw = fold_in(self._context.run.seed, step, micro, index)
        quantized = self._config.format.quantize(parameter.grad, axis=-1, draw=draw)
        faulty, error = _amplified(parameter.grad, quantized, self._config.gain)
        parameter.grad.copy_(faulty)
        return error


def _amplified(exact: Any, faulty: Any, gain: float) -> tuple[Any, Any]:
    """(exact + gain * (faulty - exact), what was added): ``faulty`` itself at gain 1, where the sum would round once more."""
    error = (faulty - exact) * gain
    return (faulty if gain == 1.0 else exact + error), error


class _OperandHook(Hook):
    def __init__(self, context: Any, config: Quantizer) -> None:
        self._context, self._config = context, config
        self._step = 0
        self._micro = 0
        self._sums: dict[str, Any] = {}
        wanted = {id(parameter): name for name, parameter in context.parameters(config.routes)}
        layers = [m for m in context.model.modules() if id(getattr(m, "weight", None)) in wanted]
        for index, layer in enumerate(m for m in layers if hasattr(m, "weight_gradient")):
            layer.weight_gradient = self._make(index, wanted[id(layer.weight)])

    def begin_step(self, step: int) -> None:
        self._step, self._micro = step, 0

    def micro_gradient(self, step: int, micro: int) -> None:
        self._micro = micro + 1

    def reduced_gradient(self, step: int) -> None:
        for name, error in self._sums.items():
            self._context.errors.observe(step, name, error)
        self._sums = {}

    def _make(self, index: int, name: str) -> Any:
        from qkpipe.numerics.counter_rng import fold_in

        def weight_gradient(dy_NO: Any, x_NI: Any) -> Any:
            exact = dy_NO.mT @ x_NI
            draw = fold_in(self._context.run.seed, self._step, self._micro, index)
            quantize = self._config.format.quantize
            faulty = quantize(dy_NO, axis=0, draw=draw).mT @ quantize(x_NI, axis=0, draw=fold_in(draw, 1))
            faulty, error = _amplified(exact, faulty, self._config.gain)
            self._sums[name] = self._sums[name] + error if name in self._sums else error
            return faulty

        return weight_gradient
