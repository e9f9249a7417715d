"""The largest logit of every head of a model's attention, for those who want no more than that."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from qkpipe.errors import BadInput
from qkpipe.guard import intercept
from qkpipe.guard.site import Site


class Watch:
    """Senses as :class:`qkpipe.guard.QKGuard` does, in the forwards of ``model`` in training mode, and changes nothing.

    Args:
        model: see QKGuard; not one that has a guard already.
        enough: heads that are certainly at or below this need no exact maximum, on one CPU process.

    Raises:
        BadInput: nothing in ``model`` could attend, or it is guarded.
    """

    # What a site asks of whom it reports to.
    acting, wants_raw, sensing, search = "no", False, True, None

    def __init__(self, model: nn.Module, enough: float) -> None:
        places = intercept.places(model)
        if not places:
            raise BadInput(f"found no attention to watch in {type(model).__name__}")
        if any(intercept.occupied(place) for place in places):
            raise BadInput("this model already has a guard; detach() it first")
        self.enough = enough
        self.watching = self.sensed = self.compiled = False
        self.lazy = True
        self._places = places
        self._sites = [Site(self, index) for index in range(len(places))]
        self._handles: list[Any] = [
            model.register_forward_pre_hook(self._begin, prepend=True),
            model.register_forward_hook(self._end, always_call=True),
        ]
        for place, site in zip(places, self._sites, strict=True):
            self._handles += intercept.enter_scope(place, site)
        intercept.acquire(self)

    def take(self) -> Iterator[tuple[nn.Module, Tensor]]:
        """(module, maxima of its heads (H,)) of what has attended since the last time."""
        for place, site in zip(self._places, self._sites, strict=True):
            if site.dirty:
                yield place, site.peak.clone()
                site.discard()

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        intercept.release(self)

    remove = detach  # as torch's handles

    def meet(self, site: Site, heads: int) -> None:
        site.heads = max(site.heads, heads)

    def _begin(self, model: nn.Module, _arguments: Any) -> None:
        self.watching = model.training
        several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        parameter = next(model.parameters(), None)
        on_device = parameter is not None and parameter.device.type != "cpu"
        self.lazy = not (several or on_device or torch.compiler.is_compiling())

    def _end(self, _model: nn.Module, _arguments: Any, _output: Any) -> None:
        self.watching = False
