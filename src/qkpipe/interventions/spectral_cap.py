"""Locus control: a cap on the singular values of the query and key projections themselves."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from qkpipe.hooks import Hook
from qkpipe.interventions.trigger import Triggered, TriggeredHook
from qkpipe.lazy import torch
from qkpipe.probes.causal import Matrix


class SpectralCap(Triggered):
    """``spectral_cap``: once fired, no singular value of the named matrices exceeds ``cap``, or, without one, the matrix's own
    largest at firing.

    After every update the weight is replaced by the nearest one in Frobenius norm that keeps the cap: U min(S, cap) V'. Costs a
    singular value decomposition of every named matrix a step.
    """

    kind: Literal["spectral_cap"] = "spectral_cap"
    cap: Annotated[float, Field(gt=0)] | None = None
    matrices: Annotated[tuple[Matrix, ...], Field(min_length=1)] = ("W_Q", "W_K")

    def label(self) -> str:
        cap = "at_firing" if self.cap is None else f"{self.cap:g}"
        return self.named(f"spectral_cap({cap},{'+'.join(self.matrices)})")

    def build(self, context: Any) -> Hook:
        return _SpectralCapHook(context, self)


class _SpectralCapHook(TriggeredHook):
    def __init__(self, context: Any, config: SpectralCap) -> None:
        super().__init__(context, config)
        self._weights = [weight for _, _, weight in context.matrices(config.matrices)]
        self._caps: list[float] = []

    def before_update(self, step: int) -> None:
        if self.fired_just_before(step):
            given = self.config.cap
            self._caps = [_largest(weight) if given is None else given for weight in self._weights]

    def after_update(self, step: int) -> None:
        for weight, cap in zip(self._weights, self._caps):
            capped = cap_singular_values(weight.detach(), cap)
            if capped is not None:
                with torch.no_grad():
                    weight.copy_(capped)

    def extra_state(self) -> dict[str, Any]:
        return {"caps": self._caps}

    def load_extra_state(self, state: dict[str, Any]) -> None:
        self._caps = state["caps"]


def cap_singular_values(W: Any, cap: float) -> Any | None:
    """U min(S, cap) V' of a matrix, by float64; None where no singular value is above the cap or an entry is not finite."""
    if not bool(W.isfinite().all()):
        return None
    U, S, Vh = torch.linalg.svd(W.double(), full_matrices=False)
    if float(S[0]) <= cap:
        return None
    return ((U * S.clamp_max(cap)) @ Vh).to(W.dtype)


def _largest(W: Any) -> float:
    return float(torch.linalg.matrix_norm(W.detach().double(), ord=2))
