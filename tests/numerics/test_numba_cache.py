"""Compiled code is never older than its sources."""

import shutil
from pathlib import Path

import pytest

from qkpipe.numerics import _numba

SOURCES = Path(_numba.__file__).parent


def test_an_edit_of_any_module_names_another_cache(tmp_path):
    copy = tmp_path / "numerics"
    shutil.copytree(SOURCES, copy, ignore=shutil.ignore_patterns("__pycache__"))
    seen = {_numba.cache_folder(copy).name}
    for module in sorted(copy.glob("*.py")):
        module.write_text(module.read_text() + "\n# edited\n")
        seen.add(_numba.cache_folder(copy).name)
    assert len(seen) == 1 + len(list(copy.glob("*.py")))


def test_equal_sources_share_a_cache(tmp_path):
    copy = tmp_path / "numerics"
    shutil.copytree(SOURCES, copy, ignore=shutil.ignore_patterns("__pycache__"))
    assert _numba.cache_folder(copy).name == _numba.cache_folder(SOURCES).name


@pytest.mark.skipif(not _numba.HAVE_NUMBA, reason="numba is not installed")
def test_numba_uses_it():
    import os

    import numba

    if "NUMBA_CACHE_DIR" not in os.environ:
        assert str(_numba.cache_folder(SOURCES)) == numba.config.CACHE_DIR
