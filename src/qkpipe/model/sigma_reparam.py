"""sigma-Reparam (Zhai et al., arXiv 2303.06296): every linear map's spectral norm is one learnable number."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from qkpipe.errors import BadInput


class SigmaReparam(nn.Module):
    """W -> (gamma / sigma(W)) W, gamma learnable and 1 at first, sigma(W) = u' W v from one power iteration a forward.

    u (out,) and v (in,) are buffers, constants to the gradient, which passes through W alone. They start as the leading singular
    vectors (:meth:`start`) and move in training mode only. ``advancing`` False holds them too, for a second pass on the same
    weights (of several micro-batches, that has the last one's); activation checkpointing is such a pass and needs it held while
    it recomputes.
    """

    def __init__(self, W: Tensor) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(1, device=W.device, dtype=W.dtype))
        self.register_buffer("u", torch.empty(W.shape[0], device=W.device, dtype=W.dtype))
        self.register_buffer("v", torch.empty(W.shape[1], device=W.device, dtype=W.dtype))
        self.advancing = True
        self.start(W)

    @torch.no_grad()
    def start(self, W: Tensor) -> None:
        """Take u and v from the singular value decomposition of W."""
        U, _, Vh = torch.linalg.svd(W.double(), full_matrices=False)
        self.u.copy_(U[:, 0])
        self.v.copy_(Vh[0])

    def forward(self, W: Tensor) -> Tensor:
        if self.training and self.advancing:
            with torch.no_grad():
                self.u.copy_(nn.functional.normalize(W @ self.v, dim=0))
                self.v.copy_(nn.functional.normalize(W.mT @ self.u, dim=0))
        return self.applied(W)

    def applied(self, W: Tensor) -> Tensor:
        """The reparametrised weight, by u and v as they are."""
        # Copies: the buffers may move before a backward has used them.
        sigma = self.u.clone() @ W @ self.v.clone()
        return W * (self.gamma / sigma)


def sigma_reparam(model: nn.Module) -> None:
    """Put :class:`SigmaReparam` on the weight of every ``nn.Linear`` in ``model``; call it before making the optimizer.

    Undone by ``torch.nn.utils.parametrize.remove_parametrizations(layer, "weight")``, which keeps the reparametrised weight.

    Raises:
        BadInput: no linear layer in ``model``.
    """
    layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    if not layers:
        raise BadInput(f"sigma_reparam: found no nn.Linear in {type(model).__name__}")
    for layer in layers:
        parametrize.register_parametrization(layer, "weight", SigmaReparam(layer.weight))
