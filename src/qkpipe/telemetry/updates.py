"""Temporal sign-coherence of the realised updates of W_Q and W_K, layer by layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from qkpipe.model.transformer import Transformer
from qkpipe.telemetry.errors import EMA


class UpdateSigns:
    """EMA (0.9) of mean(sign(D_t) * sign(D_t-1)) over the elements of a layer's W_Q and W_K, D being the realised update.

    1 where every element goes on in its direction, 0 where directions are drawn anew every step; an element that is not updated,
    or not finite, has sign 0. ``coherence`` holds one value a layer, None before the second update. ``whole`` as in
    :class:`qkpipe.telemetry.sensors.Sensors`.
    """

    def __init__(self, model: Transformer, whole: Callable[[Tensor], Tensor]) -> None:
        self._whole = whole
        place = {id(parameter): index for index, parameter in enumerate(model.parameters())}
        self._layers = len(model.attentions)
        weights = [W.weight for attention in model.attentions for W in (attention.W_Q, attention.W_K)]
        self._places = [place[id(weight)] for weight in weights]
        self._elements = torch.tensor([w.numel() for w in weights], dtype=torch.float64).view(self._layers, 2)
        self._signs: list[Tensor] | None = None
        self.coherence: list[float] | None = None

    @torch.no_grad()
    def observe(self, updates: list[Tensor]) -> None:
        """Take in one step's updates (or their negatives), one tensor a parameter in the model's order."""
        signs = [
            s.nan_to_num_(nan=0.0)
            for s in torch._foreach_sign([self._whole(updates[i]) for i in self._places])
        ]
        if self._signs is not None:
            sums = torch.stack([product.sum() for product in torch._foreach_mul(signs, self._signs)])
            by_layer = sums.double().cpu().view(self._layers, 2).sum(1) / self._elements.sum(1)
            agreement = by_layer.tolist()
            before = self.coherence or agreement
            self.coherence = [EMA * old + (1 - EMA) * new for old, new in zip(before, agreement, strict=True)]
        self._signs = signs

    def state_dict(self) -> dict[str, Any]:
        return {"signs": self._signs, "coherence": self.coherence}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._signs, self.coherence = state["signs"], state["coherence"]
