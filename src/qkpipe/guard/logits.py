"""The largest logit of every head, and a cheap bound of it. Logits are after the scale, before bias, soft-cap and rounding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

CHUNK = 1 << 24
"""Most logits materialised at once: 64 MiB in fp32."""

MASKED = -1e4
"""An additive mask at or below this hides an entry: only a logit of 10,000 could bring it back."""


@dataclass(frozen=True)
class Mask:
    """Which logits an attention call uses.

    ``causal``: query i sees keys 0 to i. ``allowed``: booleans that broadcast to (B, H, T, S), or an additive mask, or a function
    that makes either, called only where the exact maximum is needed.
    """

    causal: bool = False
    allowed: Tensor | Callable[[], Tensor] | None = None

    def booleans(self) -> Tensor | None:
        allowed = self.allowed
        if allowed is not None and not isinstance(allowed, Tensor):
            allowed = allowed()
        if allowed is None or allowed.dtype == torch.bool:
            return allowed
        return allowed > MASKED


CAUSAL = Mask(causal=True)


def max_logit_per_head(q_BHTK: Tensor, k_BGSK: Tensor, scale: float, mask: Mask = CAUSAL) -> Tensor:
    """Largest used logit of every head, (H,), in fp32; -inf for a head that uses none, NaN if a used one is NaN.

    Rows of padding tokens do not count: in self-attention those whose key is hidden from every query.
    """
    H, T = q_BHTK.shape[1:3]
    S = k_BGSK.shape[2]
    q, k = q_BHTK.float(), k_BGSK.float().repeat_interleave(H // k_BGSK.shape[1], dim=1)
    used = _used(mask, T, S, q.device)
    rows = max(1, CHUNK // max(1, q.shape[0] * H * S))
    peaks = []
    for start in range(0, T, rows):
        logits = q[:, :, start : start + rows] @ k.transpose(-1, -2) * scale
        if used is not None:
            logits = logits.masked_fill(~used[..., start : start + rows, :], float("-inf"))
        peaks.append(logits.amax((0, 2, 3)))
    return peaks[0] if len(peaks) == 1 else torch.stack(peaks).amax(0)


def _used(mask: Mask, T: int, S: int, device: torch.device) -> Tensor | None:
    used = mask.booleans()
    if used is not None:
        used = used.expand(*used.shape[:-2], T, S)
        if T == S:
            # A mask that lets no token see itself says nothing about padding.
            sees_itself = used.diagonal(dim1=-2, dim2=-1).any()
            padding = ~used.any(-2) & sees_itself
            used = used & ~padding.unsqueeze(-1)
    if mask.causal:
        past = torch.ones(T, S, dtype=torch.bool, device=device).tril()
        used = past if used is None else used & past
    return used


def logit_bound_per_head(q_BHTK: Tensor, k_BGSK: Tensor, scale: float) -> Tensor:
    """|scale| * max|q| * max|k| of every head, (H,), in fp32: no logit is above it (Cauchy-Schwarz), at the price of two norms.

    The last factor covers the rounding of the norms and of a logit itself: 2 (K + 3) half-ulps at the most.
    """
    group, K = q_BHTK.shape[1] // k_BGSK.shape[1], q_BHTK.shape[-1]
    longest_BH, longest_BG = (torch.linalg.vector_norm(x.float(), dim=-1).amax(-1) for x in (q_BHTK, k_BGSK))
    if group > 1:
        longest_BG = longest_BG.repeat_interleave(group, dim=1)
    bound_BH = abs(scale) * longest_BH * longest_BG
    return bound_BH.amax(0) * (1 + (K + 3) * 2.0**-23)
