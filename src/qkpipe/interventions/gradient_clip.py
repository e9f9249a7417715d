"""What arms share that clip gradients by a rule of their own, inside the optimizer's step."""

from __future__ import annotations

from typing import Any

from qkpipe.errors import BadInput
from qkpipe.hooks import Hook


def check_no_other_clip(kind: str, run: Any) -> None:
    """Norms that the run has clipped already would show the rule nothing."""
    if run.optimizer.clip is not None:
        raise BadInput(
            f"interventions.kind: {kind!r} replaces the global clip; optimizer.clip must be null, got {run.optimizer.clip:g}"
        )


class GradientClipHook(Hook):
    """``rival`` has already attached itself to the optimizer."""

    def __init__(self, rival: Any) -> None:
        self._rival = rival

    @property
    def clipped_norm(self) -> float | None:
        return self._rival.clipped_norm

    def state_dict(self) -> dict[str, Any]:
        return self._rival.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._rival.load_state_dict(state)
