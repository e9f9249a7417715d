"""The study as resolved: what every arm of a scale really is, for readers of the results."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from qkpipe.config.load import Study


def effective_config(study: Study) -> dict[str, Any]:
    """Roles, targets, every runnable arm as resolved, with its config hash (seeds are no part of it), and the cells that are
    named and not run.
    """
    arms = {}
    for name in study.runnable:
        run = study.resolve(name, seed=0)
        words = {"description": run.description, "group": run.group, "twin": run.twin, **run.labels()}
        arms[name] = words | {"config_hash": run.config_hash, "config": run.identity()}
    study_wide = study.config.model_dump(mode="json", include={"roles", "targets"})
    return {
        "scale": study.scale,
        **study_wide,
        "arms": arms,
        "not_applicable": study.not_applicable,
    }


def render(study: Study) -> str:
    return json.dumps(effective_config(study), indent=1, sort_keys=True) + "\n"


def digest(study: Study) -> str:
    """Changes with anything in :func:`effective_config`."""
    return hashlib.sha256(render(study).encode()).hexdigest()


def write_effective_config(study: Study, path: Path) -> None:
    """Write it as JSON, by way of a temporary file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(render(study), encoding="utf-8")
    temporary.replace(path)
