"""QKGuard: attaches to a model, closes its steps, and switches normalisation on and off."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from qkpipe.errors import BadInput
from qkpipe.guard import huggingface, intercept
from qkpipe.guard.latch import (
    COUNT,
    EXPLICIT,
    FIRST,
    FULL,
    HEADER,
    KINDS,
    LATEST,
    STEP,
    Firing,
    Latch,
    fp32_at_most,
    read_firing,
)
from qkpipe.guard.loggers import Log
from qkpipe.guard.mailbox import Mailbox
from qkpipe.guard.search import Search
from qkpipe.guard.site import Site
from qkpipe.guard.state import BUFFER, check, install


class QKGuard:
    """Sense the maximum attention logit per head, and latch QK normalisation on when it passes ``threshold``.

    A step is one forward of ``model`` in training mode; when accumulating gradients, all forwards up to a call of :meth:`step`.
    Under torch.distributed the maximum is taken over ranks. Sensing goes on after firing. Forwards in evaluation mode, and the
    recomputation of activation checkpointing, are not sensed.

    Its state is a buffer of the model, ``qk_guard``, so it is in ``model.state_dict()``; a model without a guard refuses that key
    (see :func:`qkpipe.guard.without_guard`). Inside torch.compile, and on a GPU, nothing waits for the device: the switch is a
    ``torch.where`` and ``on_fire`` and ``log`` are called when the values have arrived, at a later step. Compiled as a whole, the
    model senses every step whatever ``every`` is, and calls ``on_fire`` and ``log`` from :meth:`step` alone.

    Args:
        model: calls torch's ``scaled_dot_product_attention`` or FlexAttention, or Hugging Face's attention interface, anywhere
            below it, or has modules with a ``qk_site`` slot. DDP wrappers and compiled models are looked into.
        threshold: tau, in logits after the scale; the paper uses 30.
        mode: ``act``, or ``log`` to record the firing and change nothing.
        every: sense every so many steps.
        explicit_steps: steps are closed by :meth:`step` alone, from the first one on.
        latch: what is switched as one when a logit of it passes: the ``model`` (the paper's), a ``layer``, or a ``head`` (query
            heads that share a key head go together).
        release: switch off again once the logits that normalisation hides are all at or below this, in what was switched as one;
            below ``threshold``. None: never.
        hand_over: steps over which normalisation comes and goes; vectors are divided by their RMS to the power of n / hand_over,
            so the bound holds from the last of them on.
        on_fire: called with the :class:`Firing` of each step at which something newly passed the threshold.
        log: called with (step, {"max_logit", "strength"}) every ``log_every`` steps, where sensed.
        log_every: see ``log``.
        allow_unguarded: go on where some attention of the model cannot be intercepted; :attr:`unguarded` names it.
        process_group: ranks that hold the same layers; all by default.

    Raises:
        BadInput: nothing to guard in ``model``, a guard already there, or an option out of range. A model in whose first training
            forward no attention, or not all of it, could be intercepted raises it there, and is detached.
    """

    def __init__(
        self,
        model: nn.Module,
        threshold: float = 30.0,
        mode: Literal["act", "log"] = "act",
        *,
        every: int = 1,
        explicit_steps: bool = False,
        latch: Literal["model", "layer", "head"] = "model",
        release: float | None = None,
        hand_over: int = 1,
        on_fire: Callable[[Firing], None] | None = None,
        log: Log | None = None,
        log_every: int = 1,
        allow_unguarded: bool = False,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        if not threshold > 0:
            raise BadInput(f"QKGuard: threshold must be above 0, got {threshold!r}")
        if mode not in ("act", "log"):
            raise BadInput(f"QKGuard: mode must be 'act' or 'log', got {mode!r}")
        if latch not in KINDS:
            raise BadInput(f"QKGuard: latch must be 'model', 'layer' or 'head', got {latch!r}")
        if release is not None and not release < threshold:
            raise BadInput(f"QKGuard: release must be below the threshold {threshold!r}, got {release!r}")
        for name, value in (("every", every), ("hand_over", hand_over), ("log_every", log_every)):
            if value < 1:
                raise BadInput(f"QKGuard: {name} must be at least 1, got {value!r}")
        model = _innermost(model)
        if BUFFER in model._buffers or any(getattr(m, "qk_site", None) is not None for m in model.modules()):
            raise BadInput("QKGuard: this model already has a guard; detach() it first")
        self.threshold, self.mode, self.every = float(threshold), mode, every
        self.explicit_steps, self.on_fire = explicit_steps, on_fire
        self.log, self.log_every = log, log_every
        self.allow_unguarded, self._group = allow_unguarded, process_group

        self._slots = [module for module in model.modules() if hasattr(module, "qk_site")]
        places = self._slots or intercept.places(model)
        if not places:
            raise BadInput(
                f"QKGuard: found no attention to guard in {type(model).__name__}: it has no module of its own that could "
                "call torch's scaled_dot_product_attention, FlexAttention or Hugging Face's attention interface"
            )
        self._model = model
        release = None if release is None else fp32_at_most(release)
        self.latch = Latch(latch, fp32_at_most(threshold), mode == "act", release, hand_over, len(places))
        self.wants_raw = release is not None
        self.enough = self.latch.threshold if release is None else release
        """A bound at or below this needs no exact maximum."""
        names = {module: name for name, module in model.named_modules()}
        self._names = [names[place] for place in places]
        self._sites = [Site(self, index) for index in range(len(places))]
        self._width = 1  # most heads of a layer
        self._last: Tensor | None = (
            None  # peaks of the latest closed step, (layers, heads); None where sites know better
        )
        self._restored = float("nan")
        self._count = 0  # steps, as the host knows them where it cannot ask the device
        self._mailbox = Mailbox(self._deliver)

        self.acting: Literal["no", "fully", "by strength"] = "no"
        self.watching = self.sensing = self.sensed = False
        self._met = False
        self._inside = False
        self.lazy = True
        self.compiled = False  # whether attention ran in compiled code, which shows no graph
        self.search: Search | None = None
        self.unguarded: list[str] | None = None
        """Names of modules that attend where no guard sees it, after the first training forward with a gradient: see
        :mod:`qkpipe.guard.search`. None where that could not be found out: in compiled code, and in models with slots.
        """

        self._handles = install(model, self.latch, self._loaded)
        self._handles += [
            model.register_forward_pre_hook(self._begin_forward),
            model.register_forward_hook(self._end_forward),
        ]
        self._set_strength()
        for place, site in zip(places, self._sites, strict=True):
            if self._slots:
                place.qk_site = site
            else:
                self._handles += intercept.enter_scope(place, site)
        if not self._slots:
            intercept.acquire(self)
        huggingface.adopt(model)
        if self.explicit_steps:
            self._state[EXPLICIT] = 1
        if saved := huggingface.saved_state(model):
            self._load(torch.tensor(saved))
        _forget_compiled()

    @property
    def fired(self) -> bool:
        """Whether the threshold has been passed."""
        return int(self._state[COUNT]) > 0

    @property
    def firing(self) -> Firing | None:
        """The first firing; ``layer`` counts the attention layers of :attr:`layers`."""
        return self._firing(self._state.tolist(), FIRST)

    @property
    def active(self) -> bool:
        """Whether normalisation is on, anywhere."""
        return bool((self.strength > 0).any())

    @property
    def layers(self) -> list[str]:
        """Names of the modules that are guarded; complete after the first forward."""
        return [self._names[site.index] for site in self._sites if self._slots or site.heads]

    def max_logit(self) -> float:
        """Largest applied logit of the latest sensed step (after the scale, before any rounding); NaN before the first.

        Exact: where sensing made do with a bound, the maximum is computed now. Over all ranks once the step is closed.
        """
        for site in self._sites:
            site.settle()
        opened = [site.peak for site in self._sites if site.dirty]
        if not self.lazy and opened:
            return float(torch.stack([peak.max() for peak in opened]).max())
        if self._last is not None:
            return float(self._last.max())
        exact = [site.exact for site in self._sites if site.exact is not None]
        return float(torch.stack([peak.max() for peak in exact]).max()) if exact else self._restored

    def step(self) -> None:
        """Close a step: take the maximum over its forwards and ranks, and fire if it passed the threshold.

        Optional: the first call makes steps explicit; until then every training forward was one.
        """
        if self.explicit_steps:
            self._close()
            self._latch()
        else:
            self._state[EXPLICIT] = 1
        self.explicit_steps = True
        self._mailbox.poll()

    def activate(self) -> None:
        """Normalise the whole model from the next forward on, whatever its logits; with ``hand_over`` gradually."""
        flag, level = self._state[HEADER:].view(2, -1).unbind()
        flag.fill_(1)
        level.copy_((level + -(-FULL // self.latch.hand_over)).clamp(max=FULL))

    def detach(self) -> None:
        """Take the guard off: the model is what it was, and normalisation is off."""
        for handle in self._handles:
            handle.remove()
        for slot in self._slots:
            slot.qk_site = None
        if not self._slots:
            intercept.release(self)
        huggingface.let_go(self._model)
        self._model._buffers.pop(BUFFER, None)
        _forget_compiled()

    def state_dict(self) -> dict[str, Any]:
        """The state as plain values, for a checkpoint that does not hold the model's ``state_dict``, and the latest maximum."""
        firing = self.firing
        return {
            "state": self._state.tolist(),
            "latest": self.max_logit(),
            "firing": asdict(firing) if firing else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._load(torch.tensor(state["state"]))
        self._restored = state["latest"]

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copy of a guarded model, deep or unpickled, is guarded too."""
        self.__dict__.update(state)
        self._unshared = True  # pickle makes views tensors of their own
        if not self._slots:
            intercept.acquire(self)

    def meet(self, site: Site, heads: int) -> None:
        """Attention runs at ``site``, with so many heads."""
        self._met = True
        if not self._inside and not self._slots:
            self._outside()
        if site.heads >= heads:
            return
        site.heads = heads
        self._width = max(self._width, heads)
        wider = (
            self.latch.kind == "head"
            and (self._state.numel() - HEADER) // 2 < self._width * self.latch.layers
        )
        if wider:
            if torch.compiler.is_compiling():
                raise BadInput("QKGuard: latch='head' needs one forward before the model is compiled")
            self._model._buffers[BUFFER] = self.latch.widen(self._state, self._width)
            self._set_strength()

    @property
    def _state(self) -> Tensor:
        return self._model._buffers[BUFFER]

    @property
    def _on_device(self) -> bool:
        """Whether the host must not look at tensors."""
        return torch.compiler.is_compiling() or self._state.device.type != "cpu"

    def _load(self, state: Tensor) -> None:
        check(state, self.latch)
        self._model._buffers[BUFFER] = state.to(self._state.device)
        self._loaded()

    def _loaded(self) -> None:
        state = self._state
        self.explicit_steps = self.explicit_steps or bool(state[EXPLICIT])
        state[EXPLICIT] = int(self.explicit_steps)
        self._count = int(state[STEP])
        self._last, self._restored = None, float("nan")
        for site in self._sites:
            site.discard()
            site.forget()
        self._mailbox.restart(int(state[COUNT]))
        self._latch()

    def _begin_forward(self, model: nn.Module, _arguments: Any) -> None:
        self._inside, self.search = True, None
        self._latch()
        self.watching, self.sensed = model.training, False
        if not model.training:
            return
        self.sensing = self._due()
        self.search = self._new_search()
        self.lazy = not self._on_device and self._world() == 1
        if not self.explicit_steps:
            for site in self._sites:
                if site.dirty:
                    site.discard()  # left behind by a forward that was broken off

    def _end_forward(self, model: nn.Module, _arguments: Any, output: Any) -> None:
        self._inside = self.watching = False
        if not model.training:
            return
        if not self._met:
            self.detach()
            raise BadInput(
                f"QKGuard: {type(model).__name__} ran a training forward and no attention in it could be intercepted, so the "
                "guard is taken off; it must call torch's scaled_dot_product_attention, FlexAttention or Hugging Face's "
                "attention interface (eager, sdpa, flex_attention), or have modules with a `qk_site` slot"
            )
        if self.search is not None:
            self.search.look("", output)
            self._conclude()
        if self.sensed and not self.explicit_steps:
            self._close()
        if not torch.compiler.is_compiling():
            self._mailbox.poll()

    def _new_search(self) -> Search | None:
        if torch.compiler.is_compiling():
            return None
        needless = self.unguarded is not None or self._slots or self.compiled
        return Search() if not needless and torch.is_grad_enabled() else None

    def looked(self, site: Site, output: Any) -> None:
        """The module of ``site`` has returned, and those within."""
        self.search.look(self._names[site.index], output)

    def _conclude(self) -> None:
        search, self.search = self.search, None
        if self.compiled or not search.graphs:
            return  # nothing was differentiable: the next forward may be
        self.unguarded = search.found
        if search.found and not self.allow_unguarded:
            self.detach()
            raise BadInput(
                f"QKGuard: attention in {', '.join(name or 'the model itself' for name in search.found)} cannot be intercepted "
                "(an own softmax, or a kernel called directly), so the guard is taken off; allowed: "
                "scaled_dot_product_attention, FlexAttention, Hugging Face's attention interface, or allow_unguarded=True to "
                "guard the rest"
            )

    def _outside(self) -> None:
        """Attention of a guarded model outside of its own forward: recomputed in a backward, or a part called alone."""
        if torch.compiler.is_compiling() or not self._model.training or not torch.is_grad_enabled():
            return
        if torch._C._current_graph_task_id() == -1:
            raise BadInput(
                f"QKGuard: attention ran in training outside the forward of {type(self._model).__name__}, where the guard "
                "cannot count it as a step; attach the guard to the module that your training loop calls"
            )

    def _due(self) -> bool:
        if torch.compiler.is_compiling():
            return True
        step = self._count if self._on_device else int(self._state[STEP])
        return step % self.every == 0

    def _latch(self) -> None:
        """Only between steps: a layer recomputed in the backward must do what it did in the forward."""
        state = self._state
        if self._on_device:
            strength = self.latch.strength(state)
            if (
                self._unshared
                or self.strength.device != strength.device
                or self.strength.shape != strength.shape
            ):
                self._set_strength()
            else:
                self.strength.copy_(strength)
            self.acting = "by strength"
            return
        top = int(state[HEADER + (state.numel() - HEADER) // 2 :].amax())
        if top == 0 and self.acting == "no":
            return
        self._set_strength()
        whole = bool((self.strength == 1).all())
        self.acting = "no" if top == 0 else "fully" if whole else "by strength"

    def _set_strength(self) -> None:
        self.strength, self._unshared = self.latch.strength(self._state), False
        for site in self._sites:
            # A view, not an index, which compiled code would be specialised on.
            site.strength = self.strength if self.latch.kind == "model" else self.strength[site.index]

    def _close(self) -> None:
        dirty = [site for site in self._sites if site.dirty]
        state = self._state
        if self.lazy and not self._on_device:
            self._last = None
            quiet = self.acting == "no" and int(state[HEADER:].amax()) == 0
            peaks = (peak for site in dirty for peak in site.peak.tolist())
            if quiet and all(peak <= self.latch.threshold for peak in peaks):
                state[STEP] += 1
                self._finish(dirty, quiet=True)
                return
        peaks = raw = None
        if self.sensing and (dirty or not self.lazy):
            peaks = self._over_ranks(self._table([site.peak for site in self._sites]))
            if self.wants_raw:
                raw = self._over_ranks(self._table([site.raw_peak for site in self._sites]))
            if not self.lazy:
                if self._last is None or self._last.shape != peaks.shape or self._last.device != peaks.device:
                    self._last = peaks.clone()
                else:
                    self._last.copy_(peaks)
        state.copy_(self.latch.advance(state, peaks, raw))
        self._finish(dirty)

    def _finish(self, dirty: list[Site], quiet: bool = False) -> None:
        logging = self.log is not None and self.sensing and bool(dirty)
        tell = logging or (self.on_fire is not None and not quiet)
        if tell and not torch.compiler.is_compiling():
            state = self._state
            largest = self._last.max() if self._last is not None else None
            if logging and largest is None:
                largest = torch.tensor(self.max_logit())
            self._mailbox.post(state, largest if logging else None)
        for site in dirty:
            site.discard()
        if not torch.compiler.is_compiling():
            self._count += 1

    def _deliver(self, state: list[int], fired: bool, largest: float | None) -> None:
        """State and maximum of a closed step, on the host."""
        if fired and self.on_fire is not None:
            self.on_fire(self._firing(state, LATEST))
        step = state[STEP] - 1
        if self.log is not None and largest is not None and step % self.log_every == 0:
            levels = state[HEADER:][(len(state) - HEADER) // 2 :]
            self.log(step, {"max_logit": largest, "strength": sum(levels) / len(levels) / FULL})

    def _firing(self, state: list[int], place: int) -> Firing | None:
        firing = read_firing(state, place)
        if firing is None or self._slots:
            return firing
        before = sum(site.heads > 0 for site in self._sites[: firing.layer])
        return Firing(firing.step, before, firing.head, firing.logit)

    def _table(self, peaks: list[Tensor | None]) -> Tensor:
        """(layers, heads), -inf where nothing was seen."""
        device = self._state.device
        empty = torch.full((self._width,), float("-inf"), device=device)
        rows = [
            empty if peak is None else F.pad(peak, (0, self._width - peak.numel()), value=float("-inf"))
            for peak in peaks
        ]
        return torch.stack(rows)

    def _world(self) -> int:
        return dist.get_world_size(self._group) if dist.is_available() and dist.is_initialized() else 1

    def _over_ranks(self, peaks: Tensor) -> Tensor:
        if self._world() > 1:
            dist.all_reduce(peaks, op=dist.ReduceOp.MAX, group=self._group)
        return peaks


def _innermost(model: nn.Module) -> nn.Module:
    """The model itself under wrappers that a checkpoint should not know of."""
    while isinstance(model, nn.parallel.DistributedDataParallel) or hasattr(model, "_orig_mod"):
        model = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model._orig_mod
    return model


def _forget_compiled() -> None:
    """Code compiled before a guard came or went does not look for its hooks."""
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()
