"""torchao's MX quantization as a peer, where torchao is installed (``pip install torchao``; it takes seconds to import)."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

import torch
from torch import Tensor


def quantizers() -> dict[str, Callable[[Tensor], Tensor]]:
    """By the name of the format, fp32 (..., N) -> the same, quantized in blocks of 32 and dequantized; none without torchao.

    Scales by the rule ``floor``, ties to even: torchao's default.
    """
    if find_spec("torchao") is None:
        return {}
    from torchao.prototype.mx_formats.mx_tensor import to_dtype, to_mx

    elements = {
        "mxfp4": torch.float4_e2m1fn_x2,
        "mxfp6_e2m3": "fp6_e2m3",
        "mxfp6_e3m2": "fp6_e3m2",
        "mxfp8_e4m3": torch.float8_e4m3fn,
        "mxfp8_e5m2": torch.float8_e5m2,
    }

    def quantizer(element: torch.dtype | str) -> Callable[[Tensor], Tensor]:
        def quantize(x: Tensor) -> Tensor:
            scale, codes = to_mx(x, element, 32)
            return to_dtype(codes, scale, element, 32, torch.float32)

        return quantize

    return {name: quantizer(element) for name, element in elements.items()}
