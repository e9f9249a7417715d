"""The Triton kernels behind the interfaces of `qkpipe.numerics.streaming` and `qkpipe.numerics.mx`, for tensors on a GPU.

Matrix products take their operands as they are ("exact"), so that a call means the same on a CPU and on a GPU;
sums are in fp32 and exp is the hardware's (`qkpipe_kernels.attention`). What the kernels do not offer takes the
plain reference, which runs anywhere, slowly: a head dimension other than 16, 32, 64, 128; gains but delta's and the
output's; merged blocks; a soft-cap; blocks of another size than a format's own; and any call where triton is not
installed. Formats give the reference's bits.
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
def _kernels(name: str = "attention") -> ModuleType | None:
    """A module of `qkpipe_kernels`, or None without triton."""
    try:
        importlib.import_module("triton")
    except ImportError:
        return None
    return importlib.import_module(f"qkpipe_kernels.{name}")


def takes(q: torch.Tensor, call: Call) -> bool:
    """Whether the kernels run this call."""
    kernels = _kernels()
    gains = any(getattr(call.precision, quantity).gain != 1 for quantity in QUANTITIES)
    if gains or call.block is not None or call.softcap is not None:
        return False
    return kernels is not None and kernels.unsupported(q.shape[3]) is None


def quantize(x, fmt, axis, block, scale_rule, rounding, seed, stream, return_codes):
    """`mx.quantize_mx` of checked arguments, x contiguous; None where the kernels do not take this."""
    kernels = _kernels("mx")
    if kernels is None or block != kernels.block_of(fmt):
        return None
    return kernels.quantize_mx(
        x,
        fmt,
        axis=axis,
        scale_rule=scale_rule,
        rounding=rounding,
        seed=seed,
        stream=stream,
        return_codes=return_codes,
    )


def forward(q, k, v, call: Call, stats: StreamStats | None):
    """As `streaming.forward_reference`."""
    if not takes(q, call):
        return streaming.forward_reference(q, k, v, call, stats)
    kernels, options = _kernels(), _options(call)
    found = kernels.Statistics()
    out, o_delta, lse = kernels.forward(_inputs(q, k, v, options), options, q.dtype, found)
    if stats is not None:
        stats.max_logit.copy_(found.max_logit)
        stats.entropy.copy_(found.entropy)
        stats.tied_fallbacks.copy_(found.tied_fallbacks)
    return out, o_delta, lse


def backward(q, k, v, o_delta, lse, do, call: Call, stats: StreamStats | None):
    """As `streaming.backward_reference`."""
    if not takes(q, call):
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
    return _kernels().prepare(*(_rows(x) for x in (q, k, v)), options)


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(3) == 1 else x.contiguous()
