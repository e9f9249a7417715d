"""Generic stressor: noise on weights, at the size of an update (study.md, source 6)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from qkpipe.config.base import Mechanism
from qkpipe.faults.quantizer import Routes
from qkpipe.hooks import Hook
from qkpipe.lazy import torch


class WeightNoise(Mechanism):
    """``weight_noise``: the realised update D of each matrix of the named routes becomes D + gain * |D| * N / |N|, rescaled to
    |D| (Frobenius), N Gaussian and drawn anew every step: an update of the same size, in part in a random direction.
    """

    kind: Literal["weight_noise"] = "weight_noise"
    routes: Routes
    gain: Annotated[float, Field(gt=0)] = 1.0

    def label(self) -> str:
        return f"weight_noise({'+'.join(self.routes)})x{self.gain:g}"

    def build(self, context: Any) -> Hook:
        return _WeightNoiseHook(context, self)


class _WeightNoiseHook(Hook):
    def __init__(self, context: Any, config: WeightNoise) -> None:
        self._context, self._gain = context, config.gain
        self._weights = [p for _, p in context.parameters(config.routes) if p.dim() == 2]
        self._before: list[Any] = []

    def before_update(self, step: int) -> None:
        self._before = [weight.detach().clone() for weight in self._weights]

    def after_update(self, step: int) -> None:
        for index, (weight, before) in enumerate(zip(self._weights, self._before, strict=True)):
            with torch.no_grad():
                weight.copy_(before + self._noisy(weight.detach() - before, step, index))

    def _noisy(self, update: Any, step: int, index: int) -> Any:
        """The noisy update; a zero or non-finite one stays what it is."""
        from qkpipe.numerics.counter_rng import fold_in

        size = torch.linalg.vector_norm(update)
        if not bool(size.isfinite() & (size > 0)):
            return update
        generator = torch.Generator().manual_seed(fold_in(self._context.run.seed, step, index))
        noise = torch.randn(update.shape, generator=generator).to(update.device)
        mixed = update + noise * (self._gain * size / torch.linalg.vector_norm(noise))
        return mixed * (size / torch.linalg.vector_norm(mixed))
