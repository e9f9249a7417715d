"""Query-key normalisation: the guard's parameter-free one, and the two published ones with gains."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

EPS = torch.finfo(torch.float32).tiny
"""fp32's smallest normal: keeps a zero vector finite without shrinking any other."""


def unit_rms(x: Tensor) -> Tensor:
    """Scale each vector along the last dimension to unit root mean square, in fp32 (paper section 5, per-head QK normalisation).

    Two such vectors of width d have |q.k| <= d, so that |logit| <= |scale| * d up to rounding. Returned in ``x.dtype``.
    """
    return F.rms_norm(x.float(), (x.shape[-1],), eps=EPS).to(x.dtype)


class HeadLayerNorm(nn.Module):
    """LayerNorm of every head's vector (B, H, T, K) over K, one gain (K,) for all heads, no bias (ViT-22B, arXiv 2302.05442)."""

    def __init__(self, heads: int, d_head: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(d_head))

    def forward(self, x_BHTK: Tensor) -> Tensor:
        return F.layer_norm(x_BHTK, self.weight.shape, self.weight, eps=1e-6)


class FullWidthRMSNorm(nn.Module):
    """RMSNorm over all heads together, as of the projection before it is split, gain (H * K,) (OLMo 2, arXiv 2501.00656)."""

    def __init__(self, heads: int, d_head: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(heads * d_head))

    def forward(self, x_BHTK: Tensor) -> Tensor:
        x_BTW = x_BHTK.transpose(1, 2).flatten(-2)
        normed = F.rms_norm(x_BTW, self.weight.shape, self.weight, eps=1e-6)
        return normed.unflatten(-1, (x_BHTK.shape[1], -1)).transpose(1, 2)
