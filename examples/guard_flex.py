"""QK-Guard on FlexAttention; prints what it did as JSON.

FlexAttention has no backward on a CPU, so there only forwards run. On a GPU the guard asks FlexAttention for its own maximum.
"""

import json

import torch
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from qkpipe.guard import QKGuard

device = "cuda" if torch.cuda.is_available() else "cpu"


class Attention(nn.Module):
    def __init__(self, width=64, heads=4, context=128):
        super().__init__()
        self.qkv, self.heads = nn.Linear(width, 3 * width), heads
        self.mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, context, context, device=device)

    def forward(self, x):
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        return flex_attention(q, k, v, block_mask=self.mask).transpose(1, 2).flatten(2)


torch.manual_seed(0)
model = Attention().to(device)
guard = QKGuard(model, threshold=3.0)
x = torch.randn(2, 128, 64, device=device)
seen = []
for size in (1.0, 2.0, 4.0, 8.0):  # inputs that grow, as a runaway would make them
    if device == "cuda":
        model(size * x).square().mean().backward()
    else:
        with torch.no_grad():
            model(size * x)
    seen.append(guard.max_logit())
print(
    json.dumps({"fired": guard.fired, "step": guard.firing.step, "max_logit": seen, "layers": guard.layers})
)
