"""Numerical formats and streaming attention: what others build on.

Names load on first use, so that the configuration can read `qkpipe.numerics.precision` without importing
torch.
"""

from importlib import import_module
from typing import Any

_HOMES = {
    "round_minifloat": "minifloat",
    "quantize_mx": "mx",
    "streaming_attention": "streaming",
    "attention_stats": "streaming",
    "StreamStats": "streaming",
    "StreamPrecision": "precision",
    "StreamRepair": "precision",
    "Rounding": "precision",
}

__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
