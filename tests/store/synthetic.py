"""Synthetic runs on disk, in the format that training writes: hand-made curves for tests, no model anywhere.

``SHAPES`` gives every arm one of a few stories (healthy, collapsing, diverging, guarded, ...), a seed shifts
it in time.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from qkpipe.analysis import runs
from qkpipe.config import RunKey, Study, load_study
from qkpipe.paths import StudyPaths
from qkpipe.telemetry.schema import SCHEMA_VERSION
from qkpipe.telemetry.writer import PartWriter

STUDY = """
scale: tiny
corpora: { words: { package: words, version: "1", sha256: "%s" } }
scales:
  tiny:
    corpus: words
    model: { d_model: 16, n_layers: 2, n_heads: 2, context: 16 }
    train: { steps: 400, telemetry_every: 10, val_every: 100 }
roles:
  tuning: { seeds: [0, 1] }
  confirmatory: { seeds: [10, 11], arms: [fp32, faulty] }
targets:
  core: { arms: ["*"], role: tuning }
""" % ("0" * 64)

ARMS = """
fp32: { description: torch's own attention, group: healthy }
fp32_stream:
  description: the recurrence in fp32
  group: healthy
  twin: fp32
  attention: { kind: streaming }
base: { abstract: true, attention: { kind: streaming, precision: { uniform: 2, io: 7 } } }
faulty: { extends: base, description: two mantissa bits, group: fault, twin: fp32_stream }
splice_mlp:
  extends: faulty
  description: clean gradients for the MLP
  group: splice
  twin: fp32_stream
  interventions: [{ kind: splice, routes: [mlp] }]
guard:
  extends: faulty
  description: QK-Guard
  group: guard
  twin: fp32_stream
  interventions: [{ kind: guard, threshold: 30, mode: act }]
qk_norm:
  extends: faulty
  description: always on
  group: guard
  twin: fp32_stream
  model: { qk_norm: unit_rms }
probe_on:
  extends: faulty
  description: leading directions removed
  group: probe
  twin: fp32_stream
  probe: { kind: causal, action: on_target, k: 3, side: two_sided }
probe_off:
  extends: faulty
  description: the same energy removed elsewhere
  group: probe
  twin: fp32_stream
  probe: { kind: causal, action: off_target, k: 3, side: two_sided }
"""


@dataclass(frozen=True)
class Shape:
    """Story of an arm: where its loss turns up, where it becomes NaN, where the guard fires; None = never."""

    onset: int | None = None
    nan_from: int | None = None
    fire: int | None = None
    bounded: bool = False


SHAPES = {
    "fp32": Shape(),
    "fp32_stream": Shape(),
    "faulty": Shape(onset=150),
    "splice_mlp": Shape(onset=200, nan_from=300),
    "guard": Shape(fire=120),
    "qk_norm": Shape(bounded=True),
    "probe_on": Shape(),
    "probe_off": Shape(onset=130),
}


def write_study(folder: Path) -> Study:
    """A tiny study's YAML in ``folder``, loaded."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "study.yaml").write_text(STUDY)
    (folder / "arms.yaml").write_text(ARMS)
    return load_study(folder)


def losses(shape: Shape, seed: int, steps: int) -> np.ndarray:
    t = np.arange(steps)
    draws = np.random.default_rng(seed)
    curve = 2.3 + 3.2 * np.exp(-t / 60) + 0.02 * draws.standard_normal(steps)
    if shape.onset is not None:
        curve += np.clip((t - shape.onset - 20 * seed) / 60, 0, 2.0)
    if shape.nan_from is not None:
        curve[shape.nan_from :] = np.nan
    return curve


def write_run(paths: StudyPaths, study: Study, key: RunKey, shape: Shape) -> None:
    """One finished run; ends at its first NaN as training does."""
    config = study.resolve(key.arm, key.seed)
    train, layers, heads = config.train, config.model.n_layers, config.model.n_heads
    curve = losses(shape, key.seed, train.steps)
    done = train.steps if shape.nan_from is None else shape.nan_from + 1
    fire = None if shape.fire is None else shape.fire + 5 * key.seed
    scratch = paths.scratch(config.run_id)
    writer = PartWriter(scratch, config.run_id)
    writer.truncate(0)
    for step in range(done):
        bounded = shape.bounded or (fire is not None and step > fire)
        val = 2.4 if step % train.val_every == 0 else None
        norms = {"lr": 1e-3, "grad_norm": 1.0, "clipped_norm": 1.0, "update_norm": 0.1}
        writer.add("steps", step=step, loss=curve[step], guard_active=bounded, val_loss=val, **norms)
        if step % train.telemetry_every:
            continue
        runaway = 0.0 if shape.onset is None else max(0.0, (step - shape.onset + 60 - 20 * key.seed) / 60)
        if fire is not None:
            runaway = step / (2.5 * fire)
        for layer in range(layers):
            sigma = 1.0 + step / 300 + 0.1 * layer + 2.0 * runaway
            writer.add("layers", step=step, layer=layer, sigma_q_1=sigma, sigma_k_1=sigma, residual_r=0.01)
            writer.add("routes", step=step, layer=layer, route="qk", grad_norm=1.0, error_norm=0.1)
            if config.probe is not None:
                removed = 0.2 if "on" in key.arm else 0.19
                for matrix in ("q", "k"):
                    energies = {"energy_total": 1.0, "energy_on": 0.2, "energy_removed": removed}
                    writer.add("probe", step=step, layer=layer, matrix=matrix, **energies)
            for head in range(heads):
                raw = 4.0 * sigma * np.exp(1.2 * min(runaway, 4.0))
                logit = min(raw, 2.8) if bounded else raw
                writer.add("heads", step=step, layer=layer, head=head, max_logit=logit, max_logit_raw=raw)
    if fire is not None:
        detail = {"threshold": 30.0, "mode": "act", "layer": 1, "head": 0, "logit": 31.5}
        writer.add("events", step=fire, kind="guard_fired", detail=json.dumps(detail))
    if shape.nan_from is not None:
        writer.add("events", step=shape.nan_from, kind="diverged", detail=json.dumps({"loss": "nan"}))
    for step in (done // 2, done - 1):
        writer.add("timing", step=step, tokens_per_s=3.0e4, wall_s=6.25, resumes=0)
    run = paths.run(key.arm, key.seed)
    writer.finish(run)
    record = {
        "schema_version": SCHEMA_VERSION,
        "run_id": config.run_id,
        "scale": config.scale,
        "arm": key.arm,
        "seed": key.seed,
        "config": config.model_dump(mode="json"),
        "config_hash": config.config_hash,
        "data_hash": "d" * 64,
        "code_version": "0123abc",
        "environment": {
            "python": "3.11",
            "torch": "2.13",
            "numpy": "2.4",
            "platform": "synthetic",
            "cpu": "none",
        },
        "device": "cpu",
        "steps_planned": train.steps,
        "steps_done": done,
        "diverged": shape.nan_from is not None,
        "stop_reason": "completed" if shape.nan_from is None else "nonfinite_loss",
        "tokens": done * config.tokens_per_step,
        "epochs": 0.1,
        "fire_step": fire,
    }
    run.record.write_text(json.dumps(record))


def write_runs(paths: StudyPaths, study: Study, keys: Iterable[RunKey]) -> None:
    for key in keys:
        write_run(paths, study, key, SHAPES[key.arm])


@pytest.fixture(scope="session")
def synthetic(tmp_path_factory: pytest.TempPathFactory) -> tuple[StudyPaths, Study]:
    """(paths, study) with two tuning seeds of every arm run and aggregated; a test that changes files
    restores them.
    """
    root = tmp_path_factory.mktemp("study")
    study = write_study(root / "config")
    paths = StudyPaths("tiny", root)
    write_runs(paths, study, study.requested("core"))
    runs.aggregate(paths, study, study.requested("core"))
    return paths, study
