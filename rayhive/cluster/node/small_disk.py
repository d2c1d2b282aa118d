"""A small file system in memory, mounted over a folder, that can be filled without harm."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
from pathlib import Path

from rayhive.cluster.node import process_group
from rayhive.errors import ClusterError

_LIBC = ctypes.CDLL(None, use_errno=True)
_MS_NOSUID, _MS_NODEV, _MS_NOEXEC = 2, 4, 8
#: What the mount table calls the source of these file systems.
SOURCE = "rayhive"
#: Nothing larger is mounted, let alone filled: it takes memory [bytes].
LARGEST = 256 * 2**20
_FILLER = ".rayhive-full"
_BLOCK = bytes(64 * 1024)


class SmallDisk:
    """A tmpfs over a folder, which is made if it is not there.

    Args:
        folder: The folder; what it holds is hidden as long as the file system is mounted.
        size: How much it holds [bytes].

    Raises:
        ClusterError: It can't be mounted.
    """

    def __init__(self, folder: Path, size: int) -> None:
        if not 0 < size <= LARGEST:
            raise ClusterError(f"a small file system has 1 to {LARGEST} bytes, not {size}")
        self.folder = folder
        self._made = not folder.exists()
        below: int | None = None
        try:
            folder.mkdir(exist_ok=True)
            below = folder.stat().st_dev
            _mount(folder, f"size={size},mode=700")
        except OSError as error:
            if self._made:
                with contextlib.suppress(OSError):
                    folder.rmdir()
            raise ClusterError(f"nothing can be mounted on {folder}: {error.strerror}") from error
        self._device = folder.stat().st_dev
        if self._device == below:
            raise ClusterError(f"what was mounted on {folder} is not there")

    def mounted(self) -> bool:
        """Return whether what the folder shows is this file system."""
        try:
            return self.folder.stat().st_dev == self._device
        except OSError:
            return False

    def fill(self) -> int:
        """Write until nothing fits any more; return the bytes written.

        Raises:
            ClusterError: The folder is not on this file system any more: it is left alone.
        """
        if not self.mounted():
            raise ClusterError(f"{self.folder} is not rayhive's own small file system")
        written = 0
        with contextlib.suppress(OSError), (self.folder / _FILLER).open("ab", 0) as file:
            while os.fstat(file.fileno()).st_dev == self._device:
                written += file.write(_BLOCK)
        return written

    def state(self) -> dict[str, int | str | None]:
        """Return the free bytes, and the name of the error that a write meets, if any."""
        found = os.statvfs(self.folder)
        probe = self.folder / f"{_FILLER}-probe"
        refused = None
        try:
            with probe.open("wb", 0) as file:
                file.write(_BLOCK[:4096])
        except OSError as error:
            refused = errno.errorcode.get(error.errno or 0, str(error.errno))
        with contextlib.suppress(OSError):
            probe.unlink()
        return {"free": found.f_bavail * found.f_frsize, "error": refused}

    def empty(self) -> None:
        """Make room again."""
        with contextlib.suppress(FileNotFoundError):
            if self.mounted():
                (self.folder / _FILLER).unlink()

    def release(self) -> None:
        """Unmount; calling it again does nothing."""
        if not self.mounted():
            return
        process_group.unmount(self.folder)
        if self._made:
            with contextlib.suppress(OSError):
                self.folder.rmdir()


def _mount(folder: Path, options: str) -> None:
    flags = _MS_NOSUID | _MS_NODEV | _MS_NOEXEC
    target = os.fsencode(folder)
    if _LIBC.mount(SOURCE.encode(), target, b"tmpfs", flags, options.encode()) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(folder))
