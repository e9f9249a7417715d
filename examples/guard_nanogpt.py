"""QK-Guard on a nanoGPT-style model with gradient accumulation, and a resume; prints what it did as JSON."""

import io
import json

import torch
import torch.nn as nn
from torch.nn import functional as F

from qkpipe.guard import QKGuard


class CausalSelfAttention(nn.Module):
    def __init__(self, n_embd, n_head):
        super().__init__()
        self.c_attn = nn.Linear(n_embd, 3 * n_embd)
        self.c_proj = nn.Linear(n_embd, n_embd)
        self.n_head, self.n_embd = n_head, n_embd

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))


class Block(nn.Module):
    def __init__(self, n_embd, n_head):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(n_embd), nn.LayerNorm(n_embd)
        self.attn = CausalSelfAttention(n_embd, n_head)
        self.mlp = nn.Sequential(nn.Linear(n_embd, 4 * n_embd), nn.GELU(), nn.Linear(4 * n_embd, n_embd))

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, vocab_size=64, block_size=16, n_layer=2, n_head=4, n_embd=32):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab_size, n_embd), nn.Embedding(block_size, n_embd)
        self.h = nn.ModuleList(Block(n_embd, n_head) for _ in range(n_layer))
        self.lm_head = nn.Linear(n_embd, vocab_size, bias=False)

    def forward(self, idx, targets):
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1)))
        for block in self.h:
            x = block(x)
        return F.cross_entropy(self.lm_head(x).flatten(0, 1), targets.flatten())


def train(model, guard, optimizer, steps, micro_steps=2):
    for _ in range(steps):
        for _ in range(micro_steps):
            tokens = torch.randint(64, (4, 17))
            loss = model(tokens[:, :-1], tokens[:, :-1]) / micro_steps
            loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        guard.step()  # these micro-batches were one step
    return loss.item() * micro_steps


if __name__ == "__main__":
    torch.manual_seed(0)
    model = GPT()
    guard = QKGuard(model, threshold=4.0, explicit_steps=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-2)
    train(model, guard, optimizer, 30)

    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)

    resumed = GPT()
    guard_resumed = QKGuard(resumed, threshold=4.0, explicit_steps=True)  # before loading
    resumed.load_state_dict(torch.load(file))
    loss = train(resumed, guard_resumed, torch.optim.AdamW(resumed.parameters(), lr=3e-2), 2)
    print(json.dumps({
        "fired": guard.fired, "resumed": guard_resumed.active, "max_logit": guard_resumed.max_logit(),
        "layers": guard.layers, "loss": loss,
    }))  # fmt: skip
