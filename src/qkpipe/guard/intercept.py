"""Puts a guard between a model and the attention kernels it calls, without edits to the model.

Two things meet. Every module that could attend enters a scope while its forward runs, so that a kernel called then knows its
site. And wherever a loaded Python module, or one of those modules, names a kernel, that name is bound to a stand-in which asks
the scope, and which outside of any scope is the kernel. The names are given back when the last guard is detached.
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from types import FunctionType, ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qkpipe.errors import BadInput
from qkpipe.guard.logits import Mask
from qkpipe.guard.site import Site

FLEX = "torch.nn.attention.flex_attention"
_SITE = "_qk_site"
_TORCH_LAYERS = ("torch.nn.modules.", "torch.nn.utils.", "torch.ao.")


class _Now:
    """The site of the innermost guarded module whose forward is running."""

    def __init__(self) -> None:
        self.site: Site | None = None


class _Scope(threading.local):
    """``now``, for each thread. An object within, because code that torch.compile makes cannot write to a thread's own."""

    def __init__(self) -> None:
        self.now = _Now()


_scope = _Scope()


def places(model: nn.Module) -> list[nn.Module]:
    """The modules that could call an attention kernel themselves: all but torch's own layers, of which one does."""
    return [
        module
        for module in model.modules()
        if isinstance(module, nn.MultiheadAttention) or not type(module).__module__.startswith(_TORCH_LAYERS)
    ]


def occupied(place: nn.Module) -> bool:
    """Whether someone senses here already."""
    return _SITE in place.__dict__


def enter_scope(place: nn.Module, site: Site) -> list[Any]:
    """Kernels called in ``place``'s forward are ``site``'s. Returns handles that undo it."""
    place.__dict__[_SITE] = site
    return [
        place.register_forward_pre_hook(_enter, prepend=True),
        place.register_forward_hook(_leave, always_call=True),
        _Place(place),
        *_own_kernels(place),
    ]


# Functions, not methods of a site: a deep copy of the model (an average of weights) must use its own site.
def _enter(module: nn.Module, _arguments: Any) -> None:
    site = module.__dict__[_SITE]
    site.outers.append(_scope.now.site)
    _scope.now.site = site


def _leave(module: nn.Module, _arguments: Any, output: Any) -> None:
    site = module.__dict__[_SITE]
    if not torch.compiler.is_compiling() and site.guard.search is not None:
        site.guard.looked(site, output)
    _scope.now.site = site.outers.pop()


class _Place:
    """Takes a module's site away, also while its forward is running."""

    def __init__(self, place: nn.Module) -> None:
        self._place = place

    def remove(self) -> None:
        site = self._place.__dict__.pop(_SITE)
        if site.outers:
            _scope.now.site = site.outers[0]


class _Attribute:
    """Gives an attribute of an instance its value back."""

    def __init__(self, owner: nn.Module, name: str, value: Any) -> None:
        self._owner, self._name, self._value = owner, name, value

    def remove(self) -> None:
        self._owner.__dict__[self._name] = self._value


def _own_kernels(place: nn.Module) -> Iterator[_Attribute]:
    """Kernels that an instance keeps, as in ``self.attend = F.scaled_dot_product_attention``."""
    for name, value in list(place.__dict__.items()):
        if (stand_in := _stand_in(value)) is not None:
            place.__dict__[name] = stand_in
            yield _Attribute(place, name, value)


_users: weakref.WeakSet[Any] = weakref.WeakSet()
_bound: list[tuple[Any, str, Any, Any]] = []  # owner, name, what it was, what it is
_fastpath: list[bool] = []


def acquire(guard: Any) -> None:
    """Bind the stand-ins, also in what was imported since the last time."""
    _users.add(guard)
    for owner, name, value in list(_names()):
        stand_in = _stand_in(value)
        if stand_in is not None:
            _bind(owner, name, value, stand_in)
    if (hf := sys.modules.get("transformers.modeling_utils")) is not None:
        original = hf.AttentionInterface.get_interface
        if not hasattr(original, "qkpipe_original"):
            _bind(hf.AttentionInterface, "get_interface", original, _get_interface(original))
    if not _fastpath:
        # In evaluation torch's own attention layer has a fused path that calls no kernel by name.
        _fastpath.append(torch.backends.mha.get_fastpath_enabled())
        torch.backends.mha.set_fastpath_enabled(False)


def release(guard: Any) -> None:
    """Give every name back after the last guard."""
    _users.discard(guard)
    if _users:
        return
    while _bound:
        owner, name, was, now = _bound.pop()
        if vars(owner).get(name) is now:
            setattr(owner, name, was)
    if _fastpath:
        torch.backends.mha.set_fastpath_enabled(_fastpath.pop())


def _bind(owner: Any, name: str, was: Any, now: Any) -> None:
    setattr(owner, name, now)
    _bound.append((owner, name, was, now))


def _names() -> Iterator[tuple[ModuleType, str, Any]]:
    for module_name, module in list(sys.modules.items()):
        inside_torch = module_name.partition(".")[0] == "torch"
        if not isinstance(module, ModuleType) or (inside_torch and module_name not in (F.__name__, FLEX)):
            continue
        if not module_name.startswith("qkpipe.guard"):
            yield from ((module, name, value) for name, value in list(vars(module).items()))


_SDPA = F.scaled_dot_product_attention
_stand_ins: dict[int, tuple[Any, Any]] = {}  # by id, with the kernel itself so that the id stays its own


def _stand_in(value: Any) -> Any | None:
    """What to call in place of a kernel, or of ``torch.compile`` of one; None for all else."""
    kernel = value
    if type(value) is FunctionType and "_torchdynamo_orig_callable" in value.__dict__:
        kernel = value.__dict__["_torchdynamo_orig_callable"]
    flex = sys.modules.get(FLEX)
    if kernel is _SDPA:
        make = _sdpa
    elif flex is not None and type(kernel) is FunctionType and _is_flex(kernel):
        make = _flex
    else:
        return None
    if id(value) not in _stand_ins:
        _stand_ins[id(value)] = (value, make(value))
    return _stand_ins[id(value)][1]


def _is_flex(function: FunctionType) -> bool:
    return function.__module__ == FLEX and function.__name__ == "flex_attention"


def _sdpa(kernel: Callable) -> Callable:
    # Not at the top: it imports torch's compiler, over a second that a training run need not wait.
    from torch.nn.attention.bias import CausalBias

    # No functools.wraps: `__wrapped__` would make torch.compile look through to the kernel.
    def scaled_dot_product_attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        site = _scope.now.site
        options = {
            "attn_mask": attn_mask,
            "dropout_p": dropout_p,
            "is_causal": is_causal,
            "scale": scale,
            "enable_gqa": enable_gqa,
        }
        if isinstance(attn_mask, CausalBias):
            # It knows the kernel by its name in torch.nn.functional, which is ours now.
            attend: Callable = CausalBias._dispatch
            options["attn_mask"] = attn_mask
        else:
            attend = kernel
        if site is None:
            return attend(query, key, value, **options)
        if query.is_nested:
            raise BadInput(
                "QKGuard: attention on nested tensors cannot be guarded; pad them, and give a mask"
            )
        q, k = _lift(query), _lift(key)
        q, k = site.act(q, k)
        _scope.now.site = None
        try:
            out = attend(_unlift(q, query), _unlift(k, key), value, **options)
        finally:
            _scope.now.site = site
        if isinstance(attn_mask, CausalBias):
            allowed: Any = functools.partial(attn_mask._materialize, query.device)
        else:
            allowed = None if attn_mask is None else _lift_mask(attn_mask, query)
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        site.sense(q, k, scale, None, Mask(is_causal, allowed))
        _mark(site, out, query, key, value, attn_mask)
        return out

    return scaled_dot_product_attention


def _flex(kernel: Callable) -> Callable:
    from torch.nn.attention.flex_attention import AuxRequest

    def flex_attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        score_mod: Callable | None = None,
        block_mask: Any = None,
        scale: float | None = None,
        enable_gqa: bool = False,
        return_lse: bool = False,
        kernel_options: Any = None,
        *,
        return_aux: Any = None,
    ) -> Any:
        site = _scope.now.site
        options = {
            "score_mod": score_mod,
            "block_mask": block_mask,
            "scale": scale,
            "enable_gqa": enable_gqa,
            "kernel_options": kernel_options,
        }
        if site is None:
            return kernel(query, key, value, return_lse=return_lse, return_aux=return_aux, **options)
        q, k = site.act(query, key)
        # Its own maximum is that of the logits only where no score_mod has changed them.
        ask = score_mod is None and not return_lse and query.is_cuda and site.asks_kernel()
        wanted = return_aux
        if ask:
            wanted = AuxRequest(lse=return_aux is not None and return_aux.lse, max_scores=True)
        _scope.now.site = None
        try:
            out = kernel(q, k, value, return_lse=return_lse, return_aux=wanted, **options)
        finally:
            _scope.now.site = site
        max_logit_BH = out[1].max_scores.detach().amax(-1) if ask else None
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        site.sense(q, k, scale, max_logit_BH, Mask(allowed=_flex_mask(block_mask, q, k)))
        _mark(site, out, query, key, value)
        return out[0] if ask and return_aux is None else out

    return flex_attention


def _flex_mask(block_mask: Any, q: Tensor, k: Tensor) -> Callable[[], Tensor] | None:
    if block_mask is None:
        return None
    from torch.nn.attention.flex_attention import create_mask

    B, H, T, _ = q.shape
    return lambda: create_mask(block_mask.mask_mod, B, H, T, k.shape[2], device=q.device)


def _get_interface(original: Callable) -> Callable:
    """Hugging Face's look-up of the attention function a config names."""

    def get_interface(self: Any, attn_implementation: str, default: Callable) -> Callable:
        kernel = original(self, attn_implementation, default)
        # Its SDPA calls torch's by name, which has a stand-in.
        if _scope.now.site is None or kernel.__name__ == "sdpa_attention_forward":
            return kernel
        return functools.partial(_hf_attention, kernel, attn_implementation)

    get_interface.qkpipe_original = original
    return get_interface


def _hf_attention(
    kernel: Callable,
    implementation: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    *arguments: Any,
    **options: Any,
) -> Any:
    site = _scope.now.site
    if site is None:
        return kernel(module, query, key, value, attention_mask, *arguments, **options)
    q, k = site.act(query, key)
    _scope.now.site = None
    try:
        out = kernel(module, q, k, value, attention_mask, *arguments, **options)
    finally:
        _scope.now.site = site
    scale = options.get("scaling")
    scale = getattr(module, "scaling", query.shape[-1] ** -0.5) if scale is None else scale
    site.sense(q, k, scale, None, _hf_mask(implementation, module, q, k, attention_mask, options))
    _mark(site, out, query, key, value)
    return out


def _hf_mask(implementation: str, module: nn.Module, q: Tensor, k: Tensor, mask: Any, options: dict) -> Mask:
    if mask is not None and not isinstance(mask, Tensor):
        return Mask(allowed=_flex_mask(mask, q, k))
    if mask is not None and mask.dim() == 4:
        return Mask(allowed=mask[..., : k.shape[2]])
    if implementation in ("eager", "flex_attention"):
        return Mask()
    # Flash kernels take a mask of the padding alone, and make the causal one and the window themselves.
    causal = options.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    window = options.get("sliding_window")

    def allowed() -> Tensor:
        T, S = q.shape[2], k.shape[2]
        seen = torch.ones(1, 1, T, S, dtype=torch.bool, device=q.device)
        if window is not None:
            seen = seen.triu(S - T - window + 1)
        if causal:
            seen = seen.tril(S - T)
        return seen if mask is None else seen & mask.bool()[:, None, None, :]

    return Mask(allowed=allowed)


def _mark(site: Site, out: Any, *inputs: Any) -> None:
    if torch.compiler.is_compiling():
        site.guard.compiled = True
    elif site.guard.search is not None:
        site.guard.search.guarded(out, inputs)


def _lift(x: Tensor) -> Tensor:
    """To (B, H, T, K); without a head dimension it is one head."""
    if x.dim() == 4:
        return x
    if x.dim() == 3:
        return x.unsqueeze(1)
    return x[None, None] if x.dim() == 2 else x.flatten(0, x.dim() - 4)


def _unlift(x: Tensor, like: Tensor) -> Tensor:
    return x if x.dim() == like.dim() else x.reshape(like.shape)


def _lift_mask(mask: Tensor, query: Tensor) -> Tensor:
    if query.dim() == 3 and mask.dim() == 3:
        return mask.unsqueeze(1)
    if mask.dim() > 4:
        return mask.expand(*query.shape[:-3], *mask.shape[-3:]).flatten(0, mask.dim() - 4)
    return mask if mask.dim() > 1 else mask[None]
