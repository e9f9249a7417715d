"""QK-Guard: a dormant controller that contains the query-key runaway of low-precision training (paper section 5).

It watches the largest attention logit of every head. While all stay at or below ``threshold`` it does nothing: outputs and
gradients are bitwise those of the unguarded model. Past it, it latches on parameter-free per-head QK normalisation for the whole
model, from the next forward on, after which every fp32 logit is bounded by ``(1 + 1e-5) * |scale| * d_head``.

    guard = QKGuard(model, threshold=30.0)
    ...train as before...
    guard.fired, guard.max_logit()
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from qkpipe.errors import BadInput
from qkpipe.model.qk_norm import unit_rms


@dataclass(frozen=True)
class Firing:
    """Which head crossed the threshold first: ``step`` counts training steps from 0, ``logit`` is after the scale."""

    step: int
    layer: int
    head: int
    logit: float


class QKGuard:
    """Sense the maximum attention logit per head, and latch QK normalisation on when it passes ``threshold``.

    A step is one forward in training mode; with ``explicit_steps`` it is all forwards up to a call of :meth:`step` (gradient
    accumulation), and under torch.distributed the maximum is then taken over ranks. Sensing goes on after firing.

    Args:
        model: a model with at least one attention layer the guard can act in (modules with a ``qk_site`` slot).
        threshold: tau, in logits after the scale; the paper uses 30.
        mode: ``act``, or ``log`` to record the firing and change nothing.
        every: sense every so many steps.
        explicit_steps: steps are closed by :meth:`step` alone.
        on_fire: called once with the :class:`Firing`.

    Raises:
        BadInput: nothing to guard in ``model``, a layer already guarded, or an option out of range.
    """

    def __init__(
        self,
        model: nn.Module,
        threshold: float = 30.0,
        mode: Literal["act", "log"] = "act",
        *,
        every: int = 1,
        explicit_steps: bool = False,
        on_fire: Callable[[Firing], None] | None = None,
    ) -> None:
        if not threshold > 0:
            raise BadInput(f"QKGuard: threshold must be above 0, got {threshold!r}")
        if mode not in ("act", "log"):
            raise BadInput(f"QKGuard: mode must be 'act' or 'log', got {mode!r}")
        if every < 1:
            raise BadInput(f"QKGuard: every must be at least 1, got {every!r}")
        slots = [module for module in model.modules() if hasattr(module, "qk_site")]
        if not slots:
            raise BadInput(
                f"QKGuard: found no attention to guard in {type(model).__name__}; "
                "it needs modules with a `qk_site` slot around their attention"
            )
        if any(slot.qk_site is not None for slot in slots):
            raise BadInput("QKGuard: this model already has a guard; detach() it first")
        self.threshold, self.mode, self.every = float(threshold), mode, every
        self.explicit_steps, self.on_fire = explicit_steps, on_fire
        self.firing: Firing | None = None
        self._step = 0
        self._active = False
        self._latest = float("nan")
        self._sites = [_Site(self) for _ in slots]
        self._slots = slots
        for slot, site in zip(slots, self._sites, strict=True):
            slot.qk_site = site
        self._hook = model.register_forward_pre_hook(self._begin_forward)

    @property
    def fired(self) -> bool:
        """Whether the threshold has been passed."""
        return self.firing is not None

    @property
    def active(self) -> bool:
        """Whether normalisation is on."""
        return self._active

    def max_logit(self) -> float:
        """Largest applied logit of the latest sensed step (after the scale, before any rounding); NaN before the first."""
        running = [site.running for site in self._sites if site.running is not None]
        return float(torch.stack([r.max() for r in running]).max()) if running else self._latest

    def step(self) -> None:
        """Close a step: take the maximum over its forwards and ranks, and fire if it passed the threshold."""
        if not self.explicit_steps:
            raise BadInput(
                "QKGuard: step() needs explicit_steps=True; without it every training forward is a step"
            )
        self._close()

    def detach(self) -> None:
        """Take the guard off: the model is what it was, and normalisation is off."""
        self._hook.remove()
        for slot in self._slots:
            slot.qk_site = None

    def state_dict(self) -> dict[str, Any]:
        return {
            "step": self._step,
            "active": self._active,
            "latest": self._latest,
            "firing": asdict(self.firing) if self.firing else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._step, self._active, self._latest = state["step"], state["active"], state["latest"]
        self.firing = Firing(**state["firing"]) if state["firing"] else None

    @property
    def _sensing(self) -> bool:
        return self._step % self.every == 0

    def _begin_forward(self, model: nn.Module, _arguments: Any) -> None:
        pending = any(site.running is not None for site in self._sites)
        if model.training and pending and not self.explicit_steps:
            self._close()

    def _close(self) -> None:
        if self._sensing:
            peaks = [site.take() for site in self._sites]
            if all(peak is not None for peak in peaks):
                self._judge(peaks)
        self._step += 1

    def _judge(self, peaks: list[Tensor]) -> None:
        widths = [peak.numel() for peak in peaks]
        flat = torch.cat(peaks)
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(flat, op=dist.ReduceOp.MAX)
        self._latest = float(flat.max())
        # Written so that a NaN logit counts as past the threshold.
        if self.firing is None and not self._latest <= self.threshold:
            where = int(flat.argmax())
            layer = next(i for i in range(len(widths)) if where < sum(widths[: i + 1]))
            head = where - sum(widths[:layer])
            self.firing = Firing(step=self._step, layer=layer, head=head, logit=self._latest)
            self._active = self.mode == "act"
            if self.on_fire is not None:
                self.on_fire(self.firing)


class _Site:
    """The guard's end in one attention layer."""

    def __init__(self, guard: QKGuard) -> None:
        self._guard = guard
        self.running: Tensor | None = None

    def act(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return (unit_rms(q), unit_rms(k)) if self._guard.active else (q, k)

    def sense(self, q: Tensor, k: Tensor, scale: float, max_logit_BH: Tensor | None) -> None:
        """``max_logit_BH``: what the kernel saw itself, (B, H); else it is bounded, or computed where the bound is not enough."""
        guard = self._guard
        if not (torch.is_grad_enabled() and guard._sensing):
            return
        if max_logit_BH is None:
            peak_H = max_logit_per_head(q.detach(), k.detach(), scale, enough=guard.threshold)
        else:
            peak_H = max_logit_BH.detach().float().amax(0)
        self.running = peak_H if self.running is None else torch.maximum(self.running, peak_H)

    def take(self) -> Tensor | None:
        peak, self.running = self.running, None
        return peak


def max_logit_per_head(q_BHTK: Tensor, k_BGTK: Tensor, scale: float, enough: float | None = None) -> Tensor:
    """Largest causal logit of every head, (H,), in fp32.

    With ``enough`` the Cauchy-Schwarz bound |scale| * max|q| * max|k| is returned instead where it does not exceed ``enough``
    for any head: an opaque kernel then costs two norms, and the exact maximum only near the threshold.
    """
    B, H, T, _ = q_BHTK.shape
    q, k = q_BHTK.float(), k_BGTK.float().repeat_interleave(H // k_BGTK.shape[1], dim=1)
    if enough is not None:
        longest = [torch.linalg.vector_norm(x, dim=-1).amax(-1) for x in (q, k)]
        bound_H = (abs(scale) * longest[0] * longest[1]).amax(0)
        if bool((bound_H <= enough).all()):
            return bound_H
    logits = q @ k.transpose(-1, -2) * scale
    future = torch.ones(T, k.shape[2], dtype=torch.bool, device=q.device).triu(1)
    return logits.masked_fill(future, float("-inf")).amax((0, 2, 3))
