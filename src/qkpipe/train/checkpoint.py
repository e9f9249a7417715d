"""Checkpoints of a run: written atomically, refused when they belong to another config or other data."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path
from typing import Any

import torch

from qkpipe.errors import BadInput


def save(path: Path, state: dict[str, Any]) -> None:
    """Write ``state`` so that a kill at any moment leaves the old checkpoint or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.new")
    with temporary.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def load(path: Path, *, config_hash: str, data_hash: str, device: str = "cpu") -> dict[str, Any] | None:
    """The checkpoint at ``path``, its tensors on ``device``, or None where there is none.

    Raises:
        BadInput: it is of another config or other data, or cannot be read.
    """
    if not path.exists():
        return None
    try:
        # torch's reader does not look at the checksums.
        with zipfile.ZipFile(path) as archive:
            if damaged := archive.testzip():
                raise zipfile.BadZipFile(damaged)
        state = dict(torch.load(path, map_location=device, weights_only=True))
    except Exception as error:
        raise BadInput(
            f"{path}: not a readable checkpoint ({type(error).__name__}); delete it to start afresh"
        ) from error
    for key, wanted in (("config_hash", config_hash), ("data_hash", data_hash)):
        if state.get(key) != wanted:
            raise BadInput(
                f"{path}: {key}={str(state.get(key))[:12]} is not this run's {wanted[:12]}; delete it to start afresh"
            )
    return state
