"""Rotary position embedding (Su et al. 2021), half-split pairs as in LLaMA."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor


@lru_cache(maxsize=16)
def _tables(length: int, width: int, device: torch.device, base: float) -> tuple[Tensor, Tensor]:
    frequency = base ** (-torch.arange(0, width, 2, device=device, dtype=torch.float64) / width)
    angle = torch.arange(length, device=device, dtype=torch.float64)[:, None] * frequency
    angle = torch.cat([angle, angle], dim=-1)
    return angle.cos().float(), angle.sin().float()


def rotate(x_BHTK: Tensor, base: float = 10000.0) -> Tensor:
    """Rotate the pairs (i, i + K/2) of each vector by an angle proportional to its position; norms are kept."""
    T, K = x_BHTK.shape[-2:]
    cos, sin = _tables(T, K, x_BHTK.device, base)
    first, second = x_BHTK.chunk(2, dim=-1)
    return x_BHTK * cos + torch.cat([-second, first], dim=-1) * sin
