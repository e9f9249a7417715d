"""What a study asks for, what is there, what is under way, and what the rest will cost."""

from __future__ import annotations

import fcntl
import statistics
from collections.abc import Iterable, Iterator
from pathlib import Path

import pyarrow.parquet as pq

from qkpipe.config import RunConfig, RunKey, Study
from qkpipe.paths import StudyPaths
from qkpipe.store.scan import scan, unfinished

ASSUMED_FLOPS = {"cpu": 1.8e10, "cuda": 2.0e14}
"""Sustained FLOP/s of one CPU thread (12,500 tokens a second at scale micro, two runs at a time) and of one data-centre GPU
(stated, not measured); used only until a run has been timed."""

START_S = 4.0
"""Seconds from a job's start to its first step: imports, kernels from their cache, data (scale micro, two runs at a time)."""

CLEAN_PASSES = ("splice", "fault_only")
"""Kinds of intervention that make every step a second forward and backward."""

_COST = "{:<14} {:<12} {:>6} {:>8} {:>12} {:>13}  {}"


def plan(study: Study, paths: StudyPaths, seeds: Iterable[int] | None = None) -> Iterator[str]:
    """Lines: runs by target, done and missing; then, by scale, what the largest target still costs."""
    done = _done(study, paths)
    yield f"{'target':<12} {'role':<13} {'arms':>5} {'seeds':>6} {'runs':>6} {'done':>6} {'missing':>8}"
    for name, target in study.config.targets.items():
        runs = study.requested(name, seeds)
        there = sum(run in done for run in runs)
        counts = f"{len({r.arm for r in runs}):>5} {len({r.seed for r in runs}):>6} {len(runs):>6}"
        yield f"{name:<12} {target.role:<13} {counts} {there:>6} {len(runs) - there:>8}"
    yield ""
    yield _COST.format("scale", "target", "runs", "missing", "tokens left", "device hours", "basis")
    for scale in study.config.scales:
        yield from _costs(Study(study.folder, scale), StudyPaths(scale, paths.root), seeds)


def status(study: Study, paths: StudyPaths, seeds: Iterable[int] | None = None) -> Iterator[str]:
    """Lines: one a run that is under way, requested or not, with its state, and the counts.

    ``running``: a live process holds its lock; ``unfinished``: it was killed or failed, and goes on from its
    checkpoint; ``missing``: not begun.
    """
    found = scan(paths, study)
    done = {run.key for run in found.completed}
    begun = {
        key: "running" if _held(scratch.lock) else "unfinished" for key, scratch in unfinished(paths, study)
    }
    asked = (run for name in study.config.targets for run in study.requested(name, seeds))
    states = {run: "done" if run in done else begun.get(run, "missing") for run in [*asked, *begun]}
    for run, state in states.items():
        if state in ("running", "unfinished"):
            yield f"{state:<11} {run.arm}/seed={run.seed}"
    counts = [f"{list(states.values()).count(s)} {s}" for s in ("done", "running", "unfinished", "missing")]
    yield f"{study.scale}: {', '.join(counts)}"
    for excluded in found.excluded:
        yield f"excluded    {excluded.path}: {excluded.reason}"


def flops_per_token(run: RunConfig) -> float:
    """Training FLOP a token, forward and backward: 6 a weight of a matrix product, and causal attention; twice that where a
    clean pass goes beside the faulty one.
    """
    model = run.model
    attention = model.d_model**2 * 2 * (1 + model.kv_heads / model.n_heads)
    mlp = (3 if model.mlp == "swiglu" else 2) * model.d_model * model.d_hidden
    weights = model.n_layers * (attention + mlp) + run.tokenizer.vocab_size * model.d_model
    passes = 1 + any(action.kind in CLEAN_PASSES for action in run.interventions)
    return passes * (6 * weights + 6 * model.n_layers * model.context * model.d_model)


def _costs(study: Study, paths: StudyPaths, seeds: Iterable[int] | None) -> Iterator[str]:
    done = _done(study, paths)
    speeds = {arm: statistics.median(values) for arm, values in _speeds(paths, done).items()}
    flops = [speed * flops_per_token(study.resolve(arm, 0)) for arm, speed in speeds.items()]
    sustained = statistics.median(flops) if flops else None
    for name in study.config.targets:
        runs = study.requested(name, seeds)
        configs = [study.resolve(run.arm, run.seed) for run in runs if run not in done]
        tokens = sum(run.train.steps * run.tokens_per_step for run in configs)
        seconds = (
            START_S + run.train.steps * run.tokens_per_step / _speed(run, speeds, sustained)
            for run in configs
        )
        hours = sum(seconds) / 3600
        basis = f"measured on {len(done)} runs" if speeds else "assumed, no run timed yet"
        yield _COST.format(study.scale, name, len(runs), len(configs), f"{tokens:.3g}", f"{hours:.2f}", basis)


def _speed(run: RunConfig, measured: dict[str, float], sustained: float | None) -> float:
    """Tokens a second: of the arm, else at the median arm's FLOP/s, else at the assumed ones."""
    if run.arm in measured:
        return measured[run.arm]
    parallel = run.train.threads if run.train.device == "cpu" else 1
    return (sustained or ASSUMED_FLOPS[run.train.device] * parallel) / flops_per_token(run)


def _speeds(paths: StudyPaths, done: Iterable[RunKey]) -> dict[str, list[float]]:
    speeds: dict[str, list[float]] = {}
    for run in done:
        table = pq.read_table(paths.run(run.arm, run.seed).table("timing"), columns=["tokens_per_s"])
        speeds.setdefault(run.arm, []).extend(v for v in table["tokens_per_s"].to_pylist() if v)
    return {arm: values for arm, values in speeds.items() if values}


def _done(study: Study, paths: StudyPaths) -> dict[RunKey, None]:
    return dict.fromkeys(run.key for run in scan(paths, study).completed)


def _held(lock: Path) -> bool:
    """Whether a live process holds the lock; the kernel lets go of a killed one's."""
    try:
        with lock.open() as handle:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False
