"""Our training step against a plain eager loop of the same model, and what a dormant guard adds to it.

The peer runs in a child process of its own, and so do we: our trainer advises the memory allocator for its whole
process. The children take turns. A block is one period of telemetry, so it holds one sensed step.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from qkpipe.bench.measure import Quantiles, quantiles
from qkpipe.config.models import RunConfig
from qkpipe.data.shards import open_tokens, write_tokens
from qkpipe.interventions.guard import Guard
from qkpipe.paths import ScratchPaths
from qkpipe.telemetry.writer import PartWriter
from qkpipe.train.heap import keep_freed_memory
from qkpipe.train.trainer import Trainer

VOCAB = 256
DORMANT = 1e9
"""A threshold that is never passed: the guard senses and does not act."""
GUARDS = {
    "act, every=1": Guard(threshold=DORMANT),
    "act, every=8": Guard(threshold=DORMANT, every=8),
    "log, every=1": Guard(threshold=DORMANT, mode="log"),
}


def compare(run: RunConfig, *, rounds: int, blocks: int) -> tuple[dict[str, Quantiles], dict[str, Quantiles]]:
    """Seconds a step of ``run``: ({"ours", "plain"}, {"none" and each of `GUARDS`})."""
    ours, plain = [], []
    for _ in range(rounds):
        plain += _child("qkpipe.bench.plain_loop", *_plain_arguments(run, blocks))
        ours += _child("qkpipe.bench.training", "--blocks", blocks, "--run", run.model_dump_json())["full"]
    guards: dict[str, list[float]] = _child(
        "qkpipe.bench.training", "--blocks", rounds * blocks, "--guards", "--run", run.model_dump_json()
    )
    steps = run.train.telemetry_every
    whole = {"ours": ours, "plain": plain}
    return tuple(
        {name: quantiles([s / per for s in seconds]) for name, seconds in found.items()}
        for found, per in ((whole, steps), (guards, GUARD_BLOCK))
    )


GUARD_BLOCK = 8
"""Steps of a block where guards are compared: one look of the guard with every=8."""


def _plain_arguments(run: RunConfig, blocks: int) -> list[object]:
    model = run.model
    sizes = {
        "vocab": VOCAB, "context": model.context, "width": model.d_model, "layers": model.n_layers,
        "heads": model.n_heads, "hidden": model.d_hidden, "batch": run.train.batch_size, "blocks": blocks,
        "block_steps": run.train.telemetry_every,
    }  # fmt: skip
    return [part for name, size in sizes.items() for part in (f"--{name}", size)]


def _child(module: str, *arguments: object):
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", module, *map(str, arguments)]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout)


def _trainer(run: RunConfig, guard: Guard | None, folder: Path) -> Trainer:
    """On random tokens, without validation inside a block."""
    noise = np.random.default_rng(0)
    splits = {name: noise.integers(0, VOCAB, 100_000).astype(np.uint8) for name in ("train", "validation")}
    tokens = open_tokens(write_tokens(folder / "data", splits, vocab_size=VOCAB), run.model.context)
    train = run.train.model_copy(update={"val_every": 10**9, "steps": 10**9})
    run = run.model_copy(update={"train": train, "interventions": [guard] if guard else []})
    return Trainer(run, tokens, PartWriter(ScratchPaths(folder / "scratch"), run.run_id))


def main() -> None:
    """Prints {name: seconds of each block of steps} as JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--run", type=RunConfig.model_validate_json, required=True)
    parser.add_argument("--blocks", type=int, required=True)
    parser.add_argument("--guards", action="store_true")
    a = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    with tempfile.TemporaryDirectory() as name:
        if a.guards:
            settings, steps = {"none": None, **GUARDS}, GUARD_BLOCK
        else:
            settings, steps = {"full": Guard(threshold=DORMANT)}, a.run.train.telemetry_every
        trainers = {key: _trainer(a.run, guard, Path(name)) for key, guard in settings.items()}
        if a.guards:  # telemetry in some blocks and not in others would drown the difference
            for trainer in trainers.values():
                trainer.run = trainer.run.model_copy(
                    update={"train": trainer.run.train.model_copy(update={"telemetry_every": 10**9})}
                )
        seconds: dict[str, list[float]] = {key: [] for key in trainers}
        for _ in range(a.blocks):
            for key, trainer in trainers.items():
                start = time.perf_counter()
                for _ in range(steps):
                    trainer.step()
                seconds[key].append(time.perf_counter() - start)
    print(json.dumps(seconds))


if __name__ == "__main__":
    main()
