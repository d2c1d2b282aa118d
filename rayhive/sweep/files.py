"""Files that are there as a whole or not at all, and disks that take no more."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rayhive.errors import RayhiveError

_NEW = ".new"
#: What a disk says that can't be written, whatever is written.
_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)
#: The same from SQLite, which has no error numbers of the system.
_SQLITE = ("database or disk is full", "disk I/O error", "attempt to write a readonly database")


def write_atomically(path: Path, text: str) -> None:
    """Replace a file's content in one step, on disk when this returns."""
    new = path.with_name(f".{path.name}{_NEW}")
    try:
        with new.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
    except OSError:
        new.unlink(missing_ok=True)
        raise


def is_unfinished(path: Path) -> bool:
    """Return whether a file is what :func:`write_atomically` leaves if its process is killed."""
    return path.name.startswith(".") and path.name.endswith(_NEW)


@contextmanager
def writable(folder: Path) -> Iterator[None]:
    """Turn what a disk that takes no more raises into one error that says so.

    Args:
        folder: What is written to.

    Raises:
        RayhiveError: The disk is full or can't be written.
    """
    try:
        yield
    except Exception as error:
        reason = _disk_trouble(error)
        if reason is None:
            raise
        raise RayhiveError(
            f"{folder} can't be written: {reason}. What is finished is kept: once there is room, "
            "the same command goes on"
        ) from None


def _disk_trouble(error: BaseException | None) -> str | None:
    """Return what a disk says that is the cause of an error, None if none is."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _UNWRITABLE:
            return error.strerror
        found = [text for text in _SQLITE if text in str(error)]
        if found:
            return found[0]
        error = error.__cause__ or error.__context__
    return None
