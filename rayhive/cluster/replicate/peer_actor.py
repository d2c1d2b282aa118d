"""The Ray actor that hosts one peer process.

hivemind is not in this process: it forks, wants the main thread and shares locks across its
forks, which would hide a death from Ray and keep the actor from answering. The actor holds one
end of a socket whose other end is the peer: commands go in, events come out, and when either
side dies the other sees it at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rayhive.cluster import actors
from rayhive.cluster.calls import Once
from rayhive.cluster.node.process_group import RECORD_SUFFIX, OwnedProcesses
from rayhive.errors import PeerError
from rayhive.events import Event, load_event

#: The forkserver's last word on a peer; not an event of the log.
EXITED = "exited"
#: Events after which the peer may own processes and sockets that it did not own before.
_NOTED_AFTER = ("dht_ready", "peer_ready", "training_started", "peer_finished")
_LINE_LIMIT = 2**26
_SPAWN_TIMEOUT = 20.0
#: How long the forkserver may take to tell a dead peer's exit code [s].
_LAST_WORD_TIMEOUT = 1.0


class PeerActor:
    """Hosts one peer process: starts it, passes commands and events, notices its death, kills it.

    Args:
        name: The peer's name, for example ``peer-0``.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._events: list[Event] = []
        self._taken = 0
        self._news = asyncio.Condition()
        self._owned = OwnedProcesses()
        self._record: Path | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._death = asyncio.Event()
        self._exit_code: int | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._pidfd: int | None = None
        self._calls = Once()

    async def start(
        self, spec: Mapping[str, Any], forkserver: str, log: str, temporary: str, gpus: bool
    ) -> dict[str, Any]:
        """Start the peer process; asked again, return what came of the first time.

        Args:
            spec: The PeerSpec as a JSON object.
            forkserver: Path of the socket of the node's forkserver.
            log: Absolute path of the peer's log.
            temporary: The peer's own temporary directory; removed after its end.
            gpus: Whether the peer may use the GPUs that Ray gave to this actor.

        Returns:
            ``pid``, ``host`` and the devices it sees.

        Raises:
            PeerError: The forkserver is gone or did not fork.
        """
        return await self._calls.do(
            "start", lambda: self._start(spec, forkserver, log, temporary, gpus)
        )

    async def _start(
        self, spec: Mapping[str, Any], forkserver: str, log: str, temporary: str, gpus: bool
    ) -> dict[str, Any]:
        devices = os.environ.get("CUDA_VISIBLE_DEVICES", "") if gpus else ""
        env = {"TMPDIR": temporary, "CUDA_VISIBLE_DEVICES": devices}
        self._owned.folder = temporary
        self._record = Path(temporary).with_suffix(RECORD_SUFFIX)
        self._owned.save(self._record)
        request = json.dumps({"spec": dict(spec), "log": log, "env": env})
        try:
            reader, self._writer = await asyncio.open_unix_connection(forkserver, limit=_LINE_LIMIT)
            self._writer.write(request.encode() + b"\n")
            await self._writer.drain()
            line = await asyncio.wait_for(reader.readline(), _SPAWN_TIMEOUT)
            first = load_event(line.decode())
            pid = int(first["pid"])
        except (OSError, ValueError, KeyError, asyncio.TimeoutError) as error:
            raise PeerError(f"the forkserver did not start {self.name}: {error!r}") from error
        if first["kind"] != "spawned":
            raise PeerError(f"{self.name} began with {first['kind']!r} instead of 'spawned'")
        self._owned.leader = pid
        self._note()
        self._watch(pid)
        self._tasks = [
            asyncio.create_task(self._read(reader)),
            asyncio.create_task(self._await_death()),
        ]
        return {"pid": pid, "host": os.uname().nodename, "devices": devices}

    def _watch(self, pid: int) -> None:
        try:
            self._pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            self._death.set()
            return
        asyncio.get_running_loop().add_reader(self._pidfd, self._died)

    def _died(self) -> None:
        if self._pidfd is not None:
            asyncio.get_running_loop().remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = None
        self._death.set()

    async def _read(self, reader: asyncio.StreamReader) -> None:
        """Take what the peer sends until its last descendant has closed the connection."""
        with contextlib.suppress(ConnectionError):
            while line := await reader.readline():
                text = line.decode(errors="replace").strip()
                if not text:
                    continue
                if EXITED in text and (code := _exit_code(text)) is not None:
                    self._exit_code = code
                    return
                try:
                    event = load_event(text)
                except ValueError:
                    continue  # half a line is what a killed writer leaves
                await self._publish(event)
                if event["kind"] in _NOTED_AFTER:
                    self._note()

    async def _await_death(self) -> None:
        """Publish the end of the peer after everything that it said before."""
        await self._death.wait()
        with contextlib.suppress(asyncio.TimeoutError):
            # The forkserver reaps at once; it may be dead itself, and forks may hold the
            # connection.
            await asyncio.wait_for(self._tasks[0], _LAST_WORD_TIMEOUT)
        await self._publish({"kind": EXITED, "t": 0.0, "exit_code": self._exit_code})

    async def _publish(self, event: Event) -> None:
        async with self._news:
            self._events.append(event)
            self._news.notify_all()

    def _note(self) -> None:
        self._owned.note()
        if self._record is not None and self._record.parent.is_dir():
            self._owned.save(self._record)

    async def next_events(self, after: int, timeout: float) -> list[Event]:
        """Return the events from number ``after`` on, waiting for one if there is none yet.

        Asking for what comes after an event says that it arrived: it is forgotten here. The last
        event of a peer has the kind ``exited`` and its ``exit_code``: negative for a signal, None
        where nobody knows. An empty list means that ``timeout`` seconds passed.
        """
        async with self._news:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(
                    self._news.wait_for(lambda: self._taken + len(self._events) > after), timeout
                )
            del self._events[: max(0, after - self._taken)]
            self._taken = max(after, self._taken)
            return list(self._events)

    async def command(self, command: Mapping[str, Any], key: str) -> bool:
        """Send a command to the peer, once for each key.

        Args:
            command: What the peer is to do.
            key: The same when the command is repeated because it may not have arrived.

        Returns:
            Whether there was a peer to send it to.
        """
        return await self._calls.do(key, lambda: self._command(command))

    async def _command(self, command: Mapping[str, Any]) -> bool:
        if self._writer is None or self._death.is_set():
            return False
        try:
            self._writer.write(json.dumps(dict(command)).encode() + b"\n")
            await self._writer.drain()
        except ConnectionError:
            return False
        return True

    async def kill(self, signum: int = signal.SIGKILL) -> None:
        """Send a signal to the peer's whole process group."""
        self._note()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if self._owned.leader:
                os.killpg(self._owned.leader, signum)
        if signum == signal.SIGKILL:
            self._owned.kill()

    async def status(self) -> dict[str, Any]:
        """Return the peer's pid, whether it runs, its exit code and its number of events."""
        return {
            "pid": self._owned.leader or None,
            "running": bool(self._owned.leader) and not self._death.is_set(),
            "exit_code": self._exit_code,
            "events": self._taken + len(self._events),
        }

    async def close(self) -> None:
        """Kill what is left of the peer and drop the connection."""
        if self._owned.leader:
            await self.kill()
            self._owned.note()
        if self._writer is not None:
            self._writer.close()

    async def leave(self) -> None:
        """End the actor."""
        actors.leave()


def _exit_code(text: str) -> int | None:
    """Return the exit code if ``text`` is the forkserver's last word."""
    with contextlib.suppress(ValueError, TypeError, KeyError):
        message = json.loads(text)
        if message["kind"] == EXITED:
            return int(message["exit_code"])
    return None
