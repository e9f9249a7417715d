"""Trains one run from its resolved config to its files: lock, resume, loop, tables, and ``run.json`` last."""

from __future__ import annotations

import json
import logging
import os
import platform
import shutil
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock, Timeout
from tqdm import tqdm

import qkpipe
from qkpipe.config.models import RunConfig
from qkpipe.data.shards import Tokens, open_tokens
from qkpipe.errors import BadInput
from qkpipe.paths import RunPaths, StudyPaths
from qkpipe.telemetry.schema import SCHEMA_VERSION
from qkpipe.telemetry.writer import PartWriter, Silent
from qkpipe.train import checkpoint
from qkpipe.train.distributed import Ranks, join
from qkpipe.train.heap import keep_freed_memory
from qkpipe.train.supersede import is_finished, supersede
from qkpipe.train.trainer import Trainer

log = logging.getLogger(__name__)

CLOCK_EVERY = 100
"""Steps between rows of ``timing``."""

LOCK_WAIT_S = 0.5
"""`qkpipe status` looks at a lock by holding it for a moment; a live run holds it for longer."""


def train_run(run: RunConfig, paths: StudyPaths, *, progress: bool | None = None) -> Path:
    """Train ``run`` and write its files under ``results/<scale>/runs/<arm>/seed=<n>/``; returns the path of ``run.json``.

    A collapse is a result: a diverged run is recorded and this returns normally. A run already recorded with the same config
    hash is left alone; one of another hash is moved aside. Killed at any moment and called again, it goes on from the last
    checkpoint, and every file but ``timing`` equals the unbroken run's bit for bit.

    A run of several ranks is trained by as many processes that call this, which torchrun starts; the first one writes.

    Args:
        progress: show a progress bar; by default only on a terminal, and sparse log lines elsewhere.

    Raises:
        BadInput: missing or altered data, a foreign checkpoint, a device that is not there, or a live run holding the lock.
    """
    if run.train.device == "cuda" and not torch.cuda.is_available():
        raise BadInput(f"{run.arm}: train.device: 'cuda' is not available here; allowed: cpu")
    target, scratch = paths.run(run.arm, run.seed), paths.scratch(run.run_id)
    with join(run) as ranks, ExitStack() as held:
        if ranks.ask_leader(lambda: _claim(run, paths, held)):
            tokens = open_tokens(paths.data(run.corpus_name, run.tokenizer_name), run.model.context)
            _check_vocabulary(run, tokens)
            shown = sys.stderr.isatty() if progress is None else progress
            _train(run, tokens, paths, ranks, progress=shown and ranks.leads)
        held.close()
        if ranks.leads:
            shutil.rmtree(scratch.folder, ignore_errors=True)
    return target.record


def _claim(run: RunConfig, paths: StudyPaths, held: ExitStack) -> bool:
    """Take the run's lock for as long as ``held`` lives; whether the run is still to be trained."""
    scratch = paths.scratch(run.run_id)
    scratch.folder.mkdir(parents=True, exist_ok=True)
    try:
        held.enter_context(FileLock(scratch.lock).acquire(timeout=LOCK_WAIT_S))
    except Timeout:
        raise BadInput(
            f"{scratch.lock}: held by a live process training {run.arm}/seed={run.seed}; wait for it, or stop it"
        ) from None
    if is_finished(paths, run):
        record = paths.run(run.arm, run.seed).record
        log.info("%s: already there with this config hash, nothing to do", record)
        return False
    return True


def _move_aside(paths: StudyPaths, run: RunConfig) -> None:
    if aside := supersede(paths, run):
        log.warning("a run of another config was here: moved to %s", aside)


def _train(run: RunConfig, tokens: Tokens, paths: StudyPaths, ranks: Ranks, *, progress: bool) -> None:
    scratch = paths.scratch(run.run_id)
    if ranks.leads:
        _move_aside(paths, run)
        _write_json(scratch.identity, {"scale": run.scale, "arm": run.arm, "seed": run.seed})
    torch.set_num_threads(run.train.threads)
    keep_freed_memory()
    writer = PartWriter(scratch, run.run_id) if ranks.leads else Silent()
    trainer = Trainer(run, tokens, writer, ranks)
    state = checkpoint.load(
        scratch.checkpoint,
        config_hash=run.config_hash,
        data_hash=tokens.data_hash,
        device=run.train.device,
    )
    resumes, stopped = 0, False
    if state is not None:
        trainer.load_state_dict(state["trainer"])
        resumes, stopped = state["resumes"] + 1, state["stopped"]
        log.info("%s/seed=%d: resuming at step %d", run.arm, run.seed, trainer.step_index)
    writer.truncate(state["parts"] if state else 0)
    clock = _Clock(run, writer, resumes, trainer.step_index)
    bar = tqdm(
        total=run.train.steps,
        initial=trainer.step_index,
        desc=f"{run.arm}/seed={run.seed}",
        disable=not progress,
        dynamic_ncols=True,
    )
    while trainer.step_index < run.train.steps and not stopped:
        result = trainer.step()
        bar.update()
        stopped = not result.finite
        last = stopped or trainer.step_index == run.train.steps
        if trainer.step_index % CLOCK_EVERY == 0 or last:
            clock.tick(trainer.step_index)
            if not progress:
                log.info(
                    "%s/seed=%d: step %d of %d, loss %.3f",
                    run.arm, run.seed, trainer.step_index, run.train.steps, result.loss,
                )  # fmt: skip
            bar.set_postfix(loss=f"{result.loss:.3f}")
        if trainer.step_index % run.train.checkpoint_every == 0 or last:
            state = {
                "config_hash": run.config_hash,
                "data_hash": tokens.data_hash,
                "trainer": ranks.whole_state(trainer.state_dict()),
                "parts": writer.flush(),
                "resumes": resumes,
                "stopped": stopped,
            }
            if ranks.leads:
                checkpoint.save(scratch.checkpoint, state)
    bar.close()
    if ranks.leads:
        _finish(run, tokens, paths, trainer, stopped)


def _finish(run: RunConfig, tokens: Tokens, paths: StudyPaths, trainer: Trainer, stopped: bool) -> None:
    """Write the run's files from the parts, ``run.json`` last."""
    target = paths.run(run.arm, run.seed)
    _move_aside(paths, run)  # a job of an older config may have ended here meanwhile: it holds another lock
    trainer.writer.finish(target)
    _write_record(target, _record(run, tokens, trainer, stopped))


class _Clock:
    """Writes ``timing``: the one table a clock decides."""

    def __init__(self, run: RunConfig, writer: PartWriter, resumes: int, step: int) -> None:
        self._run, self._writer, self._resumes = run, writer, resumes
        self._step, self._start = step, time.perf_counter()

    def tick(self, step: int) -> None:
        now = time.perf_counter()
        wall = now - self._start
        speed = (step - self._step) * self._run.tokens_per_step / wall
        self._writer.add("timing", step=step, tokens_per_s=speed, wall_s=wall, resumes=self._resumes)
        self._step, self._start = step, now


def _check_vocabulary(run: RunConfig, tokens: Tokens) -> None:
    if tokens.vocab_size != run.tokenizer.vocab_size:
        raise BadInput(
            f"{run.arm}: tokenizer {run.tokenizer_name} has {run.tokenizer.vocab_size} tokens, "
            f"the shards have {tokens.vocab_size}; run `qkpipe data` again"
        )


def _record(run: RunConfig, tokens: Tokens, trainer: Trainer, stopped: bool) -> dict[str, Any]:
    seen = trainer.step_index * run.tokens_per_step
    return {
        "schema_version": SCHEMA_VERSION,
        "run_id": run.run_id,
        "scale": run.scale,
        "arm": run.arm,
        "seed": run.seed,
        "config": run.model_dump(mode="json"),
        "config_hash": run.config_hash,
        "data_hash": tokens.data_hash,
        "code_version": qkpipe.__version__,
        "environment": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "numpy": np.__version__,
            "platform": platform.platform(),
            "cpu": _processor(),
            "cpu_capability": torch.backends.cpu.get_cpu_capability(),
            "threads": run.train.threads,
        },
        "device": torch.cuda.get_device_name() if run.train.device == "cuda" else "cpu",
        "steps_planned": run.train.steps,
        "steps_done": trainer.step_index,
        "diverged": stopped,
        "stop_reason": "nonfinite_loss" if stopped else "completed",
        "tokens": seen,
        "epochs": seen / len(tokens.train),
        "fire_step": next((h.fire_step for h in trainer.hooks if h.fire_step is not None), None),
    }


def _processor() -> str:
    """The processor's name; `platform` knows the architecture alone on most Linux systems."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())


def _write_record(target: RunPaths, record: dict[str, Any]) -> None:
    _write_json(target.record, record)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(value, indent=1, sort_keys=True) + "\n")
    os.replace(temporary, path)
