"""What the guard adds to a training step of a model that knows nothing of it: ``python -m qkpipe.bench.guard``.

One model in one process, GPT-2 small by default. The settings take turns, a block of steps each; the guard is attached before a
block and detached after it, outside the clock. Times are of the process's own CPU, one thread, so other work on the machine
disturbs them little; ratios are of 20% quantiles. Prints one line of JSON a setting.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import torch

from qkpipe.bench.measure import Quantiles, quantiles
from qkpipe.bench.plain_loop import GPT
from qkpipe.guard import QKGuard

DORMANT = 1e9
"""A threshold that is never passed."""
SETTINGS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "act, every=1": {"threshold": DORMANT},
    "act, every=8": {"threshold": DORMANT, "every": 8},
    "log, every=1": {"threshold": DORMANT, "mode": "log"},
    "active": {"threshold": DORMANT},
}


def compare(
    model: GPT, vocab: int, batch: int, context: int, *, blocks: int, steps: int
) -> dict[str, Quantiles]:
    """CPU seconds a step under each of :data:`SETTINGS`; ``active``: normalising, and sensing every step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    seconds: dict[str, list[float]] = {name: [] for name in SETTINGS}

    def step() -> None:
        tokens = torch.randint(vocab, (batch, context + 1))
        loss = model(tokens[:, :-1], tokens[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    step()
    for _ in range(blocks):
        for name, options in SETTINGS.items():
            guard = None if options is None else QKGuard(model, **options)
            if name == "active":
                guard.activate()
            start = time.process_time()
            for _ in range(steps):
                step()
            seconds[name].append((time.process_time() - start) / steps)
            if guard is not None:
                guard.detach()
    return {name: quantiles(found) for name, found in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m qkpipe.bench.guard", description=__doc__.split("\n")[0])
    sizes = {
        "layers": 12,
        "width": 768,
        "heads": 12,
        "vocab": 50257,
        "context": 128,
        "batch": 1,
        "blocks": 5,
        "steps": 8,
    }
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default: {default}")
    a = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = GPT(a.vocab, a.context, a.width, a.layers, a.heads, 4 * a.width)
    took = compare(model, a.vocab, a.batch, a.context, blocks=a.blocks, steps=a.steps)
    parameters = sum(p.numel() for p in model.parameters())
    for name, (p20, p50, p80) in took.items():
        print(json.dumps({
            "guard": name, "parameters": parameters, "p20_ms": 1e3 * p20, "p50_ms": 1e3 * p50, "p80_ms": 1e3 * p80,
            "ratio": p20 / took["none"][0],
        }))  # fmt: skip


if __name__ == "__main__":
    main()
