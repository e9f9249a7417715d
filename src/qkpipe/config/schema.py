"""JSON schemas of the study's YAML files, generated from the models, for editors to complete and check by."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from qkpipe.config.models import (
    ArmConfig,
    AttentionConfig,
    Fault,
    Intervention,
    ModelConfig,
    Name,
    OptimizerConfig,
    Probe,
    StudyConfig,
    TrainConfig,
)

SCHEMAS = Path("workflow/schemas")


class _ArmSchema(ArmConfig):
    """An arm with its overrides spelt out; every field of a section has a default, so any part is valid."""

    model: ModelConfig = ModelConfig()
    attention: AttentionConfig = AttentionConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    train: TrainConfig = TrainConfig()
    faults: list[Fault] | None = None
    interventions: list[Intervention] | None = None
    probe: Probe | None = None


def schemas() -> dict[str, dict[str, Any]]:
    """JSON schema by file stem: ``study`` and ``arms``."""
    arms = TypeAdapter(dict[Name, _ArmSchema]).json_schema()
    return {"study": StudyConfig.model_json_schema(), "arms": arms | {"title": "Arms of a study"}}


def write_schemas(folder: Path = SCHEMAS) -> list[Path]:
    """Write ``<stem>.schema.json`` for each; returns the files."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for stem, schema in schemas().items():
        path = folder / f"{stem}.schema.json"
        path.write_text(render(schema), encoding="utf-8")
        written.append(path)
    return written


def render(schema: dict[str, Any]) -> str:
    return json.dumps(schema, indent=2, sort_keys=True) + "\n"
