"""Streaming attention on a GPU: the Triton kernels behind the interface of `qkpipe.numerics.streaming`.

Matrix products take their operands as they are ("exact"), so that a call means the same on a CPU and on a GPU;
sums are in fp32 and exp is the hardware's (`qkpipe_kernels.attention`). A call the kernels do not offer (a head
dimension other than 16, 32, 64, 128, a tile that is no multiple of 16, the tied-maximum shift, gains but delta's,
merged blocks, a soft-cap), and any call
where triton is not installed, takes the plain reference, which runs anywhere, slowly.
"""

from __future__ import annotations

import functools
import importlib
from types import ModuleType

import torch

from qkpipe.numerics import streaming
from qkpipe.numerics.precision import QUANTITIES
from qkpipe.numerics.streaming import Call, StreamStats


@functools.cache
def _kernels() -> ModuleType | None:
    """`qkpipe_kernels.attention`, or None without triton."""
    try:
        importlib.import_module("triton")
    except ImportError:
        return None
    return importlib.import_module("qkpipe_kernels.attention")


def takes(q: torch.Tensor, k: torch.Tensor, call: Call) -> bool:
    """Whether the kernels run this call."""
    kernels = _kernels()
    gains = any(getattr(call.precision, quantity).gain != 1 for quantity in QUANTITIES)
    if gains or call.block is not None or call.softcap is not None:
        return False
    return kernels is not None and kernels.unsupported(q.shape[3], call.tile, k.shape[2], call.repair) is None


def forward(q, k, v, call: Call, stats: StreamStats | None):
    """As `streaming.forward_reference`."""
    if not takes(q, k, call):
        return streaming.forward_reference(q, k, v, call, stats)
    kernels, options = _kernels(), _options(call)
    found = kernels.Statistics()
    out, o_delta, lse = kernels.forward(_inputs(q, k, v, options), options, q.dtype, found)
    if stats is not None:
        stats.max_logit.copy_(found.max_logit)
        stats.entropy.copy_(found.entropy)
    return out, o_delta, lse


def backward(q, k, v, o_delta, lse, do, call: Call, stats: StreamStats | None):
    """As `streaming.backward_reference`."""
    if not takes(q, k, call):
        return streaming.backward_reference(q, k, v, o_delta, lse, do, call, stats)
    kernels, options = _kernels(), _options(call)
    found = kernels.Statistics()
    gradients = kernels.backward(_inputs(q, k, v, options), o_delta, lse, do, options, q.dtype, found)
    if stats is not None:
        stats.residual_r.copy_(found.residual_r)
        stats.residual_mean.copy_(found.residual_mean)
    return gradients


def _options(call: Call):
    return _kernels().Options(
        causal=call.causal,
        scale=call.scale,
        tile=call.tile,
        precision=call.precision,
        repair=call.repair,
        seed=call.seed,
        operands="exact",
        sense=call.stats,
        entropy=call.stats,
        residual=call.stats,
    )


def _inputs(q, k, v, options):
    rows = (x if x.stride(3) == 1 else x.contiguous() for x in (q, k, v))
    return _kernels().prepare(*rows, options)
