"""A linear layer whose weight gradient can be computed by someone else (faults on the operands of that GEMM)."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qkpipe.model.sigma_reparam import SigmaReparam

WeightGradient = Callable[[Tensor, Tensor], Tensor]
"""(dy (N, out), x (N, in)) -> dW (out, in), N tokens."""


class Linear(nn.Linear):
    """No bias. ``weight_gradient``, where set, replaces dy' x; the output and the input's gradient stay exact. ``reparam``, where
    set, maps the weight to the one applied.
    """

    def __init__(self, d_in: int, d_out: int) -> None:
        super().__init__(d_in, d_out, bias=False)
        self.weight_gradient: WeightGradient | None = None
        self.reparam: SigmaReparam | None = None

    @property
    def applied_weight(self) -> Tensor:
        """The weight as the latest forward applied it, but for later changes of its parameters."""
        return self.weight if self.reparam is None else self.reparam.applied(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        W = self.weight if self.reparam is None else self.reparam(self.weight)
        if self.weight_gradient is None:
            return F.linear(x, W)
        return _LinearWithOwnWeightGradient.apply(x, W, self.weight_gradient)


class _LinearWithOwnWeightGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, W: Tensor, weight_gradient: WeightGradient) -> Tensor:
        ctx.save_for_backward(x, W)
        ctx.weight_gradient = weight_gradient
        return F.linear(x, W)

    @staticmethod
    def backward(ctx, dy: Tensor):
        x, W = ctx.saved_tensors
        return dy @ W, ctx.weight_gradient(dy.flatten(0, -2), x.flatten(0, -2)), None
