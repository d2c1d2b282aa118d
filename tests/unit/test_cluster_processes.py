"""The forkserver's keeper and the peer's actor without Ray, and what importing them costs."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from rayhive.cluster.node import forkserver_manager, machine
from rayhive.cluster.node.forkserver_manager import ForkserverManager, tail
from rayhive.cluster.node.process_group import records
from rayhive.cluster.node.processes import started
from rayhive.cluster.replicate import peer_actor
from rayhive.cluster.replicate.peer_actor import (
    Exited,
    HostedPeer,
    PeerProcess,
    PeerStart,
    StreamItem,
)
from rayhive.errors import PeerError
from rayhive.events import DHTReady, Event, PeerReady, Round, Spawned, Transition, Weights
from rayhive.spec.commands import Shutdown, Start, Train
from tests.integration.cluster_harness import FAKE_FORKSERVER, replicate

Body = Callable[[PeerProcess, HostedPeer], Coroutine[Any, Any, None]]


@pytest.fixture
def folder() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="rht-", dir="/tmp"))
    yield path
    shutil.rmtree(path)


def with_peer(folder: Path, body: Body, **settings: Any) -> None:
    """Run ``body`` with a started peer and its actor."""

    async def run() -> None:
        keeper = ForkserverManager(folder, FAKE_FORKSERVER)
        actor = HostedPeer("peer-0")
        try:
            forkserver = await keeper.ensure()
            own = folder / "p0"
            own.mkdir()
            spec = replicate(folder, **settings).peer_spec(0)
            log = str(folder / "peer-0.log")
            process = await actor.start(PeerStart(spec, forkserver, log, str(own), gpus=False))
            assert started(process.pid)
            await body(process, actor)
        finally:
            await actor.close()
            await keeper.end()
            for _, owned in records(folder):
                owned.remove()

    asyncio.run(run())


async def until(actor: HostedPeer, kind: type[StreamItem], taken: int = 0) -> list[Any]:
    """Return items up to the first of this type."""
    found: list[Any] = []
    while not any(isinstance(item, kind) for item in found):
        new = await actor.next_items(taken + len(found), 10.0)
        assert new, f"no {kind} after {found}"
        found += new
    return found


def test_commands_go_in_and_events_come_out_once(folder: Path) -> None:
    async def body(process: PeerProcess, actor: HostedPeer) -> None:
        assert await actor.next_items(0, 0.05) == []
        assert await actor.command(Start(), "1")
        first = await until(actor, PeerReady)
        assert isinstance(first[0], DHTReady)
        assert await actor.next_items(len(first), 0.05) == []
        assert await actor.next_items(0, 0.05) == []  # what arrived is forgotten
        for command in (Train(), Shutdown()):
            await actor.command(command, command.do)
        rest = await until(actor, Exited, len(first))
        assert rest[-1].exit_code == 0
        assert [item.round for item in rest if isinstance(item, Round)] == [1, 2, 3]
        assert not await actor.command(Train(), "3")

    with_peer(folder, body, rounds=3)


def test_the_events_of_a_round_come_in_one_call(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the second round only the first event comes, and is returned after a while."""
    monkeypatch.setattr(peer_actor, "_FOLLOWED_WITHIN", 0.2)
    events: list[Event] = [
        Round(round=1, samples=8, outcome="averaged"),
        Transition(round=1, seconds=1.0),
        Weights(round=1, sketch=[0.0], finite=True),
        Round(round=2, samples=8, outcome="averaged"),
    ]

    async def body() -> None:
        sleeper = await asyncio.create_subprocess_exec("sleep", "60", start_new_session=True)
        actor = HostedPeer("peer-0")

        async def forkserver(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readline()
            for event in (Spawned(pid=sleeper.pid), *events):
                writer.write(event.model_dump_json().encode() + b"\n")
                await asyncio.sleep(0.02)

        async with await asyncio.start_unix_server(forkserver, folder / "z"):
            spec = replicate(folder).peer_spec(0)
            order = PeerStart(spec, str(folder / "z"), "", str(folder / "p0"), gpus=False)
            try:
                await actor.start(order)
                for taken, expected in ((0, events[:3]), (3, events[3:])):
                    found = await actor.next_items(taken, 10.0)
                    assert [type(item) for item in found] == [type(event) for event in expected]
            finally:
                sleeper.kill()
                await actor.close()
                await sleeper.wait()

    asyncio.run(body())


def test_a_death_is_reported_with_its_signal_and_the_last_lines(folder: Path) -> None:
    async def body(process: PeerProcess, actor: HostedPeer) -> None:
        assert await actor.command(Start(), "1")
        taken = len(await until(actor, PeerReady))
        await actor.kill()
        end = (await until(actor, Exited, taken))[-1]
        assert end.exit_code == -signal.SIGKILL
        assert end.last_lines == "the last words"

    with_peer(folder, body, says="the last words")


def test_a_peer_process_tells_the_machine_that_it_is_on(folder: Path) -> None:
    async def body(process: PeerProcess, actor: HostedPeer) -> None:
        assert process.hardware == machine.hardware()
        assert process.versions == machine.versions()

    with_peer(folder, body)


@pytest.mark.parametrize("code", [None, errno.ENOSYS, errno.EPERM])
def test_a_peer_is_followed_without_pidfds(
    folder: Path, monkeypatch: pytest.MonkeyPatch, code: int | None
) -> None:
    """Of a Python without them, of a kernel before 5.3, and of a container that forbids them."""

    def refused(pid: int, flags: int = 0) -> int:
        assert code is not None
        raise OSError(code, os.strerror(code))

    if code is None:
        monkeypatch.delattr(os, "pidfd_open")
    else:
        monkeypatch.setattr(os, "pidfd_open", refused)

    async def body(process: PeerProcess, actor: HostedPeer) -> None:
        assert await actor.command(Start(), "1")
        taken = len(await until(actor, PeerReady))
        await actor.kill()
        assert (await until(actor, Exited, taken))[-1].exit_code == -signal.SIGKILL

    with_peer(folder, body)


def test_a_death_is_reported_without_an_exit_code_while_forks_hold_the_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_FORKSERVER_IS_SILENT", "1")

    async def body(process: PeerProcess, actor: HostedPeer) -> None:
        await actor.command(Start(), "4")
        taken = len(await until(actor, PeerReady))
        os.kill(process.pid, signal.SIGKILL)  # the peer alone: its fork lives on
        assert (await until(actor, Exited, taken))[-1].exit_code is None

    with_peer(folder, body)


def test_a_forkserver_that_ends_is_replaced_and_a_failed_start_is_reported(folder: Path) -> None:
    async def run() -> None:
        keeper = ForkserverManager(folder, FAKE_FORKSERVER)
        first = await keeper.ensure()
        pid = keeper.pid
        assert pid is not None and await keeper.ensure() == first and keeper.pid == pid
        os.kill(pid, signal.SIGKILL)
        while keeper.pid is not None:
            await asyncio.sleep(0.01)
        assert await keeper.ensure() != first and keeper.pid not in (None, pid)
        await keeper.end()
        assert keeper.pid is None

        broken = ForkserverManager(
            folder, [sys.executable, "-c", "raise SystemExit('no torch here')"]
        )
        with pytest.raises(PeerError, match="no torch here"):
            await broken.ensure()

    asyncio.run(run())


def test_a_forkserver_that_never_serves_is_given_up(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forkserver_manager, "READY_TIMEOUT", 0.3)
    keeper = ForkserverManager(folder, [sys.executable, "-c", "import sys; sys.stdin.read()"])
    with pytest.raises(PeerError, match="not ready after"):
        asyncio.run(keeper.ensure())


def test_a_peer_cannot_start_without_its_forkserver(folder: Path) -> None:
    async def run() -> None:
        own = folder / "p0"
        own.mkdir()
        with pytest.raises(PeerError, match="did not start peer-0"):
            spec = replicate(folder).peer_spec(0)
            order = PeerStart(spec, str(folder / "none"), "log", str(own), gpus=False)
            await HostedPeer("peer-0").start(order)

    asyncio.run(run())


def test_a_forkserver_that_ends_during_a_start_is_named_as_the_reason(folder: Path) -> None:
    async def run() -> None:
        own, place = folder / "p0", str(folder / "server.sock")
        own.mkdir()

        async def end(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readline()
            writer.close()

        async with await asyncio.start_unix_server(end, place):
            spec = replicate(folder).peer_spec(0)
            order = PeerStart(spec, place, "log", str(own), gpus=False)
            with pytest.raises(PeerError, match=r"did not start peer-0.*it ended before"):
                await HostedPeer("peer-0").start(order)

    asyncio.run(run())


def test_the_forkserver_has_the_paths_of_its_owner_and_nothing_of_ray(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("RAY_SECRET", "x")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.syspath_prepend(str(tmp_path))
    environment = forkserver_manager.forkserver_environment()
    assert not [name for name in environment if name.startswith(("RAY_", "OMP_NUM"))]
    assert environment["PYTHONPATH"].split(os.pathsep)[0] == str(tmp_path)


def test_the_end_of_a_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert "empty" in tail(log)
    log.write_text("".join(f"line {number}\n" for number in range(100)))
    assert tail(log, 2) == "line 98\nline 99"


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("rayhive.cluster", ["ray", "torch"]),
        ("rayhive.cluster.replicate.supervisor", ["torch", "hivemind", "lightning", "optuna"]),
        ("rayhive.cluster.node.agent", ["torch", "hivemind", "lightning", "optuna"]),
        ("rayhive.cluster.node.process_group", ["ray", "pydantic"]),
    ],
)
def test_processes_that_start_often_import_little(module: str, absent: list[str]) -> None:
    code = f"import sys, {module}; print([m for m in {absent!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
