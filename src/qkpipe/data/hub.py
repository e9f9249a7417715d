"""Text through the `datasets` library: the Hugging Face hub, text files, Parquet files. Only the data rule imports it."""

from __future__ import annotations

import glob
import hashlib
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from qkpipe.config.models import HubCorpus, ParquetCorpus, TextCorpus
from qkpipe.errors import BadInput


class Rows:
    """Rows ``first`` to ``stop`` of a mapped dataset as UTF-8 documents, each followed by the separator, read anew each time."""

    def __init__(
        self, dataset: Any, column: str, separator: str, first: int = 0, stop: int | None = None
    ) -> None:
        self._dataset, self._column, self._separator = dataset, column, separator
        self._range = range(first, len(dataset) if stop is None else stop)

    def __iter__(self) -> Iterator[bytes]:
        for row in self._range:
            yield (self._dataset[row][self._column] + self._separator).encode()

    def __len__(self) -> int:
        return len(self._range)

    def part(self, first: int, stop: int) -> Rows:
        chosen = self._range[first:stop]
        return Rows(self._dataset, self._column, self._separator, chosen.start, chosen.stop)


def load_rows(config: HubCorpus | TextCorpus | ParquetCorpus, cache: Path) -> tuple[Rows, Rows | None]:
    """(all documents, or those of the training split; the validation split's, where the source has one of its own).

    Raises:
        BadInput: `datasets` is not installed, or the source cannot be read; the message names it.
    """
    try:
        library = importlib.import_module("datasets")
    except ImportError:
        raise BadInput(
            f"corpus {config.label()}: needs the package datasets; pip install 'qkpipe[hub]'"
        ) from None
    options: dict[str, Any] = {"cache_dir": str(cache / "datasets")}
    if isinstance(config, HubCorpus):
        path = config.path
        options |= {"name": config.name, "revision": config.revision}
    else:
        path = config.kind
        options["data_files"] = {"train": source_files(config)}
        if isinstance(config, TextCorpus):
            options["sample_by"] = "document"

    def rows(split: str) -> Rows:
        try:
            dataset = library.load_dataset(path, split=split, **options)
        except Exception as error:  # every source fails in its own way; one line says which it was
            said = " ".join(str(error).split())[:200]
            raise BadInput(f"corpus {config.label()}: not loaded ({type(error).__name__}: {said})") from None
        if config.column not in dataset.column_names:
            allowed = ", ".join(dataset.column_names)
            raise BadInput(f"corpus {config.label()}: column: no {config.column!r}; allowed: {allowed}")
        return Rows(dataset, config.column, config.separator)

    if isinstance(config, HubCorpus):
        return rows(config.split), rows(config.validation_split) if config.validation_split else None
    return rows("train"), None


def source_files(config: TextCorpus | ParquetCorpus) -> list[str]:
    """The files that the patterns match, sorted; :class:`BadInput` where one matches none."""
    found: set[str] = set()
    for pattern in config.files:
        matches = glob.glob(pattern, recursive=True)
        if not matches:
            raise BadInput(f"corpus {config.label()}: files: {pattern!r} matches no file")
        found.update(matches)
    return sorted(found)


def file_hash(path: str) -> tuple[str, int]:
    """SHA-256 and size of a file."""
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return digest, Path(path).stat().st_size
