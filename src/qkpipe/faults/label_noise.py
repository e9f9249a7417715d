"""Generic stressor: wrong targets (study.md, source 6)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from qkpipe.config.base import Mechanism
from qkpipe.hooks import Hook
from qkpipe.lazy import torch


class LabelNoise(Mechanism):
    """``label_noise``: a share ``rate`` of the training targets is drawn uniformly from the vocabulary instead, anew every step.

    Validation keeps its targets; a clean splice's second pass sees the noisy ones, being of the same batch.
    """

    kind: Literal["label_noise"] = "label_noise"
    rate: Annotated[float, Field(gt=0, le=1)]

    def label(self) -> str:
        return f"label_noise({self.rate:g})"

    def build(self, context: Any) -> Hook:
        context.model.register_forward_pre_hook(_Noise(self.rate), with_kwargs=True)
        return Hook()


class _Noise:
    def __init__(self, rate: float) -> None:
        self._rate = rate

    def __call__(self, model: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        if not model.training:
            return None
        tokens_BT, targets_BT = arguments
        # `draw` tells every (seed, step, micro-batch) apart, and is the same in both passes of a step.
        generator = torch.Generator().manual_seed(options["draw"])
        wrong = torch.rand(targets_BT.shape, generator=generator) < self._rate
        vocabulary = model.embed.num_embeddings
        drawn = torch.randint(vocabulary, targets_BT.shape, generator=generator, dtype=targets_BT.dtype)
        noisy = torch.where(wrong.to(targets_BT.device), drawn.to(targets_BT.device), targets_BT)
        return (tokens_BT, noisy), options
