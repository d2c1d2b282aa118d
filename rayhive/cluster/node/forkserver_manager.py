"""Start and end of a node's forkserver."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from rayhive.errors import PeerError

#: The forkserver first imports torch and Lightning, on cores that peers may be using [s].
READY_TIMEOUT = 90.0
_RETRY_EVERY = 0.05
_END_TIMEOUT = 5.0


class ForkserverManager:
    """Keeps one forkserver alive.

    Args:
        directory: Folder of its sockets and its log.
        command: Program that gets the path of the socket; None for rayhive's own.
    """

    def __init__(self, directory: Path, command: Sequence[str] | None = None) -> None:
        self._directory, self._log = directory, directory / "forkserver.log"
        own = (sys.executable, "-m", "rayhive.peer.forkserver")
        self._command = tuple(command) if command is not None else own
        self._process: subprocess.Popen[bytes] | None = None
        self._started = 0
        self._lock = asyncio.Lock()

    @property
    def pid(self) -> int | None:
        """Pid of the running forkserver; None if none runs."""
        running = self._process is not None and self._process.poll() is None
        return self._process.pid if running and self._process is not None else None

    async def ensure(self) -> str:
        """Return the socket of a serving forkserver; start one if none runs.

        Raises:
            PeerError: It ended or was not ready in time; the message has the end of its log.
        """
        async with self._lock:
            if self.pid is None:
                await self._start()
            return str(self._socket())

    def _socket(self) -> Path:
        return self._directory / f"z{self._started}.sock"

    async def _start(self) -> None:
        await self.end()  # closes the pipe of a dead one
        self._started += 1
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [*self._command, str(self._socket())],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
                close_fds=True,
                env=forkserver_environment(),
            )
        try:
            await asyncio.wait_for(self._serving(), READY_TIMEOUT)
        except asyncio.TimeoutError:
            await self.end()
            raise PeerError(
                f"the forkserver was not ready after {READY_TIMEOUT:g} s: {tail(self._log)}"
            ) from None

    async def _serving(self) -> None:
        while True:
            if self._process is not None and (code := self._process.poll()) is not None:
                raise PeerError(f"the forkserver ended with exit code {code}: {tail(self._log)}")
            try:
                _, writer = await asyncio.open_unix_connection(str(self._socket()))
            except OSError:
                await asyncio.sleep(_RETRY_EVERY)  # a listening socket is not announced
                continue
            writer.close()
            return

    async def end(self) -> None:
        """End the forkserver, and with it all of its peers."""
        process, self._process = self._process, None
        if process is None:
            return
        if process.stdin is not None:
            with contextlib.suppress(OSError):
                process.stdin.close()
        try:
            await asyncio.to_thread(process.wait, _END_TIMEOUT)
        except subprocess.TimeoutExpired:
            process.kill()
            await asyncio.to_thread(process.wait)


def forkserver_environment() -> dict[str, str]:
    """Return this process's environment with its import path and without Ray's variables."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    # Ray derives it from the actor's cores; peers set their own number of threads.
    env.pop("OMP_NUM_THREADS", None)
    paths = [os.path.abspath(path) for path in sys.path if path != ""]
    env["PYTHONPATH"] = os.pathsep.join(
        dict.fromkeys(path for path in paths if os.path.exists(path) and not _rays_own(path))
    )
    env["PYTHONUNBUFFERED"] = "1"
    return env


def _rays_own(path: str) -> bool:
    """Return whether Ray added ``path`` to the import path for its own workers."""
    parts = Path(path).parts
    return "ray" in parts and ("thirdparty_files" in parts or "_private" in parts)


def last_bytes(path: Path, limit: int = 8 * 2**20) -> bytes:
    """Return the end of a file, at most ``limit`` bytes; nothing if it cannot be read."""
    with contextlib.suppress(OSError), path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - limit))
        return file.read()
    return b""


def tail(path: Path, lines: int = 12) -> str:
    """Return the last lines of a file, or a note that it is empty."""
    text = last_bytes(path, 16384).decode(errors="replace").strip()
    return "\n".join(text.splitlines()[-lines:]) or "(its log is empty)"
