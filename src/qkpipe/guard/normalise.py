"""Unit-RMS normalisation with a strength: none at 0, whole at 1, and a path between for a gradual hand-over."""

from __future__ import annotations

import torch
from torch import Tensor

from qkpipe.model.qk_norm import EPS


def normalise(x: Tensor, strength: Tensor) -> Tensor:
    """``x`` over (its RMS along the last dimension) ** strength, in fp32, returned in ``x.dtype``.

    ``strength`` in [0, 1] broadcasts to ``x``. Where it is 0, output and gradient are bitwise those of the identity, decided on
    the device: the host never waits to learn which. Where it is 1 this is :func:`qkpipe.model.qk_norm.unit_rms`.
    """
    return _Normalise.apply(x, strength)


class _Normalise(torch.autograd.Function):
    # Not left to autograd: the gradient of a torch.where adds the zeros of the untaken branch, which turns -0 into 0 and,
    # where that branch overflows, into NaN.

    @staticmethod
    def forward(x: Tensor, strength: Tensor) -> Tensor:
        wide = x.float()
        return torch.where(strength > 0, (wide * _inverse_rms(wide) ** strength).to(x.dtype), x)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        x, strength = ctx.saved_tensors
        wide, wide_grad = x.float(), grad.float()
        r = _inverse_rms(wide)
        unit = wide * r
        slope = r**strength * (wide_grad - strength * unit * (wide_grad * unit).mean(-1, keepdim=True))
        return torch.where(strength > 0, slope.to(grad.dtype), grad), None


def _inverse_rms(x: Tensor) -> Tensor:
    return torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)
