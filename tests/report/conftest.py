import shutil
from importlib import import_module

import pytest

from qkpipe import cli
from qkpipe.paths import StudyPaths
from qkpipe.report import figures
from store.synthetic import synthetic

__all__ = ["synthetic"]

DECLARED = {"claims", "threshold", "regime", "portability"}
"""These read declarations of a real study, which the synthetic one does not make."""
ANALYSES = [import_module(f"qkpipe.analysis.{name}") for name in cli.ANALYSES if name not in DECLARED]


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
