"""Optimizer and learning-rate schedule."""

from __future__ import annotations

import inspect
import math
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from qkpipe.config.models import OptimizerConfig


def make_optimizer(model: nn.Module, config: OptimizerConfig) -> Optimizer:
    """AdamW or SGD with momentum, fused. Weight decay applies to every matrix and no gain, as in nanoGPT."""
    return optimizer_over(list(model.parameters()), config)


def optimizer_over(parameters: list[nn.Parameter], config: OptimizerConfig) -> Optimizer:
    """The same over any parameters."""
    matrices = [p for p in parameters if p.dim() >= 2]
    gains = [p for p in parameters if p.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": gains, "weight_decay": 0.0},
    ]
    if config.name == "adamw":
        betas = (config.beta1, config.beta2)
        return AdamW(groups, lr=config.lr, betas=betas, eps=config.eps, fused=True)
    return SGD(groups, lr=config.lr, momentum=config.momentum, fused=True)


class _Eager(Optimizer):
    """A torch optimizer without its ties to torch's compiler.

    They serve graphs alone, and the first use of any imports the compiler: two seconds, a third of the start of a small run.
    """

    @torch.no_grad()
    def step(self) -> None:
        inspect.unwrap(super().step.__func__)(self)

    def add_param_group(self, group: dict[str, Any]) -> None:
        inspect.unwrap(super().add_param_group.__func__)(self, group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        inspect.unwrap(super().zero_grad.__func__)(self, set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return inspect.unwrap(super().state_dict.__func__)(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        inspect.unwrap(super().load_state_dict.__func__)(self, state)


class AdamW(_Eager, torch.optim.AdamW):
    """torch's AdamW."""


class SGD(_Eager, torch.optim.SGD):
    """torch's SGD."""


def learning_rate(step: int, steps: int, config: OptimizerConfig) -> float:
    """Learning rate of ``step`` (from 0): linear warm-up over ``warmup`` steps, then constant, or cosine to
    ``final_lr_fraction`` of the peak at the last step.
    """
    if step < config.warmup:
        return config.lr * (step + 1) / config.warmup
    if config.schedule == "constant":
        return config.lr
    progress = (step - config.warmup) / max(1, steps - 1 - config.warmup)
    floor = config.final_lr_fraction
    return config.lr * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress))))
