"""A pre-norm decoder-only transformer, GPT-2 or LLaMA style, readable in one sitting."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qkpipe.config.models import AttentionConfig, ModelConfig
from qkpipe.model.attention import Attention, make_kernel
from qkpipe.model.linear import Linear
from qkpipe.model.sigma_reparam import SigmaReparam
from qkpipe.numerics.counter_rng import fold_in


class MLP(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.W_up = Linear(config.d_model, config.d_hidden)
        self.W_gate = Linear(config.d_model, config.d_hidden) if config.mlp == "swiglu" else None
        self.W_down = Linear(config.d_hidden, config.d_model)

    def forward(self, x_BTD: Tensor) -> Tensor:
        if self.W_gate is None:
            return self.W_down(F.gelu(self.W_up(x_BTD)))
        return self.W_down(F.silu(self.W_gate(x_BTD)) * self.W_up(x_BTD))


class Norm(nn.Module):
    """LayerNorm or RMSNorm with a gain and no bias."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(config.d_model))
        self.kind = config.norm

    def forward(self, x_BTD: Tensor) -> Tensor:
        shape = self.weight.shape
        if self.kind == "layernorm":
            return F.layer_norm(x_BTD, shape, self.weight)
        return F.rms_norm(x_BTD, shape, self.weight, eps=1e-5)


class Block(nn.Module):
    def __init__(self, config: ModelConfig, attention: AttentionConfig) -> None:
        super().__init__()
        self.norm_attention = Norm(config)
        self.attention = Attention(config, make_kernel(attention))
        self.norm_mlp = Norm(config)
        self.mlp = MLP(config)

    def forward(self, x_BTD: Tensor, draw: int) -> Tensor:
        x_BTD = x_BTD + self.attention(self.norm_attention(x_BTD), draw)
        return x_BTD + self.mlp(self.norm_mlp(x_BTD))


class Transformer(nn.Module):
    """Tokens (B, T) to the mean next-token cross entropy in nat, or to logits (B, T, V) without targets."""

    def __init__(self, config: ModelConfig, attention: AttentionConfig, vocab_size: int) -> None:
        super().__init__()
        self.config = config
        self.clean_attention = attention.clean()
        self.embed = nn.Embedding(vocab_size, config.d_model)
        self.position = nn.Embedding(config.context, config.d_model) if config.position == "learned" else None
        self.blocks = nn.ModuleList(Block(config, attention) for _ in range(config.n_layers))
        self.norm_final = Norm(config)
        self.head = None if config.tied_head else Linear(config.d_model, vocab_size)
        if config.weight_norm == "sigma_reparam":
            for linear in (module for module in self.blocks.modules() if isinstance(module, Linear)):
                linear.reparam = SigmaReparam(linear.weight)

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor | None = None, draw: int = 0) -> Tensor:
        """``draw`` seeds every stochastic rounding of this forward and its backward."""
        x_BTD = self.embed(tokens_BT)
        if self.position is not None:
            x_BTD = x_BTD + self.position.weight[: tokens_BT.shape[1]]
        for layer, block in enumerate(self.blocks):
            x_BTD = block(x_BTD, fold_in(draw, layer))
        head = self.embed.weight if self.head is None else self.head.weight
        logits_BTV = F.linear(self.norm_final(x_BTD), head)
        if targets_BT is None:
            return logits_BTV
        return F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten())

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """GPT-2's initialisation, from a generator of its own so that twins of equal shapes start from equal bits."""
        generator = torch.Generator().manual_seed(seed)
        residual_std = self.config.init_std / math.sqrt(2 * self.config.n_layers)
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:
                parameter.fill_(1.0)
            else:
                std = residual_std if name.endswith(("W_O.weight", "W_down.weight")) else self.config.init_std
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)
        for linear in self.modules():
            if isinstance(linear, Linear) and linear.reparam is not None:
                linear.reparam.start(linear.weight)

    @property
    def attentions(self) -> list[Attention]:
        return [block.attention for block in self.blocks]

    @contextmanager
    def clean_pass(self) -> Iterator[None]:
        """No fault in attention or in a weight gradient, unseen by guard and telemetry: a clean splice's second pass."""
        kernel = make_kernel(self.clean_attention)
        linears = [
            (module, module.weight_gradient) for module in self.modules() if isinstance(module, Linear)
        ]
        reparams = [module for module in self.modules() if isinstance(module, SigmaReparam)]
        for linear, _ in linears:
            linear.weight_gradient = None
        for reparam in reparams:
            reparam.advancing = False
        saved = [(attention.kernel, attention.tap, attention.sensing) for attention in self.attentions]
        for attention in self.attentions:
            attention.kernel, attention.tap, attention.sensing = kernel, None, False
        try:
            yield
        finally:
            for attention, own in zip(self.attentions, saved, strict=True):
                attention.kernel, attention.tap, attention.sensing = own
            for linear, weight_gradient in linears:
                linear.weight_gradient = weight_gradient
            for reparam in reparams:
                reparam.advancing = True
