"""Source code of the Python standard library as a text corpus with a held-out part."""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rayhive.errors import RayhiveError

MIN_CORPUS_BYTES = 100_000
HELD_OUT_SHARE = 0.1
SKIPPED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
)
# End of a file in the stream; source text contains no zero byte.
SEPARATOR = b"\0"


@dataclass(frozen=True)
class Corpus:
    """Source text, split by whole files.

    Attributes:
        train: The training split.
        held_out: The held-out split, about a tenth of the whole.
    """

    train: bytes
    held_out: bytes


def read_corpus(limit: int, folder: Path | None = None) -> Corpus:
    """Read ``*.py`` files until there are ``limit`` bytes.

    Files are read in the order of a hash of their path within the folder. This order mixes
    packages, and is the same on every machine with the same Python. Another part of the hash
    determines whether a file is held out, so a larger ``limit`` never moves a file between splits.

    Args:
        limit: Bytes to read, both splits together. Each split is cut at its share of the limit.
        folder: Folder to read; by default the standard library of the running interpreter.

    Raises:
        RayhiveError: The folder holds too little source text, for example because a distribution
            ships the standard library compiled or zipped.
    """
    folder = folder or Path(sysconfig.get_path("stdlib"))
    room = {False: round(limit * (1 - HELD_OUT_SHARE)), True: round(limit * HELD_OUT_SHARE)}
    parts: dict[bool, list[bytes]] = {False: [], True: []}
    for path in _source_files(folder):
        digest = _digest(path, folder)
        held_out = digest[-1] < 256 * HELD_OUT_SHARE
        if room[held_out] <= 0:
            continue
        text = (path.read_bytes() + SEPARATOR)[: room[held_out]]
        parts[held_out].append(text)
        room[held_out] -= len(text)
        if room[False] <= 0 and room[True] <= 0:
            break
    corpus = Corpus(train=b"".join(parts[False]), held_out=b"".join(parts[True]))
    if min(len(corpus.train), 9 * len(corpus.held_out)) < MIN_CORPUS_BYTES // 2:
        raise RayhiveError(
            f"source_lm found only {len(corpus.train)} bytes of Python source to train on and "
            f"{len(corpus.held_out)} to hold out under {folder}"
        )
    return corpus


def _source_files(folder: Path) -> Iterator[Path]:
    files = (
        path
        for path in folder.rglob("*.py")
        if not SKIPPED_FOLDERS.intersection(path.relative_to(folder).parts)
    )
    yield from sorted(files, key=lambda path: _digest(path, folder))


def _digest(path: Path, folder: Path) -> bytes:
    return hashlib.sha256(path.relative_to(folder).as_posix().encode()).digest()
