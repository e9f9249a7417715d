"""Optimizer and learning-rate schedule."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.optim import Optimizer

from qkpipe.config.models import OptimizerConfig


def make_optimizer(model: nn.Module, config: OptimizerConfig) -> Optimizer:
    """AdamW or SGD with momentum, fused. Weight decay applies to every matrix and no gain, as in nanoGPT."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    gains = [p for p in model.parameters() if p.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": gains, "weight_decay": 0.0},
    ]
    if config.name == "adamw":
        betas = (config.beta1, config.beta2)
        return torch.optim.AdamW(groups, lr=config.lr, betas=betas, eps=config.eps, fused=True)
    return torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum, fused=True)


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
