"""Files that are replaced as a whole: a reader sees the old content or the new one."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path

from rayhive.errors import ConfigError, Problem

_NEW = ".new"


@contextmanager
def replaced(path: Path, *, durable: bool = True, mode: int | None = None) -> Iterator[Path]:
    """Yield the path of a temporary file that replaces ``path`` at the end of the block.

    Of a symbolic link, the file that it points to is replaced, and the link stays.

    If the block or the replacement fails, the temporary file is removed and ``path`` stays as it
    was.

    Args:
        path: The file.
        durable: Whether the content has to be on disk before it replaces the old one. It is needed
            for a file that a run is resumed from. A file that is of use only while its writer or
            this boot of the machine lives needs no sync.
        mode: Permissions of the file; None for the default.
    """
    path = Path(os.path.realpath(path))
    new = path.with_name(f".{path.name}.{os.getpid()}{_NEW}")  # processes may write at once
    try:
        yield new
        if mode is not None:
            new.chmod(mode)
        if durable:
            with new.open("rb") as file:
                os.fsync(file.fileno())
        new.replace(path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise


def write_atomically(
    path: Path, text: str, *, durable: bool = True, mode: int | None = None
) -> None:
    """Replace the content of a file in one step; the arguments are those of :func:`replaced`."""
    with replaced(path, durable=durable, mode=mode) as new:
        new.write_text(text, encoding="utf-8")


def is_special(path: Path) -> bool:
    """Return whether a path is a folder, a device or a pipe. The last two may have no end."""
    return path.exists() and not path.is_file()


def check_writable(path: Path, key: str) -> None:
    """Refuse a path at which no file can be written.

    Args:
        path: The path of a file.
        key: Option that gave it.

    Raises:
        ConfigError: It is a folder, a device or a pipe, or its folder does not exist or may not be
            written to.
    """
    folder = Path(os.path.realpath(path)).parent
    if path.is_dir():
        raise ConfigError(Problem(key, str(path), "a file; this is a folder"))
    if is_special(path):
        raise ConfigError(Problem(key, str(path), "a file; this is a device or a pipe"))
    if not folder.is_dir():
        raise ConfigError(Problem(key, str(path), f"a file in a folder that exists, not {folder}"))
    if not os.access(folder, os.W_OK):
        raise ConfigError(
            Problem(key, str(path), f"a file in a folder that you may write, not {folder}")
        )


def is_unfinished(path: Path) -> bool:
    """Return whether a file is the remainder of a replacement whose process was killed."""
    return path.name.startswith(".") and path.name.endswith(_NEW)


def first_free(path_of: Callable[[int], Path]) -> Path:
    """Return the first of the numbered paths that does not exist.

    Args:
        path_of: Returns the path of a number; numbers begin with 0.
    """
    return next(path for path in map(path_of, count()) if not path.exists())


@contextmanager
def in_turn(folder: Path) -> Iterator[None]:
    """Run the body while no other process runs such a body for the same folder."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # some network file systems lock no directories
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
