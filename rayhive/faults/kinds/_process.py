"""Shared steps of kinds on processes and nodes: polling, listening, replacements."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal, TypeVar

from rayhive.errors import RayhiveError
from rayhive.events import Event
from rayhive.events.supervisor import FaultEffect
from rayhive.faults.kind import FaultKind, Group, Proof
from rayhive.faults.node_tools import ToolHandle
from rayhive.faults.target import OTHER_NODE, FaultTarget, ProcessRole
from rayhive.spec import Model

#: Polling interval for state on another node, which sends no notification [s].
POLL_S = 0.1
#: Time that the kernel may take to deliver a signal on a busy machine [s].
SETTLE_S = 5.0
#: Time that the end of a node may take to be known [s].
_NODE_S = 15.0
States = dict[int, str]
T = TypeVar("T")


def require_living(swarm: FaultTarget, targets: Sequence[str]) -> None:
    """Refuse a fault on a replica that has no running incarnation.

    Raises:
        RayhiveError: One of ``targets`` has none.
    """
    living = set(swarm.living())
    missing = [peer for peer in targets if peer not in living]
    if missing:
        raise RayhiveError(f"no process of {', '.join(missing)} runs")


async def poll(read: Callable[[], Awaitable[T]], reached: Callable[[T], bool], timeout: float) -> T:
    """Read a state until ``reached`` accepts it or ``timeout`` seconds are over.

    Returns:
        The last state, which ``reached`` may not accept.
    """
    deadline = time.monotonic() + timeout
    while True:
        state = await read()
        if reached(state) or time.monotonic() >= deadline:
            return state
        await asyncio.sleep(POLL_S)


async def wait_for_states(
    swarm: FaultTarget,
    peer: str,
    reached: Callable[[States], bool],
    timeout: float,
    process: ProcessRole = "group",
) -> States:
    """Poll the states of a peer's processes; see :func:`poll`."""
    return await poll(lambda: swarm.process_states(peer, process), reached, timeout)


def all_are(state: str, pids: Sequence[int] = ()) -> Callable[[States], bool]:
    """Return a test that every process, the given ``pids`` among them, is in ``state``."""

    def reached(states: States) -> bool:
        known = set(states) | set(pids)
        return bool(known) and all(states.get(pid) == state for pid in known)

    return reached


class Listening:
    """Waits for an event that may have come between the injection and the proof.

    Args:
        swarm: The swarm.
        kind: Kind of the event.
        targets: Replicas, each of which is expected to send one after now.
    """

    def __init__(self, swarm: FaultTarget, kind: str, targets: Sequence[str]) -> None:
        self._swarm, self._kind = swarm, kind
        self._before = {peer: swarm.last(kind, peer) for peer in targets}

    async def heard(self, peer: str, timeout: float) -> Event | None:
        """Return the replica's first event since then, or None after ``timeout`` seconds."""
        last = self._swarm.last(self._kind, peer)
        if last is not None and last != self._before[peer]:
            return last
        return await self._swarm.event(self._kind, peer, timeout)


class ReplacedArgs(Model):
    """Parameters of a kind whose heal starts a replacement.

    Attributes:
        where: ``same`` starts the replacement on the node of the ended peer, ``other`` on another.
    """

    where: Literal["same", "other"] = "same"


class EndsPeers(FaultKind):
    """A fault that ends incarnations of peers. The heal starts new ones."""

    group: ClassVar[Group] = "process"
    effect: ClassVar[FaultEffect] = "gone"
    heals: ClassVar[bool] = True
    Args: ClassVar[type[Model]] = ReplacedArgs

    @classmethod
    def needs_for(cls, args: Mapping[str, Any]) -> tuple[str, ...]:
        """Return ``needs``, and ``nodes`` if the replacement starts on another node."""
        return cls.needs if args.get("where", "same") == "same" else (*cls.needs, "nodes")

    async def heal(self, swarm: FaultTarget, targets: Sequence[str]) -> dict[str, Any]:
        """Start a replacement of each peer."""

        async def start(peer: str) -> str:
            return await swarm.start(peer, OTHER_NODE if self.args.where == "other" else None)

        names = await asyncio.gather(*(start(peer) for peer in targets))
        return {"lives": dict(zip(targets, names, strict=True))}


async def leader_of(swarm: FaultTarget, peer: str) -> str:
    """Return the pid of a living peer's trainer, as the subject of a node tool.

    Raises:
        RayhiveError: No such process runs.
    """
    states = await swarm.process_states(peer, "trainer")
    for pid, state in states.items():
        if state != "gone":
            return str(pid)
    raise RayhiveError(f"no trainer process of {peer} runs")


async def stop_all(tools: Mapping[str, ToolHandle[Any, Any]]) -> dict[str, str]:
    """Stop tools, by the name of their target; return the reason of each that cannot be stopped.

    The end of an agent or a node has already undone the effect of its tools.
    """
    failed = {}
    for name, tool in tools.items():
        try:
            await tool.stop()
        except (RayhiveError, asyncio.TimeoutError) as error:
            failed[name] = str(error) or "no answer"
    return failed


async def nodes_gone(swarm: FaultTarget, peers: Mapping[str, Sequence[str]]) -> Proof:
    """Check that the agents of ended nodes do not answer and that their peers are gone.

    Args:
        swarm: The swarm.
        peers: Replicas that were on each node.
    """
    answers = dict(
        zip(peers, await asyncio.gather(*(_answers(swarm, node) for node in peers)), strict=True)
    )
    ended = {peer for replicas in peers.values() for peer in replicas}

    async def alive() -> list[str]:
        return sorted(ended & set(swarm.living()))

    left = await poll(alive, lambda names: not names, _NODE_S)
    return Proof(not left and not any(answers.values()), {"answers": answers, "alive": left})


async def _answers(swarm: FaultTarget, node: str) -> bool:
    try:
        return await asyncio.wait_for(swarm.answers(node), SETTLE_S)
    except asyncio.TimeoutError:
        return False


class EndsNodes(FaultKind):
    """A fault that ends nodes. The heal starts them, and on each the peers that it had.

    A node that was not healed is started by the teardown: the next replicate needs it.
    """

    group: ClassVar[Group] = "node"
    target_type: ClassVar[Literal["peer", "node"]] = "node"
    effect: ClassVar[FaultEffect] = "gone"
    heals: ClassVar[bool] = True

    _peers: dict[str, list[str]]
    _ended: frozenset[str] = frozenset()

    async def end(self, swarm: FaultTarget) -> None:
        """End the nodes whose peers ``inject`` recorded."""

        async def end(node: str) -> None:
            await swarm.kill_node(node)
            self._ended |= {node}

        await asyncio.gather(*(end(node) for node in self._peers))

    async def heal(self, swarm: FaultTarget, targets: Sequence[str]) -> dict[str, Any]:
        """Start the nodes, and on each the peers that it had."""
        await asyncio.gather(*(swarm.start_node(node) for node in self._peers))
        places = [(peer, node) for node, replicas in self._peers.items() for peer in replicas]
        names = await asyncio.gather(*(swarm.start(peer, node) for peer, node in places))
        self._ended = frozenset()
        return {"lives": {peer: name for (peer, _), name in zip(places, names, strict=True)}}

    async def teardown(self, swarm: FaultTarget) -> None:
        """Start the nodes that are still down, without peers."""
        await asyncio.gather(*(swarm.start_node(node) for node in sorted(self._ended)))
