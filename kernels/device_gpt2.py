"""A plain GPT-2 for the device check: bfloat16 products, an attention that can be swapped, made-up data.

No data set is at hand on an offline node: tokens follow a noisy affine recurrence, and every other token repeats
what stood `COPY` places before, so that there is something for the MLPs and something for attention to learn.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

COPY = 24
CHUNK = 32  # steps whose batches are made at once
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Size:
    layers: int = 12
    width: int = 768
    heads: int = 12
    context: int = 1024
    vocabulary: int = 50304
    batch: int = 8


SMALL = Size()
TINY = Size(layers=1, width=32, heads=2, context=32, vocabulary=128, batch=1)


class Block(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.norm_1, self.norm_2 = (nn.LayerNorm(size.width, bias=False) for _ in range(2))
        self.W_QKV = nn.Linear(size.width, 3 * size.width, bias=False)
        self.W_O = nn.Linear(size.width, size.width, bias=False)
        self.W_up = nn.Linear(size.width, 4 * size.width, bias=False)
        self.W_down = nn.Linear(4 * size.width, size.width, bias=False)

    def forward(self, x_BTD: Tensor, attend: Attend) -> Tensor:
        B, T, D = x_BTD.shape
        qkv = self.W_QKV(self.norm_1(x_BTD)).view(B, T, 3, self.heads, D // self.heads)
        q, k, v = (qkv[:, :, i].transpose(1, 2) for i in range(3))
        x_BTD = x_BTD + self.W_O(attend(q, k, v).transpose(1, 2).reshape(B, T, D))
        return x_BTD + self.W_down(F.gelu(self.W_up(self.norm_2(x_BTD))))


class GPT2(nn.Module):
    """Tokens (B, T + 1) to the mean next-token cross entropy, nat."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embed = nn.Embedding(size.vocabulary, size.width)
        self.position = nn.Embedding(size.context, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width, bias=False)
        for name, p in self.named_parameters():
            if p.dim() == 2:
                residual = name.endswith(("W_O.weight", "W_down.weight"))
                nn.init.normal_(p, std=0.02 / (2 * size.layers) ** 0.5 if residual else 0.02)

    def forward(self, tokens: Tensor, attend: Attend) -> Tensor:
        x = self.embed(tokens[:, :-1]) + self.position.weight[: tokens.shape[1] - 1]
        for block in self.blocks:
            x = block(x, attend)
        logits = F.linear(self.norm(x), self.embed.weight)
        return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


def batch_of(size: Size, step: int, device: torch.device) -> Tensor:
    """(batch, context + 1) tokens, a function of the step."""
    return _batches(size, step // CHUNK, device)[step % CHUNK]


@lru_cache(maxsize=2)
def _batches(size: Size, chunk: int, device: torch.device) -> Tensor:
    """(CHUNK, batch, context + 1) tokens: made together, since each has to be made token by token."""
    generator = torch.Generator().manual_seed(chunk)
    B, T = CHUNK * size.batch, size.context + 1
    symbols = min(4096, size.vocabulary)
    noise = torch.randint(0, 4, (T, B), generator=generator)
    tokens = torch.empty(T, B, dtype=torch.int64)
    tokens[0] = torch.randint(0, symbols, (B,), generator=generator)
    for t in range(1, T):
        if t % 2 and t >= COPY:
            tokens[t] = tokens[t - COPY]
        else:
            tokens[t] = (5 * tokens[t - 1] + 7 + noise[t]) % symbols
    return tokens.T.reshape(CHUNK, size.batch, T).to(device)


class Trainer:
    """AdamW (0.9, 0.95), no weight decay, clip 1.0, linear warmup, then constant."""

    def __init__(self, size: Size, device: torch.device, lr: float, warmup: int) -> None:
        torch.manual_seed(0)
        self.size, self.device, self.lr, self.warmup = size, device, lr, warmup
        self.model = GPT2(size).to(device)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0
        )
        self.step = 0

    def train(self, attend: Attend) -> Tensor:
        """One step; the loss, on the device."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr * min(1.0, (self.step + 1) / self.warmup)
        with torch.autocast(self.device.type, dtype=torch.bfloat16):
            loss = self.model(batch_of(self.size, self.step, self.device), attend)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.step += 1
        return loss.detach()

    @torch.no_grad()
    def sigma_q(self) -> float:
        """Largest singular value of W_Q over the layers, from below, by power iteration (an SVD takes longer than a step)."""
        W = torch.stack([block.W_QKV.weight[: self.size.width] for block in self.model.blocks])
        v = torch.ones(*W.shape[:-1], 1, device=W.device)
        for _ in range(64):
            v = F.normalize(W.mT @ (W @ v), dim=1)
        return (W @ v).norm(dim=1).max().item()
