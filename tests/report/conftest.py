import shutil

import pytest

from qkpipe.analysis import (
    capping,
    contest,
    contrasts,
    dissociation,
    entropy,
    entry,
    generality,
    guard,
    isolation,
    law,
    loci,
    probe,
    residual,
    sensitivity,
    signals,
    survival,
    sweep,
)
from qkpipe.paths import StudyPaths
from qkpipe.report import figures
from store.synthetic import synthetic

__all__ = ["synthetic"]

ANALYSES = (
    *(contrasts, dissociation, probe, guard, signals, residual, isolation, generality, entry, loci, sweep),
    *(capping, entropy, law, contest, survival, sensitivity),
)


@pytest.fixture(scope="session")
def drawn(synthetic):
    """(paths, study) with every analysis made and every figure drawn."""
    paths, study = synthetic
    for analysis in ANALYSES:
        analysis.build(paths, study)
    for name in figures.FIGURES:
        figures.draw(name, paths)
    return paths, study


@pytest.fixture
def copied(drawn, tmp_path):
    """A copy of the drawn study, free to be changed."""
    paths, study = drawn
    shutil.copytree(paths.results, tmp_path / "results" / paths.scale)
    return StudyPaths(paths.scale, tmp_path), study
