"""A kernel launch as data: run it, or compile it for a GPU that is not there."""

from typing import Any, NamedTuple


class Launch(NamedTuple):
    """A kernel, its grid, its arguments by name, and its compile options (warps, stages, fusion)."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    options: dict[str, Any]

    def run(self) -> None:
        self.kernel[self.grid](**self.arguments, **self.options)
