import re
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import pandas as pd
import pytest

from qkpipe.analysis.claims import CLAIMS
from qkpipe.errors import BadInput
from qkpipe.report import html
from qkpipe.report.figures import FIGURES
from qkpipe.store import database
from qkpipe.store.parquet import read_table, write_table

TEMPLATE = Path(__file__).parents[2] / "workflow" / "report" / "report.html.j2"


class Page(HTMLParser):
    """Links, sources, ids, queries and visible text of a page; checks that tags are closed in order."""

    VOID = ("meta", "img", "br", "path", "line", "link")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links, self.sources, self.ids, self.open = [], [], [], []
        self.text = ""
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        self.links += [found["href"]] if "href" in found else []
        self.sources += [found["src"]] if "src" in found else []
        self.ids += [found["id"]] if "id" in found else []
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_data(self, data):
        if not {"script", "style"} & set(self.open):
            self.text += data


def _build(paths, study) -> Page:
    return Page(html.build(paths, study, TEMPLATE).read_text())


@pytest.fixture(scope="module")
def page(drawn):
    return _build(*drawn)


def test_the_page_needs_nothing_else(drawn, page):
    text = drawn[0].report.read_text()
    assert all(source.startswith("data:image/svg+xml;base64,") for source in page.sources)
    assert len(page.sources) == len(FIGURES)
    assert all(link.startswith("#") for link in page.links)
    assert not re.search(r"@import|url\(|<link|<script src", text)


def test_links_lead_somewhere_and_ids_are_unique(page):
    assert {link[1:] for link in page.links} <= set(page.ids)
    assert len(page.ids) == len(set(page.ids))


def test_every_run_and_arm_is_there(drawn, page):
    paths, study = drawn
    for row in read_table(paths.analysis("runs")).to_pylist():
        assert row["run_id"] in page.text
        if row["collapsed"]:
            assert f"collapsed at {row['collapse_step']}" in page.text
    assert "fired at 125" in page.text and "guard fired" in page.text and "nonfinite loss" in page.text
    assert all(study.arms[arm].description in page.text for arm in study.runnable)


def test_without_claims_the_page_says_that_nothing_is_a_test(page):
    assert "Nothing here is a test." in page.text and "exploratory" in page.text
    assert "claims" not in page.ids and "p, adjusted" not in page.text


def test_claims_become_the_scoreboard(copied):
    paths, study = copied
    claim = {
        "claim_id": "collapse",
        "rank": 1,
        "statement": "The <fault> collapses",
        "outcome": "collapse",
        "n_pairs": 5,
        "k_treated": 5,
        "n_treated": 5,
        "k_control": 0,
        "n_control": 5,
        "effect": 1.0,
        "ci_low": 0.5,
        "ci_high": float("inf"),
        "p_adjusted": 0.03125,
        "verdict": "supported",
        "query": "SELECT count(*) FROM runs WHERE arm < 'z'",
    }
    untested = claim | {
        "claim_id": "later",
        "rank": None,
        "verdict": "inconclusive",
        "n_pairs": 0,
        "p_adjusted": None,
    }
    write_table(paths.analysis("claims"), [claim, untested], CLAIMS)
    page = _build(paths, study)
    assert "The <fault> collapses" in page.text  # escaped in the file, or the parser would see a tag
    assert "0.0312" in page.text and "∞" in page.text and claim["query"] in page.text
    assert "Nothing here is a test." not in page.text
    write_table(paths.analysis("claims"), [untested], CLAIMS)
    assert "Nothing here is a test." in _build(paths, study).text


def test_exclusions_are_listed(copied):
    from qkpipe.analysis.runs import EXCLUSIONS

    paths, study = copied
    assert "None: every run on disk is in the tables" in _build(paths, study).text
    row = {"arm": "fp32", "seed": 7, "path": "runs/fp32/seed=7", "reason": "config hash abc, now def"}
    write_table(paths.analysis("exclusions"), [row], EXCLUSIONS)
    page = _build(paths, study)
    assert row["path"] in page.text and row["reason"] in page.text


def test_queries_shown_answer_from_the_database(copied):
    paths, study = copied
    text = html.build(paths, study, TEMPLATE).read_text()
    path = database.build(paths)
    queries = re.findall(r"<pre>(SELECT .*?)</pre>", text) + re.findall(
        r"(?:duckdb|qkpipe query).*&#34;|\"(SELECT .*)\"", text
    )
    shown = [unescape(query) for query in queries if query]
    assert len(shown) >= 7
    for query in shown:
        assert database.query(path, query).num_columns > 0


def test_missing_figure_is_named_and_the_old_page_stays(copied):
    paths, study = copied
    before = html.build(paths, study, TEMPLATE).read_bytes()
    paths.figure("probe").unlink()
    with pytest.raises(BadInput, match=r"probe\.svg: no such file"):
        html.build(paths, study, TEMPLATE)
    assert paths.report.read_bytes() == before


def test_equal_inputs_give_an_equal_page(copied):
    paths, study = copied
    before = html.build(paths, study, TEMPLATE).read_bytes()
    assert html.build(paths, study, TEMPLATE).read_bytes() == before


def test_events_are_grouped_by_kind():
    events = pd.DataFrame(
        {"step": [30, 10, 20], "kind": ["nan", "nan", "fired"], "detail": ["late", "early", "x"]}
    )
    assert html.group_events(events) == [
        {"kind": "nan", "n": 2, "first": 10, "last": 30, "detail": "early"},
        {"kind": "fired", "n": 1, "first": 20, "last": 20, "detail": "x"},
    ]
    assert html.group_events(events[:0]) == []


def test_every_section_shows_its_tables_or_says_what_is_missing(drawn, page):
    from qkpipe.report.sections import SECTIONS, shown

    for section in SECTIONS:
        assert section.id in page.ids and section.title in page.text
        for entry in shown(section, drawn[0])["tables"]:
            table = entry["table"]
            if entry["rows"]:
                assert all(column.head in page.text for column in table.columns)
                assert all(len(cells) == len(table.columns) for cells in entry["rows"])
            else:
                assert table.empty in page.text


def test_sections_queries_answer_and_their_figures_exist(copied):
    from qkpipe.report.sections import SECTIONS

    path = database.build(copied[0])
    for section in SECTIONS:
        assert set(section.figures) <= set(FIGURES)
        for table in section.tables:
            assert database.query(path, table.query).num_columns > 0
    assert {name for section in SECTIONS for name in section.figures} | {
        "dissociation",
        "probe",
        "guard",
    } == set(FIGURES)
