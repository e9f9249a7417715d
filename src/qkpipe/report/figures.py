"""The figures by name. A figure is a module: ``figure(paths)``, ``LABEL``, ``CAPTION``, the ``TABLES`` it reads and a
``QUERY``.
"""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

from qkpipe.errors import BadInput
from qkpipe.paths import StudyPaths
from qkpipe.report import (
    capping,
    contest,
    dissociation,
    entropy,
    entry,
    generality,
    guard,
    horizon,
    isolation,
    loci,
    probe,
    probe_controls,
    remedies,
    repairs,
    residual,
    sensitivity,
    style,
    survival,
    sweep,
)

_MODULES = (
    dissociation, probe, guard, isolation, generality, entry, probe_controls, loci, sweep, capping, entropy, residual,
    contest, survival, sensitivity, repairs, horizon,
    remedies,
)  # fmt: skip
FIGURES: dict[str, ModuleType] = {module.__name__.rpartition(".")[2]: module for module in _MODULES}


def draw(name: str, paths: StudyPaths) -> list[Path]:
    """Draw figure ``name`` to ``figures/<name>.svg`` and ``.png``; returns the files."""
    if name not in FIGURES:
        raise BadInput(f"figure: unknown name {name!r}; allowed: {', '.join(FIGURES)}")
    style.apply()
    return style.save(FIGURES[name].figure(paths), [paths.figure(name, suffix) for suffix in ("svg", "png")])
