"""Token shards on disk: written once, described by ``meta.json``, checked whenever they are opened."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from qkpipe.config.load import Study
from qkpipe.config.models import BPETokenizer
from qkpipe.data import tokenizer as tokenizers
from qkpipe.data.corpus import load_corpus
from qkpipe.errors import BadInput
from qkpipe.paths import StudyPaths

SHARD_TOKENS = 1 << 22
SPLITS = ("train", "validation")


@dataclass(frozen=True)
class Tokens:
    """Both splits of a tokenized corpus, memory-mapped, one-dimensional."""

    train: np.ndarray
    validation: np.ndarray
    vocab_size: int
    data_hash: str


def train_tokenizer(study: Study, paths: StudyPaths, corpus_name: str, tokenizer_name: str) -> Path:
    """Train a tokenizer on a corpus' training split; returns its file, in the folder its shards will be in."""
    config = study.config.tokenizers[tokenizer_name]
    if not isinstance(config, BPETokenizer):
        raise BadInput(f"tokenizers.{tokenizer_name}.kind: {config.kind!r} is not trained; allowed: bpe")
    corpus = load_corpus(study.config.corpora[corpus_name], _downloads(paths))
    file = paths.data(corpus_name, tokenizer_name) / tokenizers.FILE
    return tokenizers.train_tokenizer(config, corpus, file)


def prepare(study: Study, paths: StudyPaths, corpus_name: str, tokenizer_name: str) -> Path:
    """Fetch a corpus, split, tokenize, and write shards with ``meta.json``; returns the folder.

    ``meta.json`` is written last: a folder without it is unfinished, and is written again.
    """
    source, tokenizer = study.config.corpora[corpus_name], study.config.tokenizers[tokenizer_name]
    folder = paths.data(corpus_name, tokenizer_name)
    encode, dtype = tokenizers.encoder(tokenizer, folder / tokenizers.FILE)
    corpus = load_corpus(source, _downloads(paths))
    about = {
        "corpus": corpus_name,
        "tokenizer": tokenizer_name,
        "source": source.model_dump(mode="json"),
        "files": [{"name": file, "sha256": digest, "bytes": size} for file, digest, size in corpus.files],
    }
    splits = {split: encode(getattr(corpus, split)) for split in SPLITS}
    return write_documents(folder, splits, dtype, tokenizer.vocab_size, about)


def _downloads(paths: StudyPaths) -> Path:
    return paths.root / "results" / "downloads"


def write_tokens(
    folder: Path, splits: dict[str, np.ndarray], vocab_size: int, about: dict[str, Any] | None = None
) -> Path:
    """Write both splits (one-dimensional, unsigned integers of one dtype) and ``meta.json``; ``about`` is kept in it."""
    documents = {split: [tokens] for split, tokens in splits.items()}
    return write_documents(folder, documents, splits["train"].dtype, vocab_size, about or {})


def write_documents(
    folder: Path,
    splits: dict[str, Iterable[np.ndarray]],
    dtype: np.dtype,
    vocab_size: int,
    about: dict[str, Any],
) -> Path:
    """The same, document by document, with one shard of either split in memory at a time."""
    folder.mkdir(parents=True, exist_ok=True)
    meta = {**about, "vocab_size": vocab_size, "dtype": str(dtype)}
    for split in SPLITS:
        meta[split] = _write_shards(folder, split, splits[split])
    meta["data_hash"] = _data_hash(meta)
    _write_atomically(folder / "meta.json", (json.dumps(meta, indent=1) + "\n").encode())
    return folder


def open_tokens(folder: Path, context: int) -> Tokens:
    """Open a folder written by :func:`prepare`; refuses a missing, truncated or altered shard, naming it.

    Raises:
        BadInput: also if a split is too short for one window of ``context`` + 1 tokens.
    """
    meta_file = folder / "meta.json"
    try:
        meta = json.loads(meta_file.read_text())
    except FileNotFoundError:
        raise BadInput(f"{meta_file}: no such file; `qkpipe data` writes it") from None
    except ValueError:
        raise BadInput(f"{meta_file}: not valid JSON; delete the folder and run `qkpipe data`") from None
    try:
        intact = _data_hash(meta) == meta["data_hash"]
    except (KeyError, TypeError):
        intact = False
    if not intact:
        raise BadInput(
            f"{meta_file}: data_hash does not match the shard list; delete the folder and run `qkpipe data`"
        )
    splits = {split: _open_split(folder, meta, split) for split in SPLITS}
    for split, tokens in splits.items():
        if len(tokens) < context + 1:
            raise BadInput(
                f"{meta_file}: {split}: {len(tokens)} tokens; model.context={context} needs {context + 1}"
            )
    return Tokens(**splits, vocab_size=meta["vocab_size"], data_hash=meta["data_hash"])


def _full_shards(documents: Iterable[np.ndarray]) -> Iterator[bytes]:
    """The documents' tokens, joined and cut to ``SHARD_TOKENS``; the last may be shorter."""
    pieces: list[np.ndarray] = []
    size = 0
    for tokens in documents:
        while size + len(tokens) >= SHARD_TOKENS:
            wanted = SHARD_TOKENS - size
            yield b"".join(piece.tobytes() for piece in [*pieces, tokens[:wanted]])
            pieces, size, tokens = [], 0, tokens[wanted:]
        pieces.append(tokens)
        size += len(tokens)
    if size:
        yield b"".join(piece.tobytes() for piece in pieces)


def _write_shards(folder: Path, split: str, documents: Iterable[np.ndarray]) -> list[dict[str, Any]]:
    shards = []
    for index, raw in enumerate(_full_shards(documents)):
        file = f"{split}-{index:05d}.bin"
        _write_atomically(folder / file, raw)
        shards.append({"file": file, "bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest()})
    return shards


def _open_split(folder: Path, meta: dict[str, Any], split: str) -> np.ndarray:
    parts = []
    for shard in meta[split]:
        path = folder / shard["file"]
        if not path.exists():
            raise BadInput(f"{path}: shard is missing; delete {folder} and run `qkpipe data`")
        size = path.stat().st_size
        if size != shard["bytes"]:
            raise BadInput(
                f"{path}: truncated or altered shard: {size} bytes, meta.json says {shard['bytes']}"
            )
        tokens = np.memmap(path, dtype=meta["dtype"], mode="r")
        if hashlib.sha256(tokens).hexdigest() != shard["sha256"]:
            raise BadInput(f"{path}: altered shard: its SHA-256 is not the one in meta.json")
        parts.append(tokens)
    return parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, meta["dtype"]), *parts])


def _data_hash(meta: dict[str, Any]) -> str:
    """Hash of what training reads: vocabulary, and every shard's name, size and content, in order."""
    content = [meta["vocab_size"], meta["dtype"], *[meta[split] for split in SPLITS]]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def _write_atomically(path: Path, raw: bytes) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_bytes(raw)
    os.replace(temporary, path)
