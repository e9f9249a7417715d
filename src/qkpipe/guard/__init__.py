"""QK-Guard: a dormant controller that contains the query-key runaway of low-precision training (paper section 5).

It watches the largest attention logit of every head. While all stay at or below ``threshold`` it does nothing: outputs and
gradients are bitwise those of the unguarded model. Past it, it latches on parameter-free per-head QK normalisation for the whole
model, from the next forward on, after which every fp32 logit is bounded by ``(1 + 1e-5) * |scale| * d_head``.

    guard = QKGuard(model, threshold=30.0)
    ...train as before...
    guard.fired, guard.max_logit()
"""

from qkpipe.guard.controller import QKGuard
from qkpipe.guard.latch import Firing
from qkpipe.guard.loggers import to_mlflow, to_tensorboard
from qkpipe.guard.logits import logit_bound_per_head, max_logit_per_head
from qkpipe.guard.state import without_guard

__all__ = [
    "Firing",
    "QKGuard",
    "logit_bound_per_head",
    "max_logit_per_head",
    "to_mlflow",
    "to_tensorboard",
    "without_guard",
]
