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

    A step is one forward of ``model`` in training mode; when accumulating gradients, all forwards up to a call of :meth:`step`.
    Under torch.distributed the maximum is taken over ranks. Sensing goes on after firing. Forwards in evaluation mode, and the
    recomputation of activation checkpointing, are not sensed.

    Args:
        model: a model with at least one attention layer the guard can act in (modules with a ``qk_site`` slot).
        threshold: tau, in logits after the scale; the paper uses 30.
        mode: ``act``, or ``log`` to record the firing and change nothing.
        every: sense every so many steps.
        explicit_steps: steps are closed by :meth:`step` alone, from the first one on.
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
        self._watching = False
        self._sensed = False
        self._restored = float("nan")
        self._sites = [_Site(self) for _ in slots]
        self._slots = slots
        for slot, site in zip(slots, self._sites, strict=True):
            slot.qk_site = site
        self._hooks = [
            model.register_forward_pre_hook(self._begin_forward),
            model.register_forward_hook(self._end_forward),
        ]

    @property
    def fired(self) -> bool:
        """Whether the threshold has been passed."""
        return self.firing is not None

    @property
    def active(self) -> bool:
        """Whether normalisation is on."""
        return self._active

    def max_logit(self) -> float:
        """Largest applied logit of the latest sensed step (after the scale, before any rounding); NaN before the first.

        Exact: where sensing made do with a bound, the maximum is computed now. Of this rank alone.
        """
        for site in self._sites:
            site.settle()
        peaks = [site.exact for site in self._sites if site.exact is not None]
        return float(torch.stack([peak.max() for peak in peaks]).max()) if peaks else self._restored

    def step(self) -> None:
        """Close a step: take the maximum over its forwards and ranks, and fire if it passed the threshold.

        Optional: the first call makes steps explicit; until then every training forward was one.
        """
        if self.explicit_steps:
            self._close()
            self._latch()
        self.explicit_steps = True

    def detach(self) -> None:
        """Take the guard off: the model is what it was, and normalisation is off."""
        for hook in self._hooks:
            hook.remove()
        for slot in self._slots:
            slot.qk_site = None

    def state_dict(self) -> dict[str, Any]:
        return {
            "step": self._step,
            "explicit_steps": self.explicit_steps,
            "active": self._active,
            "latest": self.max_logit(),
            "firing": asdict(self.firing) if self.firing else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._step, self._active, self._restored = state["step"], state["active"], state["latest"]
        self.explicit_steps = state["explicit_steps"]
        self.firing = Firing(**state["firing"]) if state["firing"] else None
        for site in self._sites:
            site.forget()

    @property
    def _sensing(self) -> bool:
        return self._step % self.every == 0

    def _begin_forward(self, model: nn.Module, _arguments: Any) -> None:
        self._latch()
        self._watching, self._sensed = model.training, False
        if model.training and not self.explicit_steps:
            for site in self._sites:
                site.take()  # left behind by a forward that was broken off

    def _end_forward(self, model: nn.Module, _arguments: Any, _output: Any) -> None:
        self._watching = False
        if self._sensed and not self.explicit_steps:
            self._close()

    def _latch(self) -> None:
        """Only between steps: a layer recomputed in the backward must do what it did in the forward."""
        self._active = self.mode == "act" and self.fired

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
        largest = float(flat.max())
        # Written so that a NaN logit counts as past the threshold.
        if self.firing is None and not largest <= self.threshold:
            where = int(flat.argmax())
            layer = next(i for i in range(len(widths)) if where < sum(widths[: i + 1]))
            head = where - sum(widths[:layer])
            self.firing = Firing(step=self._step, layer=layer, head=head, logit=largest)
            if self.on_fire is not None:
                self.on_fire(self.firing)


class _Site:
    """The guard's end in one attention layer."""

    def __init__(self, guard: QKGuard) -> None:
        self._guard = guard
        self.forget()

    def forget(self) -> None:
        # Per head, over the forwards of the open step: what decides on firing, maxima or bounds of them below the threshold.
        self.running: Tensor | None = None
        # Of the latest step: the maxima known, and queries, keys and scale of a forward of which only the bound is.
        self.exact: Tensor | None = None
        self._held: tuple[Tensor, Tensor, float] | None = None

    def act(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return (unit_rms(q), unit_rms(k)) if self._guard.active else (q, k)

    @torch.no_grad()
    def sense(self, q: Tensor, k: Tensor, scale: float, max_logit_BH: Tensor | None) -> None:
        """``max_logit_BH``: what the kernel saw itself, (B, H); else it is bounded, or computed where the bound is not enough."""
        guard = self._guard
        if not guard._watching:
            return
        guard._sensed = True
        if not guard._sensing:
            return
        if self.running is None:
            self.forget()
        else:
            self.settle()  # so that accumulation holds the queries and keys of one forward, not of all
        if max_logit_BH is not None:
            peak_H = max_logit_BH.detach().float().amax(0)
            self._know(peak_H)
        else:
            peak_H = logit_bound_per_head(q, k, scale)
            if bool((peak_H <= guard.threshold).all()):
                self._held = (q.detach(), k.detach(), scale)
            else:
                peak_H = max_logit_per_head(q, k, scale)
                self._know(peak_H)
        self.running = peak_H if self.running is None else torch.maximum(self.running, peak_H)

    def take(self) -> Tensor | None:
        peak, self.running = self.running, None
        return peak

    @torch.no_grad()
    def settle(self) -> None:
        """Turn a bound into the maximum."""
        if self._held is not None:
            held, self._held = self._held, None
            self._know(max_logit_per_head(*held))

    def _know(self, peak_H: Tensor) -> None:
        self.exact = peak_H if self.exact is None else torch.maximum(self.exact, peak_H)


def max_logit_per_head(q_BHTK: Tensor, k_BGTK: Tensor, scale: float) -> Tensor:
    """Largest causal logit of every head, (H,), in fp32."""
    _, H, T, _ = q_BHTK.shape
    q, k = q_BHTK.float(), k_BGTK.float().repeat_interleave(H // k_BGTK.shape[1], dim=1)
    logits = q @ k.transpose(-1, -2) * scale
    future = torch.ones(T, k.shape[2], dtype=torch.bool, device=q.device).triu(1)
    return logits.masked_fill(future, float("-inf")).amax((0, 2, 3))


def logit_bound_per_head(q_BHTK: Tensor, k_BGTK: Tensor, scale: float) -> Tensor:
    """|scale| * max|q| * max|k| of every head, (H,), in fp32: no logit is above it (Cauchy-Schwarz), at the price of two norms.

    The last factor covers the rounding of the norms and of a logit itself: 2 (K + 3) half-ulps at the most.
    """
    group, K = q_BHTK.shape[1] // k_BGTK.shape[1], q_BHTK.shape[-1]
    longest_BH, longest_BG = (torch.linalg.vector_norm(x.float(), dim=-1).amax(-1) for x in (q_BHTK, k_BGTK))
    bound_BH = abs(scale) * longest_BH * longest_BG.repeat_interleave(group, dim=1)
    return bound_BH.amax(0) * (1 + (K + 3) * 2.0**-23)
