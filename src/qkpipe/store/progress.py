"""What a study asks for, what is there, what is under way, and what the rest will cost.

Costs are counted, not measured, until runs have been timed: FLOP (:func:`training_flops`) over what a device sustains, which the
scale states (``resources.flops``) or the caller; bytes from shapes (:func:`device_bytes`, :func:`run_bytes`).
"""

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
(stated, not measured); used where the scale states none, and only until a run has been timed."""

START_S = 4.0
"""Seconds from a job's start to its first step: imports, kernels from their cache, data (scale micro, two runs at a time)."""

ROW_BYTES = 40
"""Of a telemetry row in Parquet: 38 in a micro run's files."""

_COST = "{:<16} {:<12} {:>6} {:>12} {:>12} {:>13} {:>10} {:>10}  {}"


def plan(
    study: Study, paths: StudyPaths, seeds: Iterable[int] | None = None, flops: float | None = None
) -> Iterator[str]:
    """Lines: runs by target, done and missing; then what the missing ones cost, a job each; then the size of a run.

    ``flops``: sustained FLOP/s of a device, in the place of what was stated or measured.
    """
    done = _done(study, paths)
    yield f"{'target':<12} {'role':<13} {'arms':>5} {'seeds':>6} {'runs':>6} {'done':>6} {'missing':>8}"
    for name, target in study.config.targets.items():
        runs = study.requested(name, seeds)
        there = sum(run in done for run in runs)
        counts = f"{len({r.arm for r in runs}):>5} {len({r.seed for r in runs}):>6} {len(runs):>6}"
        yield f"{name:<12} {target.role:<13} {counts} {there:>6} {len(runs) - there:>8}"
    yield ""
    yield _COST.format(
        "scale",
        "target",
        "jobs",
        "tokens left",
        "FLOP left",
        "device hours",
        "days/run",
        "GB on disk",
        "basis",
    )
    yield from _costs(study, paths, seeds, flops)
    yield ""
    yield from _sizes(study)


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


def matrix_weights(run: RunConfig) -> float:
    """N of 6ND: weights of the products a token takes part in; the head's, tied or not, and no embedding's."""
    model = run.model
    attention = model.d_model**2 * 2 * (1 + model.kv_heads / model.n_heads)
    mlp = (3 if model.mlp == "swiglu" else 2) * model.d_model * model.d_hidden
    return model.n_layers * (attention + mlp) + run.tokenizer.vocab_size * model.d_model


def flops_per_token(run: RunConfig) -> float:
    """Training FLOP a token: 6N, and of causal attention 6 n_layers context d_model (QK' and PV over half the keys on average, 2
    FLOP a multiplication, and the backward twice the forward), for every pass of a step.
    """
    model = run.model
    attention = 6 * model.n_layers * model.context * model.d_model
    passes = 1 + max((mechanism.passes for mechanism in run.mechanisms), default=0)
    return passes * (6 * matrix_weights(run) + attention)


def training_flops(run: RunConfig) -> float:
    """FLOP of a whole run, on all its ranks together."""
    return flops_per_token(run) * run.train.steps * run.tokens_per_step


def parameters(run: RunConfig) -> float:
    """Weights of the model, but for gains."""
    model = run.model
    position = model.context * model.d_model if model.position == "learned" else 0
    embedding = 0 if model.tied_head else run.tokenizer.vocab_size * model.d_model
    return matrix_weights(run) + position + embedding


def device_bytes(run: RunConfig) -> float:
    """Memory of one device, fp32: weight, gradient, two moments and the weight before the update (20 bytes a parameter, shared
    out under fsdp2), what a micro-batch's backward needs (16 numbers a token, layer and unit of width), and logits with their
    gradient.
    """
    model, parallel = run.model, run.parallel
    shares = parallel.ranks if parallel.kind == "fsdp2" else 1
    tokens = run.train.batch_size * model.context
    activations = 4 * tokens * (16 * model.n_layers * model.d_model + 2 * run.tokenizer.vocab_size)
    return 20 * parameters(run) / shares + activations


def run_bytes(run: RunConfig) -> float:
    """Telemetry of a finished run: ROW_BYTES a row of ``steps``, and at every look of ``layers``, ``heads`` and ``routes``."""
    model, looks = run.model, run.train.steps / run.train.telemetry_every
    return ROW_BYTES * (run.train.steps + looks * (model.n_layers * (1 + model.n_heads + 4) + 1))


def checkpoint_bytes(run: RunConfig) -> float:
    """The checkpoint of a run under way: weight and two moments in fp32."""
    return 12 * parameters(run)


def _costs(
    study: Study, paths: StudyPaths, seeds: Iterable[int] | None, flops: float | None
) -> Iterator[str]:
    done = _done(study, paths)
    speeds = {arm: statistics.median(values) for arm, values in _speeds(paths, done).items()}
    configs = {arm: study.resolve(arm, 0) for arm in study.runnable}
    basis = f"measured on {len(done)} runs" if speeds else "stated FLOP/s, no run timed yet"
    if flops is not None:
        speeds, basis = {}, f"{flops:.3g} FLOP/s a device"
    # Of all ranks of a run together.
    timed = [speed * flops_per_token(configs[arm]) for arm, speed in speeds.items()]
    sustained = {
        arm: statistics.median(timed) if timed else (flops or _stated(study, run)) * run.parallel.ranks
        for arm, run in configs.items()
    }
    for name in study.config.targets:
        runs = [configs[run.arm] for run in study.requested(name, seeds) if run not in done]
        seconds = [_seconds(run, speeds, sustained[run.arm]) for run in runs]
        yield _COST.format(
            study.scale,
            name,
            len(runs),
            f"{sum(run.train.steps * run.tokens_per_step for run in runs):.3g}",
            f"{sum(map(training_flops, runs)):.3g}",
            f"{sum(s * run.parallel.ranks for s, run in zip(seconds, runs, strict=True)) / 3600:.2f}",
            f"{max(seconds, default=0) / 86400:.2g}",
            f"{sum(map(run_bytes, runs)) / 1e9:.3g}",
            basis,
        )


def _sizes(study: Study) -> Iterator[str]:
    """Of the arm that needs most, by device memory."""
    runs = [study.resolve(arm, 0) for arm in study.runnable]
    largest = max(runs, key=device_bytes)
    yield (
        f"A run: {largest.parallel.ranks} device(s) of {device_bytes(largest) / 1e9:.3g} GB in use at most, "
        f"{parameters(largest) / 1e6:.4g}M parameters, a checkpoint of {checkpoint_bytes(largest) / 1e9:.3g} GB while it trains"
    )


def _stated(study: Study, run: RunConfig) -> float:
    """FLOP/s of one rank, stated by the scale or assumed."""
    threads = run.train.threads if run.train.device == "cpu" else 1
    return study.scale_config.resources.flops or ASSUMED_FLOPS[run.train.device] * threads


def _seconds(run: RunConfig, measured: dict[str, float], sustained: float) -> float:
    """Of a job: its start, and its tokens at the arm's own measured speed, else at the FLOP/s that its ranks sustain."""
    speed = measured.get(run.arm, sustained / flops_per_token(run))
    return START_S + run.train.steps * run.tokens_per_step / speed


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
