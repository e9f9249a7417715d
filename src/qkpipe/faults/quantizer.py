"""Weight-gradient quantizer (paper section 3): an emulated microscaling format on the gradients of named routes."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from qkpipe.config.base import Frozen, Mechanism, later
from qkpipe.errors import BadInput
from qkpipe.hooks import Hook
from qkpipe.model.routes import expand_routes, matrices_of

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


class GradientFault(Mechanism):
    """An error in the gradients of matrices, chosen by route, and among these by layer and by name if given.

    ``layers``: numbers of blocks, from 0, or from -1 backwards. ``matrices``: such as ``W_down`` or ``head``. A gain is a vector:
    quantizing it along its only axis would be another fault than that of the matrices, so it is never chosen.
    """

    routes: Routes
    layers: Annotated[tuple[int, ...], Field(min_length=1)] | None = later(None)
    matrices: Annotated[tuple[str, ...], Field(min_length=1)] | None = later(None)

    def check(self, run: Any) -> None:
        n = run.model.n_layers
        for layer in self.layers or ():
            if not -n <= layer < n:
                raise BadInput(f"faults.layers: {layer}: the model has {n} layers; allowed: {-n} to {n - 1}")
        if self.layers is not None and "embed" in expand_routes(self.routes):
            raise BadInput("faults.layers: route 'embed' lies outside the layers; give it a fault of its own")
        allowed = matrices_of(run.model, self.routes)
        for matrix in self.matrices or ():
            if matrix not in allowed:
                raise BadInput(
                    f"faults.matrices: {matrix!r} is none of this model's on {'+'.join(self.routes)}; "
                    f"allowed: {', '.join(allowed)}"
                )

    def chosen(self, model: Any) -> set[tuple[str, int | None]]:
        """(matrix, layer) of every matrix it acts on, in a model of this config; layer None outside the blocks."""
        layers = range(model.n_layers)
        if self.layers is not None:
            layers = {layer % model.n_layers for layer in self.layers}
        names = [m for m in matrices_of(model, self.routes) if self.matrices is None or m in self.matrices]
        return {(name, layer) for name in names for layer in (layers if name.startswith("W_") else [None])}

    def targets(self, context: Any) -> list[tuple[str, Any]]:
        """Named parameters it acts on."""
        found = [(name, p) for name, p in context.parameters(self.routes) if p.dim() == 2]
        if self.layers is None and self.matrices is None:
            return found
        chosen = self.chosen(context.run.model)
        return [(name, p) for name, p in found if _matrix_and_layer(name) in chosen]

    def where(self) -> str:
        """Routes, layers and matrices for a label."""
        parts = [*self.routes, *(self.matrices or ()), *(f"layer{layer}" for layer in self.layers or ())]
        return "+".join(parts)


def _matrix_and_layer(parameter_name: str) -> tuple[str, int | None]:
    parts = parameter_name.split(".")
    return parts[-2], int(parts[1]) if parts[0] == "blocks" else None


class Quantizer(GradientFault):
    """``quantizer``: g becomes g + gain * (Q(g) - g) on the named routes.

    ``placement``: ``post_reduction`` quantizes the accumulated gradient, ``pre_reduction`` each micro-batch's or rank's own,
    ``operand`` both operands of the weight-gradient GEMM, with blocks along the contracted token axis. Blocks of a gradient lie
    along its input axis (the last, as torch stores weights).
    """

    kind: Literal["quantizer"] = "quantizer"
    format: QuantizerFormat = QuantizerFormat()
    placement: Literal["post_reduction", "pre_reduction", "operand"] = "post_reduction"
    gain: Annotated[float, Field(ge=0)] = 1.0

    @property
    def sharded(self) -> bool:
        return self.placement == "post_reduction"

    def label(self) -> str:
        where = "" if self.placement == "post_reduction" else f"@{self.placement}"
        gain = "" if self.gain == 1.0 else f"x{self.gain:g}"
        rule = "" if self.format.scale_rule == "floor" else f"-{self.format.scale_rule}"
        rounding = "" if self.format.rounding == "even" else f"-{self.format.rounding}"
        return f"{self.format.fmt}{rule}{rounding}({self.where()}){where}{gain}"

    def check(self, run: Any) -> None:
        super().check(run)
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
        if self.placement == "operand":
            for other in run.faults:
                rival = isinstance(other, Quantizer) and other is not self and other.placement == "operand"
                if shared := sorted(self.chosen(run.model) & other.chosen(run.model)) if rival else []:
                    raise BadInput(
                        f"faults.placement: two 'operand' quantizers on {shared[0][0]} of layer {shared[0][1]}; "
                        "allowed: one a matrix, whose GEMM is one"
                    )

    def build(self, context: Any) -> Hook:
        return (_OperandHook if self.placement == "operand" else _GradientHook)(context, self)


class _GradientHook(Hook):
    def __init__(self, context: Any, config: Quantizer) -> None:
        self._context, self._config = context, config
        self._targets = config.targets(context)
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
            self._context.errors.observe(step, name, self._context.ranks.summed(error))
        self._sums = {}

    def _apply(self, parameter: Any, step: int, index: int, micro: int) -> Any:
        """Put the error into ``parameter.grad`` and return it."""
        from qkpipe.numerics.counter_rng import fold_in

        draw = fold_in(self._context.run.seed, step, micro, index)
        gradient = self._context.ranks.whole(parameter.grad)
        quantized = self._config.format.quantize(gradient, axis=-1, draw=draw)
        faulty, error = _amplified(gradient, quantized, self._config.gain)
        self._context.ranks.put(parameter.grad, faulty)
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
        wanted = {id(parameter): name for name, parameter in config.targets(context)}
        layers = [m for m in context.model.modules() if id(getattr(m, "weight", None)) in wanted]
        for index, layer in enumerate(m for m in layers if hasattr(m, "weight_gradient")):
            layer.weight_gradient = self._make(index, wanted[id(layer.weight)])

    def begin_step(self, step: int) -> None:
        self._step, self._micro = step, self._context.ranks.cut(self._context.run.train.accumulation).start

    def micro_gradient(self, step: int, micro: int) -> None:
        self._micro = micro + 1

    def reduced_gradient(self, step: int) -> None:
        for name, error in self._sums.items():
            self._context.errors.observe(step, name, self._context.ranks.summed(error))
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
