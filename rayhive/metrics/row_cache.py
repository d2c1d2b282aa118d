"""Cache of the rows of a replicate's attempts, keyed by the content of its files.

The cache is the file :data:`NAME` in the replicate's folder. It can be deleted at any time. Its key
is a digest of the name and the content of every log and of ``spec.json``, of rayhive's source code
with its version, of the declared columns, and of the versions of Python and pydantic. A cache with
another key, or one whose own digest is wrong, is ignored.
"""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pydantic

from rayhive.columns import all_columns
from rayhive.files import is_special, write_atomically
from rayhive.registry import METRICS

#: Name of the cache in the folder of a replicate.
NAME = "row.cache"
#: Bytes of the digests.
_SIZE = 32
_BLOCK = 1 << 20


class RowCache:
    """Cache of one replicate, for the content that its files have at construction.

    Args:
        folder: Folder of the replicate.

    Attributes:
        key: Digest of the content and of the code; None if a file cannot be read, or if columns
            come from code outside of rayhive.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._path = folder / NAME
        self.key = _key(folder)

    def read(self) -> list[dict[str, Any]] | None:
        """Return the stored attempts of this content; None without a valid cache."""
        if self.key is None:
            return None
        try:
            key, digest, text = self._path.read_text(encoding="utf-8").split("\n", 2)
        except (OSError, ValueError):
            return None
        if key != self.key or digest != _digest(key, text):
            return None
        found: list[dict[str, Any]] = json.loads(text)
        return found

    def write(self, attempts: Sequence[dict[str, Any]]) -> None:
        """Write the attempts, in one step.

        Nothing is written if the files have changed since construction, or rayhive's code since it
        was loaded, if JSON cannot hold a value exactly, or if the folder cannot be written.
        """
        try:
            text = json.dumps(attempts)
            exact = repr(json.loads(text)) == repr(list(attempts))
        except (TypeError, ValueError):
            return
        loaded = sum(name.startswith("rayhive.") for name in sys.modules)
        same = _unchanged(loaded) and _key(self._folder) == self.key
        if exact and same and self.key is not None:
            content = f"{self.key}\n{_digest(self.key, text)}\n{text}"
            with suppress(OSError):
                write_atomically(self._path, content, durable=False, mode=0o644)


def _key(folder: Path) -> str | None:
    code = _code(METRICS.names())
    if code is None:
        return None
    total = blake2b(code.encode(), digest_size=_SIZE)
    try:
        for path in sorted((*folder.glob("events*.jsonl"), folder / "spec.json")):
            total.update(f"\n{path.name} {_content(path)}".encode())
    except OSError:
        return None
    return total.hexdigest()


def _content(path: Path) -> str:
    """Return the digest of a file; empty if it does not exist.

    Raises:
        OSError: The file cannot be read, or is none.
    """
    total = blake2b(digest_size=_SIZE)
    try:
        if is_special(path):
            raise OSError(f"{path} is not a regular file")
        with path.open("rb") as file:
            while block := file.read(_BLOCK):
                total.update(block)
    except FileNotFoundError:
        return ""
    return total.hexdigest()


@lru_cache(maxsize=4)
def _code(groups: tuple[str, ...]) -> str | None:
    """Return the identity of the code that computes rows; None if a part is not rayhive's."""
    own = all(METRICS.get(name).__module__.startswith("rayhive.") for name in groups)
    if not own or _LOADED is None:
        return None
    columns = [(column.name, column.type, column.stage) for column in all_columns()]
    versions = [sys.version, platform.machine(), pydantic.VERSION]
    return repr((groups, columns, versions, _LOADED))


def _source() -> str | None:
    """Return the digest of rayhive's source code; None if it cannot be read."""
    package, total = Path(__file__).parents[1], blake2b(digest_size=_SIZE)
    try:
        for path in sorted(package.rglob("*.py")):
            total.update(f"{path.relative_to(package)} {_content(path)}\n".encode())
    except OSError:
        return None
    return total.hexdigest()


@lru_cache(maxsize=1)
def _unchanged(modules: int) -> bool:
    """Return whether the source is that of the loaded code; asked again with further modules."""
    return _source() == _LOADED


def _digest(key: str, text: str) -> str:
    return blake2b(f"{key}\n{text}".encode(), digest_size=_SIZE).hexdigest()


#: Digest of the source code when this process loaded it; the files may change afterwards.
_LOADED = _source()
