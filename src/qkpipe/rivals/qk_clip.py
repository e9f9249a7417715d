"""QK-Clip (Kimi K2, arXiv 2507.20534): shrink W_Q and W_K of a head whose largest logit passed a threshold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from qkpipe.errors import BadInput
from qkpipe.guard import max_logit_per_head
from qkpipe.guard.watch import Watch
from qkpipe.rivals.base import Rival


@dataclass(frozen=True)
class QKProjections:
    """Query and key projections of one attention layer, weights as torch stores them: (heads * d_head, in).

    ``W_Q`` and ``W_K`` may be one linear layer for queries, keys and values, in this order.
    """

    W_Q: nn.Linear
    W_K: nn.Linear
    n_heads: int
    n_kv_heads: int


class QKClip(Rival):
    """After each optimizer step, every head with S_max > tau has its W_Q and W_K scaled by sqrt(gamma), gamma = tau / S_max.

    S_max is the head's largest logit (after the scale) since the last step: over micro-batches, recomputation and, under
    torch.distributed, ranks. A head with S_max <= tau, NaN or infinite is not touched. A projection's bias is scaled with it.
    Where query heads share a key head, that key head takes sqrt of the smallest gamma in its group and every query head the
    rest of its own, so that each head's logits shrink by its gamma.

    Args:
        layers: a model whose attention is then watched: this project's; or another whose attention modules call an attention
            that a guard could intercept, and name their projections as in :data:`NAMES` or :data:`FUSED`. Or the projections
            of every attention layer, whose logits the caller reports with :meth:`observe`.
        optimizer: the clip acts after its ``step()``.
        threshold: tau, 100 in the paper.
        on_clip: called with (layer, S_max of its heads (H,), gamma of its heads (H,)) where a layer was clipped.

    Raises:
        BadInput: no attention found, layers that normalise queries and keys (no scale of W_Q would reach their logits), or a
            threshold out of range. Of other models it is known at the first optimizer step which modules attend: raised there.
    """

    def __init__(
        self,
        layers: nn.Module | Sequence[QKProjections],
        optimizer: Optimizer,
        *,
        threshold: float = 100.0,
        on_clip: Callable[[int, Tensor, Tensor], None] | None = None,
    ) -> None:
        if not threshold > 0:
            raise BadInput(f"QKClip: threshold must be above 0, got {threshold!r}")
        model = layers if isinstance(layers, nn.Module) else None
        watched = [] if model is None else _attentions(model)
        foreign = model is not None and not watched
        self.layers = [
            QKProjections(attention.W_Q, attention.W_K, attention.n_heads, attention.n_kv_heads)
            for attention in watched
        ] or ([] if foreign else list(layers))
        super().__init__(optimizer)
        self.threshold, self.on_clip = float(threshold), on_clip
        self._peaks: list[Tensor | None] = [None] * len(self.layers)
        for index, attention in enumerate(watched):
            self._handles.append(attention.register_forward_hook(self._watch(index)))
        self._other: Watch | None = None
        self._places: dict[nn.Module, int] = {}
        self._names: dict[nn.Module, str] = {}
        if foreign:
            self._other = Watch(model, self.threshold)
            self._handles.append(self._other)
            self._names = {module: name for name, module in model.named_modules()}

    def observe(self, layer: int, max_logit_H: Tensor) -> None:
        """Report the largest logit of each head in one forward of ``layer``; the largest since the last step counts."""
        seen, new = self._peaks[layer], max_logit_H.detach().float()
        self._peaks[layer] = new if seen is None else torch.maximum(seen, new)  # NaN stays NaN

    @torch.no_grad()
    def after_step(self) -> None:
        if self._other is not None:
            try:
                self._ask(self._other)
            except BadInput:
                self.detach()
                raise
        for index, layer in enumerate(self.layers):
            peak_H, self._peaks[index] = self._peaks[index], None
            if peak_H is None:
                continue
            if dist.is_available() and dist.is_initialized():
                dist.all_reduce(peak_H, op=dist.ReduceOp.MAX)
            gamma_H = torch.where(peak_H.isfinite() & (peak_H > self.threshold), self.threshold / peak_H, 1.0)
            if bool((gamma_H < 1).any()):
                _scale(layer, gamma_H)
                if self.on_clip is not None:
                    self.on_clip(index, peak_H, gamma_H)

    def _watch(self, index: int) -> Callable[..., None]:
        def after_forward(attention: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            if attention.training and attention.sensing:
                self.observe(index, _peak_per_head(attention, inputs[0]))

        return after_forward

    def _ask(self, watch: Watch) -> None:
        for place, peak_H in watch.take():
            self.observe(self._place(place, peak_H.numel()), peak_H)
        if not self._places:
            raise BadInput("QKClip: a step was trained and no attention in the model could be intercepted")

    def _place(self, place: nn.Module, heads: int) -> int:
        """Which layer a module of another model is."""
        if place not in self._places:
            self.layers.append(_projections(place, heads, self._names[place]))
            self._peaks.append(None)
            self._places[place] = len(self.layers) - 1
        return self._places[place]

    def state_dict(self) -> dict[str, Any]:
        """Empty: between two optimizer steps nothing is remembered."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def _attentions(model: nn.Module) -> list[Any]:
    found = [m for m in model.modules() if all(hasattr(m, name) for name in ("W_Q", "W_K", "qk_site"))]
    if any(attention.normalises for attention in found):
        raise BadInput(
            "QKClip: this model normalises queries and keys, so that no scale of W_Q reaches a logit"
        )
    return found


NAMES = (("q_proj", "k_proj"), ("query", "key"), ("to_q", "to_k"), ("wq", "wk"), ("q", "k"))
"""What others call the linear layers of queries and keys (torch's (out, in) weights)."""
FUSED = ("c_attn", "qkv", "qkv_proj", "Wqkv")
"""... and one linear layer for queries, keys and values, of equal widths."""
NORMS = ("q_norm", "k_norm", "q_layernorm", "k_layernorm")


def _projections(attention: nn.Module, heads: int, name: str) -> QKProjections:
    norms = [getattr(attention, norm, None) for norm in NORMS]
    if any(norm is not None and not isinstance(norm, nn.Identity) for norm in norms):
        raise BadInput(f"QKClip: {name} normalises queries and keys, so that no scale of W_Q reaches a logit")
    for names in NAMES:
        W_Q, W_K = (getattr(attention, n, None) for n in names)
        if isinstance(W_Q, nn.Linear) and isinstance(W_K, nn.Linear):
            d_head = W_Q.weight.shape[0] // heads
            return QKProjections(W_Q, W_K, heads, W_K.weight.shape[0] // d_head)
    for fused in FUSED:
        W = getattr(attention, fused, None)
        if isinstance(W, nn.Linear) and W.weight.shape[0] == 3 * W.weight.shape[1]:
            return QKProjections(W, W, heads, heads)
    raise BadInput(
        f"QKClip: {name} ({type(attention).__name__}) attends, and its query and key projections are not known; allowed: linear "
        f"layers named {', '.join('/'.join(pair) for pair in NAMES)} or, for all three, {', '.join(FUSED)}; "
        "else give QKProjections and report logits with observe()"
    )


@torch.no_grad()
def _peak_per_head(attention: Any, x_BTD: Tensor) -> Tensor:
    """(H,): what the kernel saw itself, or recomputed where it shows nothing."""
    if attention.max_logit_BH is not None:
        return attention.max_logit_BH.amax(0)
    return max_logit_per_head(*attention.queries_keys(x_BTD), attention.scale)


def _scale(layer: QKProjections, gamma_H: Tensor) -> None:
    group = layer.n_heads // layer.n_kv_heads
    root_G = gamma_H.view(layer.n_kv_heads, group).amin(1).sqrt()
    factor_H = gamma_H / root_G.repeat_interleave(group)
    if layer.W_Q is layer.W_K:
        factors = [(layer.W_Q, torch.cat([factor_H, root_G, torch.ones_like(root_G)]))]
    else:
        factors = [(layer.W_Q, factor_H), (layer.W_K, root_G)]
    for projection, factor in factors:
        rows = factor.to(projection.weight.dtype).repeat_interleave(projection.weight.shape[0] // len(factor))
        projection.weight.mul_(rows[:, None])
        if projection.bias is not None:
            projection.bias.mul_(rows)
