"""Text to tokens: bytes as they are, or byte-level BPE trained on the training split alone."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from qkpipe.config.models import BPETokenizer, BytesTokenizer
from qkpipe.data.corpus import Corpus
from qkpipe.errors import BadInput

FILE = "tokenizer.json"


def train_tokenizer(config: BPETokenizer, corpus: Corpus, file: Path) -> Path:
    """Train byte-level BPE (GPT-2's pre-tokenizer, no special token) and write it as the `tokenizers` library reads it.

    A function of the training documents and the config alone. Raises :class:`BadInput` where the text has too few pairs.
    """
    library = _library()
    tokenizer = library.Tokenizer(library.models.BPE())
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=config.vocab_size,
        initial_alphabet=sorted(library.pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=[],
        show_progress=False,
    )
    tokenizer.train_from_iterator((text.decode() for text in corpus.train), trainer)
    if tokenizer.get_vocab_size() != config.vocab_size:
        raise BadInput(
            f"tokenizers.vocab_size: {config.vocab_size}: the training text gives {tokenizer.get_vocab_size()} tokens"
        )
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    tokenizer.save(str(temporary))
    temporary.replace(file)
    return file


def encoder(config: BytesTokenizer | BPETokenizer, file: Path) -> tuple[Any, np.dtype]:
    """(a function from documents to one array of tokens each, the arrays' dtype); ``file`` is a trained tokenizer's."""
    dtype = np.min_scalar_type(config.vocab_size - 1)
    if isinstance(config, BytesTokenizer):
        return _bytes, dtype
    library = _library()
    if not file.exists():
        raise BadInput(f"{file}: no such file; `qkpipe tokenizer` trains it")
    try:
        tokenizer = library.Tokenizer.from_file(str(file))
    except Exception as error:
        raise BadInput(f"{file}: not a tokenizer ({' '.join(str(error).split())[:100]})") from None

    def encode(documents: Iterable[bytes]) -> Iterator[np.ndarray]:
        for text in documents:
            yield np.array(tokenizer.encode(text.decode()).ids, dtype=dtype)

    return encode, dtype


def _bytes(documents: Iterable[bytes]) -> Iterator[np.ndarray]:
    for text in documents:
        yield np.frombuffer(text, dtype=np.uint8)


def _library() -> Any:
    try:
        return importlib.import_module("tokenizers")
    except ImportError:
        raise BadInput("tokenizers: kind bpe needs the package tokenizers; pip install tokenizers") from None
