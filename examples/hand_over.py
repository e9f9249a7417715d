"""The jump of the loss when normalisation takes over a model that was trained without it; prints one line a hand-over as JSON.

A small nanoGPT-style model learns to repeat what it saw eight tokens ago, which it can only do by attention. Then the guard is
switched on by hand, at once or over some steps, and training goes on.
"""

import copy
import json
import runpy
from pathlib import Path

import torch

from qkpipe.guard import QKGuard


def batch():
    period = torch.randint(64, (16, 8))
    return period.repeat(1, 3)[:, :17]


def train(model, optimizer, steps):
    losses = []
    for _ in range(steps):
        tokens = batch()
        loss = model(tokens[:, :-1], tokens[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


GPT = runpy.run_path(str(Path(__file__).with_name("guard_nanogpt.py")))["GPT"]
torch.manual_seed(0)
model = GPT(n_embd=64)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
train(model, optimizer, 400)
weights, moments = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())

for steps in (None, 1, 10, 50):
    torch.manual_seed(1)
    model.load_state_dict(weights)
    optimizer.load_state_dict(copy.deepcopy(moments))
    guard = QKGuard(model, threshold=1e9, hand_over=steps or 1)
    before = sum(train(model, optimizer, 10)) / 10
    if steps is not None:
        guard.activate()
    after = train(model, optimizer, 100)
    print(json.dumps({
        "hand_over": steps, "before": before, "first": after[0], "worst": max(after), "last_10": sum(after[-10:]) / 10,
        "max_logit": guard.max_logit(),
    }))  # fmt: skip
    guard.detach()
