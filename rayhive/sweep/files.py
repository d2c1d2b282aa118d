"""One clear error for disks that cannot be written."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rayhive.errors import RayhiveError

#: Errors of a disk that cannot be written at all.
_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)
#: The same errors in SQLite, which reports them as text only.
_SQLITE = ("database or disk is full", "disk I/O error", "attempt to write a readonly database")


@contextmanager
def writable(folder: Path) -> Iterator[None]:
    """Turn errors of a disk that cannot be written into one :class:`RayhiveError`.

    Args:
        folder: The folder that is written to.

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
            f"{folder} can't be written: {reason}. Finished replicates are kept; once there is "
            "room, the same command resumes the sweep"
        ) from None


def _disk_trouble(error: BaseException | None) -> str | None:
    """Return the error text of a disk that caused an error, None if no disk did."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _UNWRITABLE:
            return error.strerror
        found = [text for text in _SQLITE if text in str(error)]
        if found:
            return found[0]
        error = error.__cause__ or error.__context__
    return None
