"""Finds what a study already has on disk, and keeps runs of another config out of its tables."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from qkpipe.config import RunConfig, RunKey, Study
from qkpipe.errors import BadInput
from qkpipe.paths import RunPaths, ScratchPaths, StudyPaths
from qkpipe.telemetry.schema import SCHEMA_VERSION


@dataclass(frozen=True)
class CompletedRun:
    """A finished run whose config hash is the study's current one; ``record`` is its ``run.json``."""

    key: RunKey
    paths: RunPaths
    study: Study
    record: dict[str, Any]

    @property
    def run_id(self) -> str:
        return self.study.run_id(self.key)

    @cached_property
    def config(self) -> RunConfig:
        return self.study.resolve(self.key.arm, self.key.seed)


@dataclass(frozen=True)
class Exclusion:
    """A run on disk that is in no table, and why."""

    arm: str
    seed: int | None
    path: str
    reason: str


@dataclass(frozen=True)
class Scan:
    """Runs of one scale on disk, in the order of the arms in the config, then by seed."""

    completed: tuple[CompletedRun, ...]
    excluded: tuple[Exclusion, ...]


def scan(paths: StudyPaths, study: Study) -> Scan:
    """Every finished run of the scale: those of the current config hash, and the others with the reason."""
    completed: list[CompletedRun] = []
    excluded: list[Exclusion] = []
    for record_path in sorted(paths.runs.glob("*/seed=*/run.json")):
        arm, seed = record_path.parent.parent.name, _seed(record_path.parent)
        try:
            completed.append(_completed(paths, study, arm, seed, record_path))
        except BadInput as reason:
            path = record_path.parent.relative_to(paths.results).as_posix()
            excluded.append(Exclusion(arm, seed, path, str(reason)))
    for record_path in sorted(paths.aside.glob("*/seed=*/run.json")):
        folder = record_path.parent
        path = folder.relative_to(paths.results).as_posix()
        excluded.append(Exclusion(folder.parent.name, _seed(folder), path, "superseded by a changed config"))
    order = {arm: position for position, arm in enumerate(study.runnable)}
    completed.sort(key=lambda run: (order[run.key.arm], run.key.seed))
    return Scan(tuple(completed), tuple(excluded))


def unfinished(paths: StudyPaths, study: Study) -> Iterator[tuple[RunKey, ScratchPaths]]:
    """Runs of the current config that have been begun and are not done, whether or not a target asks for them."""
    for identity in sorted((paths.root / "scratch").glob("*/identity.json")):
        try:
            begun = json.loads(identity.read_text(encoding="utf-8"))
        except FileNotFoundError:  # it ended meanwhile
            continue
        if begun["scale"] != study.scale or begun["arm"] not in study.runnable:
            continue
        key = RunKey(begun["arm"], begun["seed"])
        if identity.parent.name == study.run_id(key):
            yield key, ScratchPaths(identity.parent)


def union(paths: StudyPaths, study: Study, requested: Iterable[RunKey]) -> Scan:
    """:func:`scan`, after making sure that every requested run is there; :class:`BadInput` names those that are not."""
    found = scan(paths, study)
    missing = [key for key in requested if key not in {run.key for run in found.completed}]
    if missing:
        reasons = {(run.arm, run.seed): run.reason for run in found.excluded}
        named = [
            f"{key.arm}/seed={key.seed}"
            + (f" ({reason})" if (reason := reasons.get((key.arm, key.seed))) else "")
            for key in missing
        ]
        raise BadInput(f"{paths.runs}: requested runs are missing: {', '.join(named)}; run them first")
    return found


def _completed(
    paths: StudyPaths, study: Study, arm: str, seed: int | None, record_path: Path
) -> CompletedRun:
    """The run at ``record_path``, or :class:`BadInput` saying why it does not belong in the tables."""
    if seed is None:
        raise BadInput("the folder's seed is not a number")
    if arm not in study.runnable:
        raise BadInput("its arm is not in arms.yaml any more")
    try:
        record = json.loads(record_path.read_text(encoding="utf-8"))
        version, found_hash = record["schema_version"], record["config_hash"]
    except (ValueError, KeyError, TypeError) as error:
        raise BadInput(f"run.json is not readable ({type(error).__name__})") from None
    if version != SCHEMA_VERSION:
        raise BadInput(f"schema version {version}, now {SCHEMA_VERSION}")
    if found_hash != (now := study.config_hash(arm)):
        raise BadInput(f"config hash {found_hash[:12]}, now {now[:12]}")
    run = paths.run(arm, seed)
    there = os.listdir(run.folder)
    if absent := [path.name for path in run.outputs if path.name not in there]:
        raise BadInput(f"{', '.join(absent)} missing")
    return CompletedRun(RunKey(arm, seed), run, study, record)


def _seed(folder: Path) -> int | None:
    text = folder.name.removeprefix("seed=").partition("-")[0]
    return int(text) if text.isdecimal() else None
