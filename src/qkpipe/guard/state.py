"""The guard's state in the model's own ``state_dict``, so that no checkpoint is without it.

It is one buffer of the guarded model, ``qk_guard``. A model without a guard refuses the key under strict loading. A guarded model
takes a checkpoint without the key for what it is: weights trained without normalisation, so the guard is dormant again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from qkpipe.errors import BadInput
from qkpipe.guard.latch import HEADER, KIND, KINDS, VERSION, Latch, normalises

BUFFER = "qk_guard"


def without_guard(state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The state dict for a model that has no guard: without its key, which is refused where normalisation is on.

    Raises:
        BadInput: the guard has acted; these weights are ruined by dropping the normalisation they were trained with.
    """
    plain = dict(state_dict)
    for key in [key for key in plain if key.rsplit(".", 1)[-1] == BUFFER]:
        if normalises(plain.pop(key)):
            raise BadInput(
                f"{key}: QK normalisation is on in these weights, and without it they are ruined; "
                "load them into a model with a QKGuard on it"
            )
    return plain


def check(state: Tensor, latch: Latch) -> None:
    """Raises BadInput where a saved state is not one of a guard like this."""
    units = (state.numel() - HEADER) // 2
    expected = {"model": 1, "layer": latch.layers}.get(latch.kind, units)
    kind = KINDS[int(state[KIND])] if 0 <= int(state[KIND]) < len(KINDS) else "unknown"
    if int(state[VERSION]) != 1:
        raise BadInput(f"{BUFFER}: state of an unknown version {int(state[VERSION])}; allowed: 1")
    if kind != latch.kind:
        raise BadInput(f"{BUFFER}: saved with latch={kind!r}, this guard has latch={latch.kind!r}")
    if units != expected or units % (latch.layers if kind == "head" else 1):
        raise BadInput(f"{BUFFER}: saved for a model of other layers ({units} latches, expected {expected})")


def install(model: nn.Module, latch: Latch, changed: Callable[[], None]) -> list[Any]:
    """Keep the state as a buffer of ``model``; ``changed`` is called after each load. Returns the handles that undo the hooks."""
    device = next((tensor.device for tensor in model.parameters()), None)
    if device is not None and device.type == "meta":
        raise BadInput(
            "QKGuard: the model's weights are on the meta device; attach the guard once they are real"
        )
    model.register_buffer(BUFFER, latch.fresh(0).to(device))

    def before(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
        own = module._buffers[BUFFER]
        saved = state_dict.get(prefix + BUFFER)
        if saved is None:
            heads = (own.numel() - HEADER) // 2 // latch.layers if latch.kind == "head" else 0
            state_dict[prefix + BUFFER] = latch.fresh(heads)
            return
        check(saved, latch)
        if saved.shape != own.shape:
            module._buffers[BUFFER] = saved.to(own.device, copy=True)

    def after(_module: nn.Module, _incompatible: Any) -> None:
        changed()

    return [model.register_load_state_dict_pre_hook(before), model.register_load_state_dict_post_hook(after)]
