"""Tool ``small_disk``: a small file system over a folder of a peer, which can be filled."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import os
from pathlib import Path

from rayhive.cluster.node import process_group
from rayhive.cluster.node.tools.base import Site, Tool
from rayhive.errors import ClusterError
from rayhive.faults.node_tools import DiskArgs, DiskState

_LIBC = ctypes.CDLL(None, use_errno=True)
_MS_NOSUID, _MS_NODEV, _MS_NOEXEC = 2, 4, 8
#: Source of these file systems in the mount table.
SOURCE = "rayhive"
#: Greatest size [bytes]: the file system is in memory.
LARGEST = 256 * 2**20
_FILLER = ".rayhive-full"
_BLOCK = bytes(64 * 1024)


class SmallDisk:
    """A tmpfs over a folder, which is created if necessary.

    Args:
        folder: The folder; its content is hidden while the file system is mounted.
        size: Size of the file system [bytes].

    Raises:
        ClusterError: It can't be mounted.
    """

    def __init__(self, folder: Path, size: int) -> None:
        if not 0 < size <= LARGEST:
            raise ClusterError(f"size: {size} bytes must be 1 to {LARGEST} for a small file system")
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
            raise ClusterError(f"the file system mounted on {folder} is not there")

    def mounted(self) -> bool:
        """Return whether the folder shows this file system."""
        try:
            return self.folder.stat().st_dev == self._device
        except OSError:
            return False

    def fill(self) -> int:
        """Write until the file system is full; return the bytes written.

        Raises:
            ClusterError: The folder is not on this file system any more; nothing is written.
        """
        if not self.mounted():
            raise ClusterError(f"{self.folder} is not rayhive's own small file system")
        written = 0
        with contextlib.suppress(OSError), (self.folder / _FILLER).open("ab", 0) as file:
            while os.fstat(file.fileno()).st_dev == self._device:
                written += file.write(_BLOCK)
        return written

    def state(self) -> DiskState:
        """Return the free space, and the error of a write of one page."""
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
        return DiskState(free=found.f_bavail * found.f_frsize, error=refused)

    def empty(self) -> None:
        """Remove the filler."""
        with contextlib.suppress(FileNotFoundError):
            if self.mounted():
                (self.folder / _FILLER).unlink()

    def release(self) -> None:
        """Unmount; a second call does nothing."""
        if not self.mounted():
            return
        process_group.unmount(self.folder)
        if self._made:
            with contextlib.suppress(OSError):
                self.folder.rmdir()


class SmallDiskTool(Tool[DiskArgs, DiskState]):
    """Mounts a small file system over a folder in a peer's temporary directory, and fills it."""

    def __init__(self, site: Site) -> None:
        super().__init__(site)
        self._disk: SmallDisk | None = None

    async def start(self, args: DiskArgs) -> DiskState:
        """Mount the file system if it is not mounted, and fill or empty it.

        Raises:
            ClusterError: It can't be mounted, or the peer has no such folder.
        """
        disk = self._disk
        if disk is None:
            disk = self._disk = await asyncio.to_thread(SmallDisk, self._path(args), args.size)
        if not args.full:
            disk.empty()
            return await self.state()
        written = await asyncio.to_thread(disk.fill)
        return disk.state().model_copy(update={"written": written})

    def _path(self, args: DiskArgs) -> Path:
        temporary = self.site.peer().folder
        if (
            temporary is None
            or not Path(temporary).is_dir()
            or Path(args.folder).name != args.folder
        ):
            raise ClusterError(
                f"folder: {args.folder!r} must be a name in the temporary directory of the peer "
                f"with the leader {self.site.subject}"
            )
        return Path(temporary) / args.folder

    async def state(self) -> DiskState:
        """Return the free space, and the error that a write fails with.

        Raises:
            ClusterError: The file system is not mounted.
        """
        if self._disk is None:
            raise ClusterError(f"the peer with the leader {self.site.subject} has no small disk")
        return self._disk.state()

    async def stop(self) -> None:
        """Unmount the file system."""
        if self._disk is not None:
            await asyncio.to_thread(self._disk.release)
        self._disk = None


def _mount(folder: Path, options: str) -> None:
    flags = _MS_NOSUID | _MS_NODEV | _MS_NOEXEC
    target = os.fsencode(folder)
    if _LIBC.mount(SOURCE.encode(), target, b"tmpfs", flags, options.encode()) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(folder))
