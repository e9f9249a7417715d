"""Saving a guarded Hugging Face model so that it cannot be loaded by mistake without its normalisation.

``from_pretrained`` only warns of keys it does not know. So once normalisation is on, ``save_pretrained`` writes the weights as
the variant ``qk_guard``, which a plain ``from_pretrained`` does not find, and puts the guard's state into ``config.json``, where
a :class:`QKGuard` on the loaded model finds it:

    model = GPT2LMHeadModel.from_pretrained(path, variant="qk_guard")
    guard = QKGuard(model)   # normalises, as the saved model did
"""

from __future__ import annotations

import sys
from types import MethodType
from typing import Any

from torch import nn

from qkpipe.guard.latch import normalises
from qkpipe.guard.state import BUFFER, without_guard

VARIANT = "qk_guard"


def adopt(model: nn.Module) -> None:
    """Take over ``model.save_pretrained``, if it is a Hugging Face model."""
    if _is_pretrained(model):
        model.__dict__["save_pretrained"] = MethodType(_save_pretrained, model)


def let_go(model: nn.Module) -> None:
    model.__dict__.pop("save_pretrained", None)


def saved_state(model: nn.Module) -> list[int] | None:
    """The guard's state of a model loaded from what :func:`_save_pretrained` wrote."""
    return getattr(model.config, BUFFER, None) if _is_pretrained(model) else None


def _is_pretrained(model: nn.Module) -> bool:
    modeling = sys.modules.get("transformers.modeling_utils")
    return modeling is not None and isinstance(model, modeling.PreTrainedModel)


def _save_pretrained(
    self: Any,
    save_directory: Any,
    is_main_process: bool = True,
    state_dict: dict[str, Any] | None = None,
    **options: Any,
) -> Any:
    state = self._buffers[BUFFER]
    weights = self.state_dict() if state_dict is None else state_dict
    before = self.config.__dict__.pop(BUFFER, None)
    if normalises(state):
        setattr(self.config, BUFFER, state.tolist())
        options["variant"] = VARIANT
    else:
        weights = without_guard(weights)
    try:
        return type(self).save_pretrained(self, save_directory, is_main_process, weights, **options)
    finally:
        self.config.__dict__.pop(BUFFER, None)
        if before is not None:
            setattr(self.config, BUFFER, before)
