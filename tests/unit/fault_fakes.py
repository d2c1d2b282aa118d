"""A swarm for faults that has no swarm: peers are process groups of `sleep`, nodes are names.

Processes and the machine are acted on by a real Toolbox. The peer's own reactions (the ``left``
event, the detection of a dead child process) are played here.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import os
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import rayhive.faults.kinds
from rayhive.cluster.node import cgroups
from rayhive.cluster.node.link import NodeLink
from rayhive.cluster.node.process_group import RECORD_SUFFIX, OwnedProcesses
from rayhive.cluster.node.runs import Runs
from rayhive.cluster.node.tools import Toolbox
from rayhive.errors import RayhiveError
from rayhive.events import (
    Checkpoint,
    Event,
    Left,
    Notice,
    PeerFailed,
    Spawned,
    Transition,
    of_kind,
)
from rayhive.events.event import E
from rayhive.faults.kind import FaultKind, Proof
from rayhive.faults.node_tools import ArgsT, NodeTool, StateT, Verb
from rayhive.faults.target import ProcessRole
from rayhive.registry import FAULTS
from rayhive.spec.commands import FaultCommand, GiveNotice, WriteCheckpoint
from rayhive.spec.fault_plan import At, PlannedFault

KINDS = Path(rayhive.faults.kinds.__path__[0])
RUN = "study-t0-r0-x-a0"
ROLES = ("dht", "p2pd", "gradient_averager", "state_averager")
#: Prints the children's pids and ends, as a peer does, when one of them does.
_PEER = "for i in 1 2 3 4; do {} & echo $!; done; wait -n; exit 1"
_BUSY = "while :; do :; done >/dev/null"
#: States of the tools on a node on which nothing happens.
_DEAF: dict[str, Any] = {
    "cpu_limit": {"periods": 9, "throttled": 0, "throttled_s": 0.0},
    "memory_hog": {"pid": 1, "rss": 0, "free": 10**10},
    "small_disk": {"free": 4096, "error": None},
}


def planned(kind: str, who: Sequence[str] = ("peer-1",), **args: Any) -> FaultKind:
    fault = PlannedFault(id="f0", kind=kind, who=tuple(who), at=At(round=1), args=args)
    made: FaultKind = FAULTS.get(kind)(fault)
    return made


async def run(kind: FaultKind, swarm: FakeSwarm, who: Sequence[str] = ("peer-1",)) -> Proof:
    await kind.setup(swarm)
    await kind.inject(swarm, who)
    return await kind.verify(swarm, who)


def my_groups() -> list[Path]:
    """Return the control groups that this process made; others may be testing, too."""
    mine = f"{cgroups.PREFIX}{os.getpid()}."
    return [group for group in cgroups.made_here() if group.name.startswith(mine)]


def shorten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the time limits of proofs that are not going to hold."""
    for module in KINDS.glob("[a-z]*.py"):
        name = f"rayhive.faults.kinds.{module.stem}"
        for patience in ("SETTLE_S", "PATIENCE_S", "CHECKPOINT_S", "ROUND_S"):
            monkeypatch.setattr(f"{name}.{patience}", 0.3, raising=False)
    for patience in ("SETTLE_S", "CHILD_S", "NODE_S", "DELIVERY_S"):
        monkeypatch.setattr(f"rayhive.faults.ending.{patience}", 0.3)
    monkeypatch.setattr("rayhive.faults.steps.POLL_S", 0.01)


@dataclass
class Incarnation:
    name: str
    process: subprocess.Popen[str]
    roles: dict[str, int]
    node: str


@dataclass
class FakeSwarm:
    """Three peers on two nodes.

    Args:
        folder: Where the peers' records go.
        deaf: No request has an effect, and no error is reported.
        rude: Peers do not obey commands.
        busy: Peers use all the CPU time that they get.
        delivery_s: Time that a peer's answer to a command takes [s].
    """

    folder: Path
    deaf: bool = False
    rude: bool = False
    busy: bool = False
    delivery_s: float = 0.0
    runs: Runs = field(default_factory=Runs)
    expected: list[str] = field(default_factory=list)
    commands: list[tuple[str, FaultCommand]] = field(default_factory=list)
    signals: list[tuple[str, int]] = field(default_factory=list)
    drained: dict[str, float] = field(default_factory=dict)
    dead_nodes: set[str] = field(default_factory=set)
    restarts: list[str] = field(default_factory=list)
    log: list[Event] = field(default_factory=list)
    incarnations: dict[str, Incarnation] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.runs[RUN] = self.folder
        self.toolbox = Toolbox(self.runs, NodeLink())
        self._waiting: list[tuple[type[Event], str, asyncio.Future[Event]]] = []
        self._watches: list[asyncio.Task[None]] = []
        self._past: list[Incarnation] = []

    async def __aenter__(self) -> FakeSwarm:
        for number, node in enumerate(("node-0", "node-1", "node-1")):
            await self.start(f"peer-{number}", node)
        return self

    async def __aexit__(self, *_: object) -> None:
        for watch in self._watches:
            watch.cancel()
        for incarnation in [*self._past, *self.incarnations.values()]:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(incarnation.process.pid, signal.SIGKILL)
            incarnation.process.wait()
            assert incarnation.process.stdout is not None
            incarnation.process.stdout.close()

    def living(self) -> Sequence[str]:
        return [
            replica
            for replica, incarnation in self.incarnations.items()
            if incarnation.process.poll() is None
        ]

    def node_of(self, peer: str) -> str:
        return self.incarnations[peer].node

    async def nodes(self) -> Sequence[str]:
        return [node for node in ("node-0", "node-1") if node not in self.dead_nodes]

    def peers_on(self, node: str) -> Sequence[str]:
        return [peer for peer in self.living() if self.node_of(peer) == node]

    def role(self, name: str) -> str:
        return "peer-0"

    def expect_loss(self, peer: str) -> None:
        self.expected.append(self.incarnations[peer].name)

    async def signal(self, peer: str, signum: int, process: ProcessRole = "group") -> list[int]:
        if self.deaf:
            return list(await self.process_states(peer, process))
        incarnation = self.incarnations[peer]
        self.signals.append((peer, signum))
        if signum in (signal.SIGKILL, signal.SIGTERM) and incarnation.name not in self.expected:
            raise AssertionError(f"{incarnation.name} is ended, but its loss is not expected")
        owned = self.runs.peer(RUN, incarnation.process.pid)
        return owned.signal(signum, self._pids(incarnation, process))

    async def process_states(self, peer: str, process: ProcessRole = "group") -> dict[int, str]:
        incarnation = self.incarnations[peer]
        incarnation.process.poll()  # a zombie counts as gone, but let it go
        owned = self.runs.peer(RUN, incarnation.process.pid)
        return owned.states(self._pids(incarnation, process))

    def _pids(self, incarnation: Incarnation, process: ProcessRole) -> list[int] | None:
        return None if process == "group" else [incarnation.roles[process]]

    async def command(self, peer: str, command: FaultCommand) -> None:
        self.commands.append((peer, command))
        if self.deaf or self.rude:
            return
        if isinstance(command, WriteCheckpoint):
            self._checkpoint(peer)
            return
        told: list[Event] = [Left(round=7, handed_over=64, lost=0)]
        if isinstance(command, GiveNotice):
            told.insert(0, Notice(deadline_s=command.deadline_s))
        for event in told:
            if self.delivery_s:
                loop = asyncio.get_running_loop()
                loop.call_later(self.delivery_s, self.say, peer, event)
            else:
                self.say(peer, event)
        os.killpg(self.incarnations[peer].process.pid, signal.SIGKILL)
        self.incarnations[peer].process.wait()

    def _checkpoint(self, peer: str) -> None:
        """Play a peer that writes a checkpoint, reports the result, and trains on."""
        folder = self.folder / self.incarnations[peer].name.replace(".", "-") / "checkpoints"
        error = None
        try:
            (folder / "last.ckpt").write_bytes(bytes(65536))
        except OSError as caught:
            error = errno.errorcode[caught.errno or 0]
        written = Checkpoint(ok=error is None, error=error)
        self._watches.append(asyncio.create_task(self._train_on(peer, written)))

    async def _train_on(self, peer: str, first: Event) -> None:
        """Play a peer that reports ``first``, then one round after the other."""
        await asyncio.sleep(0.02)
        self.say(peer, first)
        for number in itertools.count(8):
            await asyncio.sleep(0.02)
            self.say(peer, Transition(round=number, seconds=0.02))

    async def start(self, peer: str, node: str | None = None) -> str:
        old = self.incarnations.get(peer)
        if old is not None and old.process.poll() is None:
            raise RayhiveError(f"{peer} lives")
        where = node or (old.node if old else "node-1")
        if where == "other":
            others = [n for n in ("node-0", "node-1") if old is None or n != old.node]
            where = min(others, key=lambda n: len(self.peers_on(n)))
        if where in self.dead_nodes:
            raise RayhiveError(f"{where} is dead")
        number = (
            1 + sum(incarnation.name.startswith(peer) for incarnation in self._past) if old else 0
        )
        name = f"{peer}.{number}" if number else peer
        if old is not None:
            self._past.append(old)
        process = subprocess.Popen(
            ["bash", "-c", _PEER.format(_BUSY if self.busy else "sleep 300")],
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert process.stdout is not None
        pids = [int(process.stdout.readline()) for _ in ROLES]
        roles = {"trainer": process.pid, **dict(zip(ROLES, pids, strict=True))}
        self.incarnations[peer] = Incarnation(name, process, roles, where)
        own = self.folder / name.replace(".", "-")
        own.mkdir()
        owned = OwnedProcesses(leader=process.pid, folder=str(own))
        owned.note()
        owned.save(own.with_suffix(RECORD_SUFFIX))
        self.say(peer, Spawned(pid=process.pid))
        self._watches.append(asyncio.create_task(self._watch(peer, self.incarnations[peer])))
        return name

    async def _watch(self, peer: str, incarnation: Incarnation) -> None:
        """Play the peer that sees a process of its own die, and ends."""
        while (code := incarnation.process.poll()) is None:
            await asyncio.sleep(0.01)
        if code == 1:
            self.say(peer, PeerFailed(error="PeerProcessDied('p2pd died')", traceback=""))
            with contextlib.suppress(ProcessLookupError):
                os.killpg(incarnation.process.pid, signal.SIGKILL)

    async def use_tool(
        self,
        node: str,
        tool: NodeTool[ArgsT, StateT],
        subject: str,
        verb: Verb,
        args: ArgsT | None = None,
    ) -> StateT | None:
        if not await self.answers(node):
            raise RayhiveError(f"the agent of {node} is gone")
        if self.deaf and tool.name in _DEAF:
            return None if verb == "stop" else tool.state.model_validate(_DEAF[tool.name])
        given = None if args is None else args.model_dump(mode="json", by_alias=True)
        answer = await self.toolbox.use(RUN, tool.name, subject, verb, given)
        return None if answer is None else tool.state.model_validate(answer)

    async def answers(self, node: str) -> bool:
        return node not in self.dead_nodes

    async def drain(self, node: str, notice_s: float) -> None:
        self.drained[node] = notice_s

    async def kill_node(self, node: str) -> None:
        if self.deaf:
            return
        for peer in self.peers_on(node):
            os.killpg(self.incarnations[peer].process.pid, signal.SIGKILL)
            self.incarnations[peer].process.wait()
        self.dead_nodes.add(node)

    async def start_node(self, node: str) -> None:
        if node in self.dead_nodes:
            self.dead_nodes.remove(node)
            self.restarts.append(node)

    async def event(
        self,
        record: type[E],
        peer: str,
        timeout: float,
        *,
        count: int = 1,
        fault: str | None = None,
    ) -> E | None:
        assert count == 1 and fault is None, "the events of one fault are not played here"
        future: asyncio.Future[Event] = asyncio.get_running_loop().create_future()
        self._waiting.append((record, peer, future))
        try:
            event = await asyncio.wait_for(future, min(timeout, 0.3) if self.deaf else timeout)
        except asyncio.TimeoutError:
            return None
        assert isinstance(event, record)
        return event

    def last(self, record: type[E], peer: str) -> E | None:
        for event in of_kind(reversed(self.log), record):
            if str(event.peer).partition(".")[0] == peer:
                return event
        return None

    def say(self, peer: str, event: Event) -> None:
        """Take an event of the present incarnation of a replica."""
        event = event.of_peer(self.incarnations[peer].name)
        self.log.append(event)
        for wanted, replica, future in self._waiting:
            if isinstance(event, wanted) and replica == peer and not future.done():
                future.set_result(event)
