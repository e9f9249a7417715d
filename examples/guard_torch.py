"""QK-Guard on a plain PyTorch model, here torch's own layers; prints what it did as JSON.

Learning rate and threshold are chosen so that the guard fires within the first steps, not so that the model learns well.
"""

import json

import torch
from torch import nn

from qkpipe.guard import QKGuard

torch.manual_seed(0)
layer = nn.TransformerEncoderLayer(32, nhead=4, dim_feedforward=64, dropout=0.0, batch_first=True)
model = nn.Sequential(nn.Embedding(64, 32), layer, nn.Linear(32, 64))
optimizer = torch.optim.Adam(model.parameters(), lr=3e-2)

guard = QKGuard(model, threshold=4.0, on_fire=lambda firing: print("fired:", firing))

for _ in range(40):
    tokens = torch.randint(64, (8, 16))
    loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

checkpoint = model.state_dict()  # holds the guard's state: a model without a guard refuses it
print(
    json.dumps(
        {"fired": guard.fired, "max_logit": guard.max_logit(), "layers": guard.layers, "loss": loss.item()}
    )
)
