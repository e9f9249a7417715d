"""Heavy imports on first use.

Config classes of faults, interventions and probes live beside their tensor code, one file a mechanism; but Snakemake parses the
config in every cluster job and must not pay for torch there. Such files write ``from qkpipe.lazy import torch``.
"""

from __future__ import annotations

import importlib
from typing import Any


class _LazyModule:
    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(importlib.import_module(self._name), attribute)


torch: Any = _LazyModule("torch")
