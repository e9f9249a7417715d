"""A run small enough to train in a test: width 16, two layers, two heads, random tokens written as real shards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from qkpipe.config.models import RunConfig
from qkpipe.data.shards import Tokens, open_tokens, write_tokens
from qkpipe.hooks import Hook
from qkpipe.paths import StudyPaths
from qkpipe.telemetry.writer import PartWriter
from qkpipe.train.trainer import Trainer

FAULTY = {"kind": "streaming", "tile": 4, "precision": {"uniform": 2, "io": 7}}
STREAM = {"kind": "streaming", "tile": 4}


def tiny_run(arm: str = "tiny", seed: int = 0, **changes: Any) -> RunConfig:
    """A resolved run; ``changes`` merge into model, attention, optimizer and train, and set the rest."""
    settings: dict[str, Any] = {
        "model": {"d_model": 16, "n_layers": 2, "n_heads": 2, "context": 16},
        "attention": {"kind": "sdpa"},
        "optimizer": {"lr": 1e-2, "warmup": 2},
        "train": {"steps": 6, "batch_size": 2, "telemetry_every": 2, "val_every": 3, "val_batches": 2},
    }
    for key, value in changes.items():
        settings[key] = {**settings[key], **value} if key in settings else value
    return RunConfig(
        scale="tiny",
        arm=arm,
        seed=seed,
        corpus_name="noise",
        corpus={"package": "none", "version": "0", "sha256": "0" * 64},
        tokenizer_name="bytes",
        tokenizer={"kind": "bytes"},
        **settings,
    )


def write_noise(folder: Path, train: int = 3000, validation: int = 300) -> Path:
    """Tokens drawn from a quarter of the byte values, so that there is something to learn."""
    generator = np.random.default_rng(0)
    draw = {"train": train, "validation": validation}
    splits = {name: generator.integers(0, 64, size).astype(np.uint8) for name, size in draw.items()}
    return write_tokens(folder, splits, vocab_size=256)


def tiny_study(root: Path) -> StudyPaths:
    """Paths of a study with its data in place."""
    paths = StudyPaths("tiny", root)
    write_noise(paths.data("noise", "bytes"))
    return paths


def tiny_tokens(folder: Path, context: int = 16) -> Tokens:
    return open_tokens(write_noise(folder / "data"), context)


class Rows(PartWriter):
    """A writer that keeps its rows in memory, by table."""

    def __init__(self) -> None:
        from collections import defaultdict

        self.tables: dict[str, list[dict[str, Any]]] = defaultdict(list)

    def add(self, table: str, **columns: Any) -> None:
        self.tables[table].append(columns)


def tiny_trainer(tmp_path: Path, **changes: Any) -> Trainer:
    """A trainer whose rows are in ``trainer.writer.tables``."""
    torch.set_num_threads(1)
    run = tiny_run(**changes)
    return Trainer(run, tiny_tokens(tmp_path, run.model.context), Rows())


def equal_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal in every bit, NaN and the sign of zero included."""
    a, b = a.detach().contiguous(), b.detach().contiguous()
    return a.shape == b.shape and torch.equal(a.view(torch.int32), b.view(torch.int32))


def step_gradients(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Take a step; the gradients by parameter name, after faults and splice and before the clip."""
    found = {}

    class Capture(Hook):
        def splice(self, step: int) -> None:
            found.update({name: p.grad.clone() for name, p in trainer.model.named_parameters()})

    trainer.hooks.append(Capture())
    trainer.step()
    trainer.hooks.pop()
    return found


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
