"""Parameter-free query-key normalisation."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

EPS = torch.finfo(torch.float32).tiny
"""fp32's smallest normal: keeps a zero vector finite without shrinking any other."""


def unit_rms(x: Tensor) -> Tensor:
    """Scale each vector along the last dimension to unit root mean square, in fp32 (paper section 5, per-head QK normalisation).

    Two such vectors of width d have |q.k| <= d, so that |logit| <= |scale| * d up to rounding. Returned in ``x.dtype``.
    """
    return F.rms_norm(x.float(), (x.shape[-1],), eps=EPS).to(x.dtype)
