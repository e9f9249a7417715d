"""The guard's end in one attention layer: it changes the queries and keys, and keeps the largest logit seen."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from qkpipe.guard.logits import CAUSAL, Mask, logit_bound_per_head, max_logit_per_head
from qkpipe.guard.normalise import normalise
from qkpipe.model.qk_norm import unit_rms

if TYPE_CHECKING:
    from qkpipe.guard.controller import QKGuard


class Site:
    """A place of attention: ``q, k = site.act(q, k)``, the kernel, ``site.sense(q, k, scale, ...)``; (B, H, T, K) tensors.

    What decides on firing is ``peak``, per head over the forwards of the open step: maxima, or (on one CPU process) bounds of
    them below every threshold.
    """

    def __init__(self, guard: QKGuard, index: int) -> None:
        self.guard, self.index = guard, index
        self.heads = 0  # 0 until attention has run here
        self.outers: list[Site | None] = []
        self.peak: Tensor | None = None
        self.raw_peak: Tensor | None = None
        self.strength: Tensor | None = (
            None  # of normalisation here, () or (heads,), where it acts by strength
        )
        self._raw: tuple[Tensor, Tensor] | None = None
        self.forget()

    def forget(self) -> None:
        # Of the latest step: the maxima known, and queries, keys, scale and mask of a forward of which only the bound is.
        self.exact: Tensor | None = None
        self._held: tuple[Tensor, Tensor, float, Mask] | None = None
        self.dirty = False  # whether `peak` holds something of the open step

    def act(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        guard = self.guard
        guard.meet(self, q.shape[1])
        if guard.acting == "no":
            return q, k
        if guard.wants_raw:
            self._raw = (q.detach(), k.detach())
        if guard.acting == "fully":
            return unit_rms(q), unit_rms(k)
        strength_q = strength_k = self.strength
        if guard.latch.kind == "head":
            # Query heads that share a key head are switched together.
            strength_H = self.strength[: q.shape[1]]
            strength_G = strength_H.view(k.shape[1], -1).amax(1)
            strength_k = strength_G.view(-1, 1, 1)
            strength_q = strength_G.repeat_interleave(q.shape[1] // k.shape[1]).view(-1, 1, 1)
        return normalise(q, strength_q), normalise(k, strength_k)

    @torch.no_grad()
    def sense(
        self, q: Tensor, k: Tensor, scale: float, max_logit_BH: Tensor | None, mask: Mask = CAUSAL
    ) -> None:
        """``max_logit_BH``: what the kernel saw itself, (B, H); else it is bounded, or computed where the bound is not enough."""
        guard = self.guard
        raw, self._raw = self._raw, None
        if not guard.watching:
            return
        guard.sensed = True
        if not guard.sensing:
            return
        if guard.lazy:
            peak_H = self._lazily(q, k, scale, max_logit_BH, mask)
        elif max_logit_BH is not None:
            peak_H = max_logit_BH.detach().float().amax(0)
        else:
            peak_H = max_logit_per_head(q, k, scale, mask)
        self.peak = self._raise(self.peak, peak_H)
        if guard.wants_raw:
            raw_H = peak_H if raw is None else max_logit_per_head(*raw, scale, mask)
            self.raw_peak = self._raise(self.raw_peak, raw_H)
        self.dirty = True

    def asks_kernel(self) -> bool:
        """Whether a maximum that the kernel can return is wanted: now, and not made do without by a bound."""
        return self.guard.watching and self.guard.sensing and not self.guard.lazy

    def discard(self) -> None:
        """Empty the peaks, for the next step."""
        for peak in (self.peak, self.raw_peak):
            if peak is not None:
                peak.fill_(float("-inf"))
        self.dirty = False

    @torch.no_grad()
    def settle(self) -> None:
        """Turn a bound into the maximum."""
        if self._held is not None:
            held, self._held = self._held, None
            self._know(max_logit_per_head(*held))

    def _lazily(self, q: Tensor, k: Tensor, scale: float, max_logit_BH: Tensor | None, mask: Mask) -> Tensor:
        if not self.dirty:
            self.forget()
        else:
            self.settle()  # so that accumulation holds the queries and keys of one forward, not of all
        if max_logit_BH is not None:
            peak_H = max_logit_BH.detach().float().amax(0)
            self._know(peak_H)
            return peak_H
        if torch.compiler.is_compiling():  # this layer alone: no branch on a value
            peak_H = max_logit_per_head(q, k, scale, mask)
            self._know(peak_H)
            return peak_H
        peak_H = logit_bound_per_head(q, k, scale)
        if all(peak <= self.guard.enough for peak in peak_H.tolist()):
            self._held = (q.detach(), k.detach(), scale, mask)
        else:
            peak_H = max_logit_per_head(q, k, scale, mask)
            self._know(peak_H)
        return peak_H

    def _know(self, peak_H: Tensor) -> None:
        self.exact = peak_H if self.exact is None else self._widest(self.exact, peak_H)

    def _raise(self, peak: Tensor | None, by_H: Tensor) -> Tensor:
        """In place where it can be: a captured CUDA graph writes to the same memory every time."""
        if peak is None or peak.device != by_H.device:
            return by_H.clone()
        if peak.shape != by_H.shape:
            return self._widest(peak, by_H)
        return (
            torch.maximum(peak, by_H, out=peak)
            if not torch.compiler.is_compiling()
            else peak.copy_(torch.maximum(peak, by_H))
        )

    @staticmethod
    def _widest(a: Tensor, b: Tensor) -> Tensor:
        """A module may attend more than once a forward, with other numbers of heads."""
        width = max(a.numel(), b.numel())
        a, b = (torch.nn.functional.pad(x, (0, width - x.numel()), value=float("-inf")) for x in (a, b))
        return torch.maximum(a, b)
