"""Over ranks: every process fires at the same step, for the largest logit of any of them."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import os, sys
import torch, torch.distributed as dist, torch.nn.functional as F
from torch import nn
from qkpipe.guard import QKGuard

rank = int(sys.argv[1])
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": sys.argv[2]}
dist.init_process_group("gloo", rank=rank, world_size=2)
torch.set_num_threads(1)

class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(8, 24, bias=False)
    def forward(self, x):
        q, k, v = (y.unflatten(-1, (2, 4)).transpose(1, 2) for y in self.qkv(x).split(8, -1))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)

torch.manual_seed(0)
model = nn.parallel.DistributedDataParallel(Attention())
guard = QKGuard(model, threshold=30.0, explicit_steps=True)
x = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(rank))
largest = []
for step in range(3):
    model.zero_grad()
    for micro in range(2):
        # At step 1 the first micro-batch of rank 1 alone is hot.
        hot = step == 1 and micro == 0 and rank == 1
        with model.no_sync() if micro == 0 else torch.enable_grad():
            model(x * (50.0 if hot else 1.0)).sum().backward()
    guard.step()
    largest.append(guard.max_logit())
    model.module.qkv.weight.grad.sum().item()
print(largest, guard.firing, guard.active, sorted(model.module.state_dict()))
dist.destroy_process_group()
"""


@pytest.mark.timeout(180)
def test_two_ranks_agree():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    root = Path(__file__).resolve().parents[2]
    environment = os.environ | {"PYTHONPATH": f"{root / 'src'}:{os.environ.get('PYTHONPATH', '')}"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(rank), port],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in range(2)
    ]
    results = [process.communicate(timeout=170) for process in ranks]
    assert all(process.returncode == 0 for process in ranks), results
    first, second = (out for out, _ in results)
    assert first == second
    assert "Firing(step=1, layer=0" in first and "True" in first and "'qk_guard'" in first
