"""Where ``QKGuard(..., log=...)`` can write: any function ``log(step, values)``, and two adapters that make one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from qkpipe.errors import BadInput

Log = Callable[[int, Mapping[str, float]], None]
"""Called with the step and {"max_logit", "strength"}: the largest applied logit, the mean strength of normalisation (0 to 1)."""


def to_mlflow(prefix: str = "qk_guard") -> Log:
    """Log to the active MLflow run, as ``<prefix>/max_logit`` and ``<prefix>/strength``. BadInput where MLflow is missing."""
    try:
        import mlflow
    except ImportError:
        raise BadInput("to_mlflow: MLflow is not installed; pip install mlflow") from None

    def log(step: int, values: Mapping[str, float]) -> None:
        mlflow.log_metrics({f"{prefix}/{name}": value for name, value in values.items()}, step=step)

    return log


def to_tensorboard(writer: Any, prefix: str = "qk_guard") -> Log:
    """Log to a TensorBoard ``SummaryWriter``, or anything with its ``add_scalar(tag, value, step)``."""

    def log(step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            writer.add_scalar(f"{prefix}/{name}", value, step)

    return log
