"""What the guard adds to a training step of a model that knows nothing of it: ``python -m qkpipe.bench.guard``.

One model in one process, GPT-2 small by default. The settings take turns, a block of steps each; the guard is attached before a
block and detached after it, outside the clock, as is its first step, in which it looks once for attention that it cannot see.
Times are of the thread's own CPU, so other work on the machine disturbs them little. Quantiles are over blocks, for each step's
place in its block, then averaged; ratios are of 20% quantiles. Prints one line of JSON a setting.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from itertools import pairwise
from typing import Any

import numpy as np
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
    "log, every=8": {"threshold": DORMANT, "mode": "log", "every": 8},
    "active": {"threshold": DORMANT},
}


def compare(
    model: GPT, vocab: int, batch: int, context: int, *, settings: list[str], blocks: int, steps: int
) -> dict[str, Quantiles]:
    """CPU seconds a step under each of :data:`SETTINGS` named; ``active``: normalising, and sensing every step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    seconds: dict[str, list[list[float]]] = {name: [] for name in settings}

    def step() -> None:
        tokens = torch.randint(vocab, (batch, context + 1))
        loss = model(tokens[:, :-1], tokens[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    for _ in range(blocks):
        for name in settings:
            options = SETTINGS[name]
            guard = None if options is None else QKGuard(model, **options)
            if name == "active":
                guard.activate()
            step()
            gc.collect()  # of what attaching left behind
            times = [time.thread_time()]
            for _ in range(steps):
                step()
                times.append(time.thread_time())
            seconds[name].append([end - start for start, end in pairwise(times)])
            if guard is not None:
                guard.detach()
    # Place by place: where every eighth step is sensed, a quantile over all steps would be one of the others.
    return {
        name: tuple(np.mean([quantiles(place) for place in zip(*found, strict=True)], axis=0).tolist())
        for name, found in seconds.items()
    }


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
    parser.add_argument(
        "--settings",
        nargs="+",
        choices=SETTINGS,
        default=list(SETTINGS),
        metavar="NAME",
        help="'none' is always measured",
    )
    a = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = GPT(a.vocab, a.context, a.width, a.layers, a.heads, 4 * a.width)
    took = compare(
        model,
        a.vocab,
        a.batch,
        a.context,
        settings=list(dict.fromkeys(["none", *a.settings])),
        blocks=a.blocks,
        steps=a.steps,
    )
    parameters = sum(p.numel() for p in model.parameters())
    for name, (p20, p50, p80) in took.items():
        print(json.dumps({
            "guard": name, "parameters": parameters, "p20_ms": 1e3 * p20, "p50_ms": 1e3 * p50, "p80_ms": 1e3 * p80,
            "ratio": p20 / took["none"][0],
        }))  # fmt: skip


if __name__ == "__main__":
    main()
