"""The Ray actor that hosts a peer process.

hivemind does not run in this process: it forks, needs the main thread and shares locks across its
forks. That would hide a death from Ray and block the actor's calls. The actor holds one end of a
socket, and the peer process the other: commands go in, events come out, and each side notices the
death of the other at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeAlias, TypeVar

from rayhive import events
from rayhive.cluster import actors
from rayhive.cluster.actors import Once
from rayhive.cluster.node import machine
from rayhive.cluster.node.forkserver_manager import tail
from rayhive.cluster.node.process_group import RECORD_SUFFIX, OwnedProcesses
from rayhive.cluster.node.processes import started
from rayhive.errors import PeerError
from rayhive.spec.commands import Command
from rayhive.spec.replicate import PeerSpec

#: Kind of the last line that the forkserver writes to a peer's connection.
_EXITED = "exited"
#: Events after which the peer may own new processes and sockets.
_RECORDED_AFTER = (events.DHTReady, events.PeerReady, events.TrainingStarted, events.PeerFinished)
#: Events that are followed by others of the same round at once, and the longest wait for those [s].
_FOLLOWED = (events.Round, events.Transition)
_FOLLOWED_WITHIN = 0.05
_LINE_LIMIT = 2**26
_SPAWN_TIMEOUT = 20.0
#: Time between two checks of a peer process where the kernel does not report its death [s].
_CHECK_EVERY = 0.05
#: Lines of a peer's log that its end comes with.
LAST_LINES = 6
#: Time that the forkserver has to report the exit code of a dead peer [s].
_EXIT_CODE_TIMEOUT = 1.0

T = TypeVar("T")
P = ParamSpec("P")


@dataclass(frozen=True)
class Exited:
    """End of a peer process: the last item of its stream.

    Attributes:
        exit_code: Exit code, negative for a signal; None if unknown.
        reason: Why the actor cannot be reached; None if the actor noticed the end itself.
        last_lines: End of the peer's log, which may be on another node; None if the actor cannot be
            reached.
    """

    exit_code: int | None = None
    reason: str | None = None
    last_lines: str | None = None


@dataclass(frozen=True)
class Unreadable:
    """Line of a peer that is not a valid event.

    Attributes:
        reason: Description of the first mistake.
    """

    reason: str


#: Item of the stream that an actor sends to the supervisor.
StreamItem: TypeAlias = events.Event | Exited | Unreadable


@dataclass(frozen=True)
class PeerStart:
    """Order to start a peer process.

    Attributes:
        spec: The peer.
        forkserver: Path of the socket of the node's forkserver.
        log: Absolute path of the peer's log.
        temporary: The peer's own temporary directory, removed after its end.
        gpus: Whether the peer may use the GPUs that Ray assigned to the actor.
    """

    spec: PeerSpec
    forkserver: str
    log: str
    temporary: str
    gpus: bool


@dataclass(frozen=True)
class PeerProcess:
    """A started peer process.

    Attributes:
        pid: Process id.
        host: Name of its host.
        boot: Id of the boot of that kernel.
        versions: Installed version of each package.
        hardware: Its machine, on one line.
    """

    pid: int
    host: str
    boot: str | None = None
    versions: dict[str, str | None] | None = None
    hardware: str | None = None


#: Receives a peer whose process runs, Ray's id of its node, and the process.
Started: TypeAlias = Callable[[PeerSpec, str, PeerProcess], None]


def log_of(folder: str | Path, name: str) -> Path:
    """Return the final path of a peer's log in the folder of its replicate."""
    return Path(folder) / "logs" / f"{name}.log"


class HostedPeer:
    """One peer process: starts it, relays commands and events, kills its process group.

    Args:
        name: The peer's name, for example ``peer-0``.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._items: list[StreamItem] = []
        self._taken = 0
        self._news = asyncio.Condition()
        self._owned = OwnedProcesses()
        self._record: Path | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._exit_code: int | None = None
        self._log = Path()
        self._death: asyncio.Task[None] | None = None
        self._calls = Once()

    async def start(self, order: PeerStart) -> PeerProcess:
        """Start the peer process. A repeated call returns the result of the first one.

        Raises:
            PeerError: The forkserver is gone or did not fork.
        """
        return await self._calls.do("start", partial(self._start, order))

    async def _start(self, order: PeerStart) -> PeerProcess:
        devices = os.environ.get("CUDA_VISIBLE_DEVICES", "") if order.gpus else ""
        env = {"TMPDIR": order.temporary, "CUDA_VISIBLE_DEVICES": devices}
        self._owned.folder, self._log = order.temporary, Path(order.log)
        self._record = Path(order.temporary).with_suffix(RECORD_SUFFIX)
        self._owned.save(self._record)
        spec = order.spec.model_dump(mode="json", by_alias=True)
        request = json.dumps({"spec": spec, "log": order.log, "env": env})
        try:
            reader, self._writer = await asyncio.open_unix_connection(
                order.forkserver, limit=_LINE_LIMIT
            )
            self._writer.write(request.encode() + b"\n")
            await self._writer.drain()
            versions, hardware = machine.versions(), machine.hardware()  # while it forks
            line = await asyncio.wait_for(reader.readline(), _SPAWN_TIMEOUT)
            if not line.endswith(b"\n"):
                raise ConnectionResetError("it ended before it answered")
            first = events.load_event(line.decode())
        except (OSError, ValueError, asyncio.TimeoutError) as error:
            raise PeerError(f"the forkserver did not start {self.name}: {error!r}") from error
        if not isinstance(first, events.Spawned):
            raise PeerError(f"{self.name} began with {first.kind!r} instead of 'spawned'")
        pid = self._owned.leader = first.pid
        self._note()
        self._death = asyncio.create_task(_death_of(pid))
        reading = asyncio.create_task(self._read(reader))
        self._ending = asyncio.create_task(self._publish_end(self._death, reading))
        return PeerProcess(pid, os.uname().nodename, machine.boot_id(), versions, hardware)

    async def _read(self, reader: asyncio.StreamReader) -> None:
        """Publish the lines of the peer until its last descendant has closed the connection."""
        with contextlib.suppress(ConnectionError):
            while line := await reader.readline():
                text = line.decode(errors="replace").strip()
                if not text:
                    continue
                if _EXITED in text and (code := _exit_code(text)) is not None:
                    self._exit_code = code
                    return
                item = _stream_item(text)
                if item is None:
                    continue
                await self._publish(item)
                if isinstance(item, _RECORDED_AFTER):
                    self._note()

    async def _publish_end(self, death: asyncio.Task[None], reading: asyncio.Task[None]) -> None:
        """Publish the end of the peer after all its other items."""
        await death
        with contextlib.suppress(asyncio.TimeoutError):
            # The forkserver reaps at once, but it may be dead, and forks may hold the connection.
            await asyncio.wait_for(reading, _EXIT_CODE_TIMEOUT)
        await self._publish(Exited(self._exit_code, last_lines=tail(self._log, LAST_LINES)))

    async def _publish(self, item: StreamItem) -> None:
        async with self._news:
            self._items.append(item)
            self._news.notify_all()

    def _note(self) -> None:
        self._owned.note()
        if self._record is not None and self._record.parent.is_dir():
            self._owned.save(self._record)

    async def next_items(self, after: int, timeout: float) -> list[StreamItem]:
        """Return the items from number ``after`` on; wait for one if there is none yet.

        The events of a round are returned together, because a call costs milliseconds. The call
        confirms the arrival of the items before ``after``, and they are dropped here. The last item
        of a peer is :class:`Exited`. The list is empty if ``timeout`` seconds passed.
        """
        async with self._news:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(
                    self._news.wait_for(lambda: self._taken + len(self._items) > after), timeout
                )
                await asyncio.wait_for(self._news.wait_for(self._round_is_told), _FOLLOWED_WITHIN)
            del self._items[: max(0, after - self._taken)]
            self._taken = max(after, self._taken)
            return list(self._items)

    def _round_is_told(self) -> bool:
        """Return whether no further event of a round is to come at once."""
        return not self._items or not isinstance(self._items[-1], _FOLLOWED)

    async def command(self, command: Command, key: str) -> bool:
        """Send a command to the peer, once for each key.

        Args:
            command: The command.
            key: Key of the command; a repetition, sent because the first call may not have
                arrived, has the same key.

        Returns:
            Whether there was a running peer to send it to.
        """
        return await self._calls.do(key, lambda: self._command(command))

    async def _command(self, command: Command) -> bool:
        if self._writer is None or self._death is None or self._death.done():
            return False
        try:
            self._writer.write(command.model_dump_json().encode() + b"\n")
            await self._writer.drain()
        except ConnectionError:
            return False
        return True

    async def kill(self) -> None:
        """Kill the processes of the peer."""
        self._note()
        self._owned.signal(signal.SIGKILL)

    async def close(self) -> None:
        """Kill the remaining processes of the peer and close the connection."""
        if self._owned.leader:
            await self.kill()
            self._owned.note()
        if self._writer is not None:
            self._writer.close()


class PeerActor:
    """The actor: hosts a peer, and after its end the next one. Nothing of a peer is kept.

    Args:
        key: Key of the first peer, unique among all peers.
        name: Its name.
    """

    def __init__(self, key: str, name: str) -> None:
        self._key, self._peer = key, HostedPeer(name)

    async def open(self, key: str, name: str) -> None:
        """Host another peer from now on.

        Args:
            key: Key of the peer; a repeated call has the same one.
            name: Name of the peer.
        """
        if key != self._key:
            self._key, self._peer = key, HostedPeer(name)

    async def call(self, key: str, method: str, *args: Any) -> Any:
        """Call a method of the hosted peer.

        Args:
            key: Key of the peer. A late call for an earlier one must not reach this one.
            method: Name of the method.
            args: Its arguments.

        Raises:
            PeerError: The actor does not host the peer any more.
        """
        if key != self._key:
            raise PeerError(f"{key} is not here: this actor hosts {self._key}")
        step: Callable[..., Awaitable[Any]] = getattr(self._peer, method)
        return await step(*args)

    async def leave(self) -> None:
        """End the actor."""
        actors.leave()


@dataclass(frozen=True)
class PeerAt:
    """A peer on its actor, as its supervisor calls it.

    Attributes:
        actor: The actor.
        key: Key of the peer.
        node: Ray's id of the node.
        reusable: Whether the actor may host a peer of the next replicate.
    """

    actor: Any
    key: str
    node: str
    reusable: bool

    def call(
        self,
        method: Callable[Concatenate[HostedPeer, P], Awaitable[T]],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> Awaitable[T]:
        """Call a method of :class:`HostedPeer`."""
        answer: Awaitable[T] = self.actor.call.remote(self.key, method.__name__, *args, **kwargs)
        return answer


async def _death_of(pid: int) -> None:
    """Wait for the death of a process, which need not be a child of this one."""
    start = started(pid)
    try:
        pidfd = os.pidfd_open(pid)
    except (AttributeError, OSError):  # it has ended, or Python, kernel or sandbox has no pidfds
        while start is not None and started(pid) == start:
            await asyncio.sleep(_CHECK_EVERY)
        return
    loop, died = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(pidfd, died.set)
    try:
        await died.wait()
    finally:
        loop.remove_reader(pidfd)
        os.close(pidfd)


def _stream_item(text: str) -> StreamItem | None:
    """Return the item of one line; None for half a line, which a killed writer leaves."""
    try:
        return events.load_event(text)
    except ValueError as error:
        with contextlib.suppress(ValueError):
            json.loads(text)
            return Unreadable(str(error))
        return None


def _exit_code(text: str) -> int | None:
    """Return the exit code if ``text`` is the last line of the forkserver."""
    with contextlib.suppress(ValueError, TypeError, KeyError):
        message = json.loads(text)
        if message["kind"] == _EXITED:
            return int(message["exit_code"])
    return None
