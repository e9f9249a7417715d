"""A kernel launch as data: run it, or compile it for a GPU that is not there."""

import functools
from typing import Any, NamedTuple

import torch


class Launch(NamedTuple):
    """A kernel, its grid, its arguments by name, and its compile options (warps, stages, fusion)."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    options: dict[str, Any]

    def run(self) -> None:
        self.kernel[self.grid](**self.arguments, **self.options)


def strides(**tensors: torch.Tensor) -> dict[str, int]:
    """The strides of (B, H, T, D) tensors as a kernel names them: of x, x_b, x_h and x_t."""
    return {f"{name}_{axis}": s for name, x in tensors.items() for axis, s in zip("bht", x.stride())}


@functools.cache
def capability_of(device: torch.device) -> int:
    """90 for compute capability 9.0, and for a CPU, where the interpreter does not care."""
    if device.type != "cuda":
        return 90
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor
