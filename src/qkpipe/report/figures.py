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
    portability,
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
ASKED: dict[str, ModuleType] = {"portability": portability}
"""Figures of tables that are there when they were asked for; no study target draws them."""


def draw(name: str, paths: StudyPaths) -> list[Path]:
    """Draw figure ``name`` to ``figures/<name>.svg`` and ``.png``; returns the files."""
    known = FIGURES | ASKED
    if name not in known:
        raise BadInput(f"figure: unknown name {name!r}; allowed: {', '.join(known)}")
    style.apply()
    return style.save(known[name].figure(paths), [paths.figure(name, suffix) for suffix in ("svg", "png")])
