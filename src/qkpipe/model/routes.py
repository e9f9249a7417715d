"""Routes: which group of weight gradients a parameter belongs to, told by its name. Imports no torch, for configs to ask."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from qkpipe.config.models import ModelConfig

ROUTES = ("qk", "value", "proj", "mlp", "embed")
"""Disjoint groups of weight gradients (study.md); ``vo`` and ``all`` are unions of them."""

_UNIONS = {"vo": ("value", "proj"), "all": ("qk", "value", "proj", "mlp")}
_IN_BLOCKS = {
    "W_Q": "qk",
    "W_K": "qk",
    "W_V": "value",
    "W_O": "proj",
    "W_up": "mlp",
    "W_gate": "mlp",
    "W_down": "mlp",
}


def route_of(parameter_name: str) -> tuple[str, int]:
    """Route and layer of a parameter by its name; layer -1 outside the blocks."""
    parts = parameter_name.split(".")
    layer = int(parts[1]) if parts[0] == "blocks" else -1
    return next((_IN_BLOCKS[part] for part in parts if part in _IN_BLOCKS), "embed"), layer


def expand_routes(routes: Iterable[str]) -> frozenset[str]:
    """Resolve the unions ``vo`` and ``all`` into disjoint routes."""
    return frozenset(part for route in routes for part in _UNIONS.get(route, (route,)))


def matrices_of(model: ModelConfig, routes: Iterable[str]) -> list[str]:
    """Names of the matrices that a model of this config has on these routes (gains are no matrices)."""
    wanted = expand_routes(routes)
    in_blocks = [
        matrix
        for matrix, route in _IN_BLOCKS.items()
        if route in wanted and (matrix != "W_gate" or model.mlp == "swiglu")
    ]
    there = {"embed": True, "position": model.position == "learned", "head": not model.tied_head}
    return in_blocks + [matrix for matrix, is_there in there.items() if is_there and "embed" in wanted]
