"""Multi-head causal attention whose inner product can be any kernel: torch's own, or the streaming recurrence with faults."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from qkpipe.config.models import AttentionConfig, ModelConfig
from qkpipe.model.linear import Linear
from qkpipe.model.qk_norm import FullWidthRMSNorm, HeadLayerNorm, unit_rms
from qkpipe.model.rope import rotate
from qkpipe.numerics import attention_stats, streaming_attention

_BACKENDS = {"math": SDPBackend.MATH, "flash": SDPBackend.FLASH_ATTENTION}


class AttentionKernel(Protocol):
    """softmax(scale * q k') v, causal. ``draw`` seeds stochastic rounding. Returns the output and statistics, if it has any."""

    def __call__(
        self, q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor, draw: int
    ) -> tuple[Tensor, object | None]: ...


def make_kernel(config: AttentionConfig) -> AttentionKernel:
    """The attention kernel a config names."""
    if config.kind == "streaming":
        precision, repair = config.precision.resolve(), config.repair.resolve()

        def streaming(q: Tensor, k: Tensor, v: Tensor, draw: int) -> tuple[Tensor, object | None]:
            return streaming_attention(
                q, k, v, tile=config.tile, precision=precision, repair=repair, seed=draw, return_stats=True,
                block=config.block_tiles and config.block_tiles * config.tile, softcap=config.softcap,
            )  # fmt: skip

        return streaming

    backend = _BACKENDS.get(config.backend)

    def sdpa(q: Tensor, k: Tensor, v: Tensor, draw: int) -> tuple[Tensor, object | None]:
        grouped = q.shape[1] != k.shape[1]
        with sdpa_kernel(backend) if backend is not None else nullcontext():
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped), None

    return sdpa


@dataclass
class Tap:
    """What one attention layer did in one forward and backward, for telemetry; filled when armed."""

    x: Tensor | None = None
    q_raw: Tensor | None = None
    k_raw: Tensor | None = None
    q: Tensor | None = None
    k: Tensor | None = None
    v: Tensor | None = None
    out: Tensor | None = None
    d_out: Tensor | None = None
    stats: object | None = None

    def statistics(self) -> object:
        """Maximum logit, entropy and row-sum residual per (B, H), from the kernel itself or recomputed from what it returned."""
        if self.stats is not None:
            return self.stats
        return attention_stats(self.q, self.k, self.v, self.out, self.d_out)


class QKSite(Protocol):
    """Where a guard senses and acts in an attention layer."""

    def act(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]: ...

    def sense(self, q: Tensor, k: Tensor, scale: float, max_logit_BH: Tensor | None) -> None: ...


class Attention(nn.Module):
    """Projections W_Q, W_K, W_V, W_O as torch stores them, (out, in), without biases.

    ``kernel`` may be swapped (a clean splice does, for its second pass), ``qk_site`` is a guard's slot, ``tap`` telemetry's.
    """

    def __init__(self, config: ModelConfig, kernel: AttentionKernel) -> None:
        super().__init__()
        self.n_heads, self.n_kv_heads, self.d_head = config.n_heads, config.kv_heads, config.d_head
        width, kv_width = config.n_heads * config.d_head, config.kv_heads * config.d_head
        self.W_Q = Linear(config.d_model, width)
        self.W_K = Linear(config.d_model, kv_width)
        self.W_V = Linear(config.d_model, kv_width)
        self.W_O = Linear(width, config.d_model)
        self.scale = config.d_head**-0.5
        self.kernel = kernel
        self.rope = config.position == "rope"
        self.norm_q = _qk_norm(config.qk_norm, config.n_heads, config.d_head)
        self.norm_k = _qk_norm(config.qk_norm, config.kv_heads, config.d_head)
        self.qk_site: QKSite | None = None
        self.sensing = True
        self.tap: Tap | None = None
        self.max_logit_BH: Tensor | None = None  # of the latest forward, where the kernel reports it

    @property
    def normalises(self) -> bool:
        """Whether queries and keys are normalised from the first step on."""
        return self.norm_q is not None

    def queries_keys(self, x_BTD: Tensor) -> tuple[Tensor, Tensor]:
        """Queries (B, H, T, K) and keys (B, G, T, K) in their positions, before any normalisation."""
        q, k = (self._rotated(self._split(x_BTD, W)) for W in (self.W_Q, self.W_K))
        return q, k

    def forward(self, x_BTD: Tensor, draw: int = 0) -> Tensor:
        q, k, v = (self._split(x_BTD, W) for W in (self.W_Q, self.W_K, self.W_V))
        q_raw, k_raw = self._rotated(q), self._rotated(k)
        if self.normalises:  # a norm with gains does not commute with a rotation, and belongs before it
            q, k = self._rotated(self.norm_q(q)), self._rotated(self.norm_k(k))
        else:
            q, k = q_raw, k_raw
        if self.qk_site is not None:
            q, k = self.qk_site.act(q, k)
        out_BHTK, stats = self.kernel(q, k, v, draw)
        max_logit_BH = None if stats is None else stats.max_logit
        if self.sensing:
            self.max_logit_BH = max_logit_BH
            if self.qk_site is not None:
                self.qk_site.sense(q, k, self.scale, max_logit_BH)
        if self.tap is not None:
            self.tap.x = x_BTD.detach()
            self._record(q_raw, k_raw, q, k, v, out_BHTK, stats)
        B, _, T, _ = out_BHTK.shape
        return self.W_O(out_BHTK.transpose(1, 2).reshape(B, T, -1))

    def _split(self, x_BTD: Tensor, W: Linear) -> Tensor:
        B, T, _ = x_BTD.shape
        return W(x_BTD).view(B, T, -1, self.d_head).transpose(1, 2)

    def _rotated(self, x_BHTK: Tensor) -> Tensor:
        return rotate(x_BHTK) if self.rope else x_BHTK

    def _record(
        self, q_raw: Tensor, k_raw: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, stats: object
    ) -> None:
        tap = self.tap
        tap.q_raw, tap.k_raw, tap.q, tap.k, tap.v, tap.out = (
            t.detach() for t in (q_raw, k_raw, q, k, v, out)
        )
        tap.stats = stats
        if out.requires_grad:
            out.register_hook(lambda gradient: setattr(tap, "d_out", gradient.detach()))


def _qk_norm(kind: str, heads: int, d_head: int) -> Callable[[Tensor], Tensor] | None:
    if kind == "none":
        return None
    if kind == "unit_rms":
        return unit_rms
    return {"layernorm": HeadLayerNorm, "rms_full": FullWidthRMSNorm}[kind](heads, d_head)
