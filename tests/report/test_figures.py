import shutil

import pytest

from qkpipe.analysis import guard, runs
from qkpipe.errors import BadInput
from qkpipe.paths import StudyPaths
from qkpipe.report import figures
from qkpipe.store import database
from report.conftest import ANALYSES

EMPTY = {"entry", "contest", "repairs", "horizon"}
"""Their tables are empty for the synthetic study: no fault outside attention, no second set of healthy runs, no repair, no
long run.
"""


def test_every_figure_is_svg_and_png_without_dates(drawn):
    paths, _ = drawn
    for name in figures.FIGURES:
        svg = paths.figure(name).read_text()
        assert "<path" in svg and "dc:date" not in svg
        assert paths.figure(name, "png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", ["probe", "guard", "isolation", "entropy", "residual"])
def test_figures_read_only_their_tables_and_are_equal_for_equal_tables(copied, name):
    paths, _ = copied
    shutil.rmtree(paths.runs)
    for table in set(paths.analysis("x").parent.iterdir()) - set(
        map(paths.analysis, figures.FIGURES[name].TABLES)
    ):
        table.unlink()
    before = [paths.figure(name, suffix).read_bytes() for suffix in ("svg", "png")]
    assert [path.read_bytes() for path in figures.draw(name, paths)] == before


def test_a_figure_follows_its_table(copied):
    paths, study = copied
    before = paths.figure("guard").read_bytes()
    shutil.rmtree(paths.run("faulty", 1).folder)
    runs.aggregate(paths, study, [])
    guard.build(paths, study)
    figures.draw("guard", paths)
    assert paths.figure("guard").read_bytes() != before


def test_every_query_answers_from_the_database(copied):
    paths, _ = copied
    path = database.build(paths)
    for name, module in figures.FIGURES.items():
        assert database.query(path, module.QUERY).num_rows >= (name not in EMPTY)
        names = {row["name"] for row in database.query(path, "SHOW TABLES").to_pylist()}
        assert set(module.TABLES) <= names


def test_a_study_without_runs_still_draws(synthetic, tmp_path):
    _, study = synthetic
    paths = StudyPaths("tiny", tmp_path)
    runs.aggregate(paths, study, [])
    for analysis in ANALYSES:
        analysis.build(paths, study)
    for name in figures.FIGURES:
        assert all(path.exists() for path in figures.draw(name, paths))


def test_unknown_figure(tmp_path):
    with pytest.raises(BadInput, match="unknown name 'gard'; allowed: dissociation, probe, guard, isolation"):
        figures.draw("gard", StudyPaths("tiny", tmp_path))
