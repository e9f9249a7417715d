"""The figures by name. A figure is a module with ``figure(paths)``, ``CAPTION``, the ``TABLES`` it reads and a ``QUERY``."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

from qkpipe.errors import BadInput
from qkpipe.paths import StudyPaths
from qkpipe.report import dissociation, guard, probe, style

FIGURES: dict[str, ModuleType] = {"dissociation": dissociation, "probe": probe, "guard": guard}


def draw(name: str, paths: StudyPaths) -> list[Path]:
    """Draw figure ``name`` to ``figures/<name>.svg`` and ``.png``; returns the files."""
    if name not in FIGURES:
        raise BadInput(f"figure: unknown name {name!r}; allowed: {', '.join(FIGURES)}")
    style.apply()
    return style.save(FIGURES[name].figure(paths), [paths.figure(name, suffix) for suffix in ("svg", "png")])
