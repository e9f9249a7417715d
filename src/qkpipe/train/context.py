"""What a mechanism may see and do while it is built and while it acts."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from qkpipe.config.models import RunConfig
from qkpipe.model.routes import expand_routes, route_of
from qkpipe.model.transformer import Transformer
from qkpipe.telemetry.errors import GradientErrors
from qkpipe.telemetry.writer import PartWriter
from qkpipe.train.distributed import Ranks
from qkpipe.train.optimizer import optimizer_over


@dataclass
class BuildContext:
    """Handed to :meth:`qkpipe.config.base.Mechanism.build`.

    ``clean_gradients`` runs the clean second pass of the current step (once, however many ask) and returns one gradient a
    parameter name. ``errors`` collects what a fault added to a gradient. ``ranks``: who else trains this run.
    """

    run: RunConfig
    model: Transformer
    optimizer: Optimizer
    writer: PartWriter
    errors: GradientErrors
    clean_gradients: Callable[[], dict[str, Tensor]]
    ranks: Ranks

    def parameters(self, routes: tuple[str, ...]) -> list[tuple[str, nn.Parameter]]:
        """Named parameters whose gradients belong to one of the routes."""
        wanted = expand_routes(routes)
        return [(name, p) for name, p in self.model.named_parameters() if route_of(name)[0] in wanted]

    def matrices(self, names: tuple[str, ...]) -> list[tuple[int, str, nn.Parameter]]:
        """(layer, matrix name, weight) of the named matrices in every block."""
        found = []
        for name, parameter in self.model.named_parameters():
            _, layer = route_of(name)
            matrix = name.split(".")[-2]
            if layer >= 0 and matrix in names:
                found.append((layer, matrix, parameter))
        return found

    def make_optimizer(self, parameters: list[nn.Parameter]) -> Optimizer:
        """An optimizer like the run's, over other parameters."""
        return optimizer_over(parameters, self.run.optimizer)

    def event(self, step: int, kind: str, **detail: Any) -> None:
        self.writer.add("events", step=step, kind=kind, detail=json.dumps(detail, sort_keys=True))
