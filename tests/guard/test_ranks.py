"""Over ranks: every process fires at the same step, for the largest logit of any of them."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

DDP = """
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


FSDP = """
import os, sys
import torch, torch.distributed as dist, torch.distributed.checkpoint as dcp, torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint
from qkpipe.guard import QKGuard

rank, folder = int(sys.argv[1]), sys.argv[3]
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": sys.argv[2]}
dist.init_process_group("gloo", rank=rank, world_size=2)
torch.set_num_threads(1)
mesh = init_device_mesh("cpu", (2,))

class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(8, 24, bias=False)
    def forward(self, x):
        q, k, v = (y.unflatten(-1, (2, 4)).transpose(1, 2) for y in self.qkv(x).split(8, -1))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Attention() for _ in range(2))
    def forward(self, x):
        for layer in self.layers:
            x = x + checkpoint(layer, x, use_reentrant=False)
        return x

def build(guard_first):
    model = Model()
    guard = QKGuard(model, threshold=30.0) if guard_first else None
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, guard or QKGuard(model, threshold=30.0)

def step(model, size=1.0):
    model.zero_grad()
    out = model(x * size)
    out.square().sum().backward()
    return out.detach()

x = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(rank))
logits = []
model, guard = build(guard_first=True)
for size in (1.0, 50.0 if rank == 1 else 1.0, 1.0):
    step(model, size)
    logits.append(guard.max_logit())
after = step(model)
dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=folder)
whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))

sharded, second = build(guard_first=False)
state = {"model": get_model_state_dict(sharded)}
dcp.load(state, checkpoint_id=folder)
set_model_state_dict(sharded, state["model"])
same = [bool(torch.equal(step(sharded), after))]

broadcast, third = build(guard_first=True)
set_model_state_dict(
    broadcast, whole if rank == 0 else {},
    options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True),
)
same.append(bool(torch.equal(step(broadcast), after)))
assert all(same), same
assert len(guard.layers) == len(second.layers) == 2
print(logits, guard.firing, guard.active, second.active, second.firing, third.active, third.firing)
dist.destroy_process_group()
"""


def run(program, *arguments):
    """What each of two ranks prints."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    root = Path(__file__).resolve().parents[2]
    environment = os.environ | {"PYTHONPATH": f"{root / 'src'}:{os.environ.get('PYTHONPATH', '')}"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(rank), port, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in range(2)
    ]
    results = [process.communicate(timeout=170) for process in ranks]
    assert all(process.returncode == 0 for process in ranks), results
    return [out for out, _ in results]


@pytest.mark.timeout(180)
def test_two_ranks_agree():
    first, second = run(DDP)
    assert first == second
    assert "Firing(step=1, layer=0" in first and "True" in first and "'qk_guard'" in first


@pytest.mark.timeout(180)
def test_sharded_with_recomputation_saved_and_loaded(tmp_path):
    """FSDP2: one latch for all ranks, the same output from a sharded checkpoint and from a whole one."""
    first, second = run(FSDP, str(tmp_path))
    assert first == second
    assert first.count("Firing(step=1, layer=0") == 3 and first.count("True") == 3
