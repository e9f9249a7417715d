"""Shards: what is written is read back, and anything missing, truncated or altered is refused by name."""

import json

import numpy as np
import pytest

from qkpipe.data import shards
from qkpipe.data.shards import open_tokens, write_tokens
from qkpipe.errors import BadInput

TRAIN = np.random.default_rng(0).integers(0, 256, 1000).astype(np.uint8)
VALIDATION = np.random.default_rng(1).integers(0, 256, 100).astype(np.uint8)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "SHARD_TOKENS", 300)
    return write_tokens(
        tmp_path / "data", {"train": TRAIN, "validation": VALIDATION}, 256, {"corpus": "noise"}
    )


def refused(folder, context=16):
    """The one line of the refusal."""
    with pytest.raises(BadInput) as caught:
        open_tokens(folder, context)
    message = str(caught.value)
    assert "\n" not in message
    return message


def edit(folder, change):
    path = folder / "meta.json"
    meta = json.loads(path.read_text())
    change(meta)
    path.write_text(json.dumps(meta))


def test_round_trip(folder):
    tokens = open_tokens(folder, context=16)
    np.testing.assert_array_equal(tokens.train, TRAIN)
    np.testing.assert_array_equal(tokens.validation, VALIDATION)
    assert tokens.vocab_size == 256
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["meta.json", *(f"train-0000{i}.bin" for i in range(4)), "validation-00000.bin"]
    assert json.loads((folder / "meta.json").read_text())["corpus"] == "noise"


def test_the_hash_depends_on_content_and_order_alone(folder, tmp_path):
    def data_hash(train, validation, about=None):
        written = write_tokens(
            tmp_path / "other", {"train": train, "validation": validation}, 256, about=about
        )
        return open_tokens(written, 16).data_hash

    original = open_tokens(folder, 16).data_hash
    assert data_hash(TRAIN, VALIDATION, {"source": "elsewhere"}) == original
    assert data_hash(TRAIN[::-1], VALIDATION) != original
    assert data_hash(VALIDATION, TRAIN) != original


def test_missing_shard(folder):
    (folder / "train-00002.bin").unlink()
    assert "train-00002.bin: shard is missing" in refused(folder)


def test_truncated_shard(folder):
    shard = folder / "train-00001.bin"
    shard.write_bytes(shard.read_bytes()[:-1])
    assert "train-00001.bin: truncated or altered shard: 299 bytes, meta.json says 300" in refused(folder)


def test_emptied_shard(folder):
    (folder / "validation-00000.bin").write_bytes(b"")
    assert "validation-00000.bin: truncated" in refused(folder)


def test_altered_shard(folder):
    shard = folder / "validation-00000.bin"
    raw = bytearray(shard.read_bytes())
    raw[50] ^= 1
    shard.write_bytes(raw)
    assert "validation-00000.bin: altered shard" in refused(folder)


def test_too_short_for_the_context(folder):
    assert len(open_tokens(folder, context=99).validation) == 100
    assert "meta.json: validation: 100 tokens; model.context=100 needs 101" in refused(folder, context=100)


def test_an_empty_split_is_too_short(tmp_path):
    folder = write_tokens(tmp_path, {"train": TRAIN, "validation": VALIDATION[:0]}, 256)
    assert "validation: 0 tokens" in refused(folder)


@pytest.mark.parametrize(
    "change",
    [
        lambda meta: meta.update(vocab_size=128),
        lambda meta: meta.update(dtype="int8"),
        lambda meta: meta["train"].reverse(),
        lambda meta: meta["train"].pop(),
        lambda meta: meta["train"][0].update(bytes=299),
        lambda meta: meta["train"][0].pop("file"),
        lambda meta: meta["validation"][0].update(sha256="0" * 64),
        lambda meta: meta.pop("train"),
        lambda meta: meta.update(data_hash="0" * 64),
        lambda meta: meta.pop("data_hash"),
        lambda meta: meta.clear(),
    ],
)
def test_edited_description(folder, change):
    edit(folder, change)
    assert "meta.json: data_hash does not match" in refused(folder)


@pytest.mark.parametrize("text", ["", "{", "\x00"])
def test_torn_description(folder, text):
    (folder / "meta.json").write_text(text)
    assert "meta.json: not valid JSON" in refused(folder)


@pytest.mark.parametrize("text", ["[]", "3", "null"])
def test_description_of_another_kind(folder, text):
    (folder / "meta.json").write_text(text)
    assert "meta.json: data_hash does not match" in refused(folder)


def test_a_folder_without_description_is_unfinished_and_can_be_written_again(folder):
    (folder / "meta.json").unlink()
    assert "meta.json: no such file" in refused(folder)
    write_tokens(folder, {"train": TRAIN, "validation": VALIDATION}, 256)
    np.testing.assert_array_equal(open_tokens(folder, 16).train, TRAIN)


def test_documents_are_joined_across_shards(tmp_path, monkeypatch):
    """Whatever the documents' sizes, the shards are those of their concatenation."""
    monkeypatch.setattr(shards, "SHARD_TOKENS", 300)
    whole = write_tokens(tmp_path / "whole", {"train": TRAIN, "validation": VALIDATION}, 256)
    sizes = [0, 1, 299, 300, 350, 0, 50]
    pieces = np.split(TRAIN, np.cumsum(sizes)[:-1])
    splits = {"train": iter(pieces), "validation": iter([VALIDATION])}
    apart = shards.write_documents(tmp_path / "apart", splits, np.dtype("uint8"), 256, {})
    assert json.loads((whole / "meta.json").read_text()) == json.loads((apart / "meta.json").read_text())


def test_bpe_from_corpus_to_tokens(tmp_path):
    """A study whose arm trains on BPE tokens of text files: tokenizer, shards, vocabulary."""
    pytest.importorskip("datasets")
    pytest.importorskip("tokenizers")
    from types import SimpleNamespace

    from qkpipe.config.models import BPETokenizer, BytesTokenizer, TextCorpus
    from qkpipe.paths import StudyPaths

    for number in range(4):
        (tmp_path / f"{number}.txt").write_text(f"play {number}: to be or not to be\n" * 40)
    corpora = {"plays": TextCorpus(kind="text", files=(str(tmp_path / "*.txt"),))}
    tokenizers = {"bpe": BPETokenizer(kind="bpe", vocab_size=270), "bytes": BytesTokenizer()}
    study = SimpleNamespace(config=SimpleNamespace(corpora=corpora, tokenizers=tokenizers))
    paths = StudyPaths("tiny", tmp_path)
    with pytest.raises(BadInput, match="`qkpipe tokenizer` trains it"):
        shards.prepare(study, paths, "plays", "bpe")
    with pytest.raises(BadInput, match=r"tokenizers.bytes.kind: 'bytes' is not trained; allowed: bpe"):
        shards.train_tokenizer(study, paths, "plays", "bytes")
    shards.train_tokenizer(study, paths, "plays", "bpe")
    bpe = open_tokens(shards.prepare(study, paths, "plays", "bpe"), 16)
    plain = open_tokens(shards.prepare(study, paths, "plays", "bytes"), 16)
    assert (bpe.vocab_size, bpe.train.dtype) == (270, np.uint16)
    assert len(bpe.train) < len(plain.train) / 2
    assert 200 < int(bpe.train.max()) < 270
