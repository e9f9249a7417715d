"""Logit soft-capping (Gemma 2, arXiv 2408.00118), for FlexAttention."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from qkpipe.errors import BadInput


@dataclass(frozen=True)
class SoftCap:
    """``cap`` * tanh(S / ``cap``) of a logit S after the scale and before the mask: a ``score_mod`` of FlexAttention.

    torch's own attention shows its logits to nobody; our streaming attention takes ``softcap=`` itself. Raises BadInput unless
    ``cap`` is a finite number above 0.
    """

    cap: float = 50.0

    def __post_init__(self) -> None:
        if not 0 < self.cap < math.inf:
            raise BadInput(f"SoftCap: cap must be a finite number above 0, got {self.cap!r}")

    def __call__(self, score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return self.cap * torch.tanh(score / self.cap)
