"""Compiles the CPU kernels once, into numba's cache, so that parallel runs do not each start with it."""

from __future__ import annotations

import torch

from qkpipe.numerics import StreamPrecision, attention_stats, quantize_mx, streaming_attention
from qkpipe.numerics.precision import MODES
from qkpipe.numerics.spectra import leading_triplets


def warm_up() -> None:
    """Call every compiled path a run may take, forward and backward, on a tiny input."""
    for mode in MODES:
        q, k, v = torch.ones(3, 1, 2, 8, 4).requires_grad_()
        precision = StreamPrecision.uniform(2, io=7, mode=mode)
        out, _ = streaming_attention(q, k, v, tile=4, precision=precision, return_stats=True)
        out.sum().backward()
    leading_triplets(torch.eye(8).expand(2, 8, 8), 3)
    for fmt in ("mxfp4", "nvfp4"):  # the two compiled families: power-of-two scales, and E4M3 scales
        quantize_mx(torch.ones(2, 32), fmt)
    attention_stats(q.detach(), k.detach(), v.detach(), out.detach(), torch.ones_like(out))
