"""Tokenizers: BPE is a function of the training text, and loses none of it."""

import numpy as np
import pytest
from pydantic import ValidationError

from qkpipe.config.models import BPETokenizer, BytesTokenizer
from qkpipe.data.corpus import Corpus
from qkpipe.data.tokenizer import encoder, train_tokenizer
from qkpipe.errors import BadInput

pytest.importorskip("tokenizers")
TRAIN = [b"to be, or not to be: that is the question\n" * 20, "zwölf Boxkämpfer jagen\n".encode() * 20]
CONFIG = BPETokenizer(kind="bpe", vocab_size=300)


def trained(folder, validation=(b"that the",), train=TRAIN, config=CONFIG):
    return train_tokenizer(config, Corpus(train, list(validation), []), folder / "tokenizer.json")


def test_training_is_a_function_of_the_training_text_alone(tmp_path):
    first = trained(tmp_path / "a").read_bytes()
    assert trained(tmp_path / "b").read_bytes() == first
    assert trained(tmp_path / "c", validation=[b"quite another text " * 50]).read_bytes() == first
    assert trained(tmp_path / "d", train=[*TRAIN, b"quite another text\n" * 50]).read_bytes() != first


def test_tokens_spell_the_text_again(tmp_path):
    from tokenizers import Tokenizer

    file = trained(tmp_path)
    encode, dtype = encoder(CONFIG, file)
    texts = [b"to be\n\n  or\tnot ", "unseen: Öl, \N{GRINNING FACE}".encode(), b""]
    tokens = list(encode(texts))
    assert dtype == np.uint16
    assert all(array.dtype == dtype for array in tokens)
    assert max(map(np.max, tokens[:2])) < 300
    reader = Tokenizer.from_file(str(file))
    assert [reader.decode(array.tolist()).encode() for array in tokens] == texts
    assert len(next(iter(encode([TRAIN[0]])))) < len(TRAIN[0]) / 2


def test_bytes_are_as_they_are(tmp_path):
    encode, dtype = encoder(BytesTokenizer(), tmp_path / "none")
    np.testing.assert_array_equal(np.concatenate(list(encode([b"ab", b"\xff"]))), [97, 98, 255])
    assert dtype == np.uint8


def test_what_cannot_be_is_one_line(tmp_path):
    with pytest.raises(BadInput, match=r"tokenizers.vocab_size: 5000: the training text gives \d+ tokens"):
        trained(tmp_path, config=BPETokenizer(kind="bpe", vocab_size=5000))
    with pytest.raises(BadInput, match=r"tokenizer.json: no such file; `qkpipe tokenizer` trains it"):
        encoder(CONFIG, tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(BadInput, match="not a tokenizer"):
        encoder(CONFIG, tmp_path / "tokenizer.json")
    with pytest.raises(ValidationError):
        BPETokenizer(kind="bpe", vocab_size=256)
