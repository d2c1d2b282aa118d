"""What several kinds do: wait for processes and events, and start replacements."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal

from rayhive.errors import RayhiveError
from rayhive.events import Event
from rayhive.faults.kind import Effect, FaultKind, Group, Proof
from rayhive.faults.target import OTHER_NODE, FaultTarget, ProcessRole
from rayhive.spec import Model

#: Between two looks at processes on another node, which nothing announces [s].
LOOK_S = 0.1
#: How long the kernel may take to end or stop what got a signal, on a busy machine [s].
SETTLE_S = 5.0
#: How long it may take until the end of a node is known [s].
_NODE_S = 15.0
States = dict[int, str]


def require_living(swarm: FaultTarget, who: Sequence[str]) -> None:
    """Refuse to do something to a peer that is not there.

    Raises:
        RayhiveError: No life of one of ``who`` runs.
    """
    living = set(swarm.living())
    missing = [peer for peer in who if peer not in living]
    if missing:
        raise RayhiveError(f"no life of {', '.join(missing)} runs")


async def wait_for_states(
    swarm: FaultTarget,
    peer: str,
    reached: Callable[[States], bool],
    timeout: float,
    process: ProcessRole = "group",
) -> States:
    """Look at a peer's processes until they are as they should be, or ``timeout`` is over [s].

    Returns:
        What was seen last: whether it is as it should be is for the caller to say.
    """
    deadline = time.monotonic() + timeout
    while True:
        states = await swarm.process_states(peer, process)
        if reached(states) or time.monotonic() >= deadline:
            return states
        await asyncio.sleep(LOOK_S)


def all_are(state: str, pids: Sequence[int] = ()) -> Callable[[States], bool]:
    """Return whether every process is in ``state``; those of ``pids`` have to be among them."""

    def reached(states: States) -> bool:
        known = set(states) | set(pids)
        return bool(known) and all(states.get(pid) == state for pid in known)

    return reached


class Listening:
    """Waits for an event that may have come between the injection and the proof.

    Args:
        swarm: The swarm.
        kind: Kind of the event.
        who: Slots of which each is to send one after now.
    """

    def __init__(self, swarm: FaultTarget, kind: str, who: Sequence[str]) -> None:
        self._swarm, self._kind = swarm, kind
        self._before = {peer: swarm.last(kind, peer) for peer in who}

    async def heard(self, peer: str, timeout: float) -> Event | None:
        """Return the slot's first event since, or None if it does not come in time [s]."""
        last = self._swarm.last(self._kind, peer)
        if last is not None and last != self._before[peer]:
            return last
        return await self._swarm.event(self._kind, peer, timeout)


class ReplacedArgs(Model):
    """Parameters of a kind whose heal is a replacement.

    Attributes:
        where: Whether the replacement starts on the node of the dead or on another one.
    """

    where: Literal["same", "other"] = "same"


class EndsPeers(FaultKind):
    """A fault that ends lives of peers: the heal starts new ones."""

    group: ClassVar[Group] = "process"
    effect: ClassVar[Effect] = "gone"
    heals: ClassVar[bool] = True
    Args: ClassVar[type[Model]] = ReplacedArgs

    @classmethod
    def needs_for(cls, args: Mapping[str, Any]) -> tuple[str, ...]:
        """Return what it needs; of a replacement on another node, also that there is one."""
        return cls.needs if args.get("where", "same") == "same" else (*cls.needs, "nodes")

    async def heal(self, swarm: FaultTarget, who: Sequence[str]) -> dict[str, Any]:
        """Start a replacement of each."""

        async def start(peer: str) -> str:
            return await swarm.start(peer, OTHER_NODE if self.args.where == "other" else None)

        lives = await asyncio.gather(*(start(peer) for peer in who))
        return {"lives": dict(zip(who, lives, strict=True))}


async def leader_of(swarm: FaultTarget, peer: str) -> int:
    """Return the pid of the trainer of a living peer, by which its agent knows it.

    Raises:
        RayhiveError: It has none that runs.
    """
    states = await swarm.process_states(peer, "trainer")
    for pid, state in states.items():
        if state != "gone":
            return pid
    raise RayhiveError(f"no process of {peer} runs")


async def undo(swarm: FaultTarget, node: str, method: str, *args: Any) -> str | None:
    """Have an agent undo something; return why it can't, None if it did.

    An agent that is gone has undone what it did, or went with the whole node.
    """
    try:
        await swarm.agent(node, method, *args)
    except (RayhiveError, asyncio.TimeoutError) as error:
        return str(error) or "no answer"
    return None


async def nodes_gone(swarm: FaultTarget, peers: Mapping[str, Sequence[str]]) -> Proof:
    """See that the agents of ended nodes do not answer and that their peers are gone.

    Args:
        swarm: The swarm.
        peers: The peers that were on each node.
    """
    answers = dict(
        zip(peers, await asyncio.gather(*(_answers(swarm, node) for node in peers)), strict=True)
    )
    there = {peer for slots in peers.values() for peer in slots}
    deadline = time.monotonic() + _NODE_S
    while there & set(swarm.living()) and time.monotonic() < deadline:
        await asyncio.sleep(LOOK_S)
    alive = sorted(there & set(swarm.living()))
    return Proof(not alive and not any(answers.values()), {"answers": answers, "alive": alive})


async def _answers(swarm: FaultTarget, node: str) -> bool:
    try:
        await asyncio.wait_for(swarm.agent(node, "capabilities"), SETTLE_S)
    except (RayhiveError, asyncio.TimeoutError):
        return False
    return True


class EndsNodes(FaultKind):
    """A fault that ends nodes: the heal starts them, and on each the peers that it had.

    A node that nobody has healed by the end is started then: the next replicate needs it.
    """

    group: ClassVar[Group] = "node"
    targets: ClassVar[Literal["peer", "node"]] = "node"
    effect: ClassVar[Effect] = "gone"
    heals: ClassVar[bool] = True

    _peers: dict[str, list[str]]
    _ended: frozenset[str] = frozenset()

    async def end(self, swarm: FaultTarget) -> None:
        """End the nodes whose peers were noted."""

        async def end(node: str) -> None:
            await swarm.kill_node(node)
            self._ended |= {node}

        await asyncio.gather(*(end(node) for node in self._peers))

    async def heal(self, swarm: FaultTarget, who: Sequence[str]) -> dict[str, Any]:
        """Start the nodes, and on each the peers that it had."""
        lives = await revive(swarm, self._peers)
        self._ended = frozenset()
        return {"lives": lives}

    async def teardown(self, swarm: FaultTarget) -> None:
        """Start the nodes that are still down, without peers."""
        await asyncio.gather(*(swarm.start_node(node) for node in sorted(self._ended)))


async def revive(swarm: FaultTarget, peers: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Start nodes that were ended, and on each the peers that it had; return their new lives."""
    await asyncio.gather(*(swarm.start_node(node) for node in peers))
    places = [(peer, node) for node, slots in peers.items() for peer in slots]
    lives = await asyncio.gather(*(swarm.start(peer, node) for peer, node in places))
    return {peer: life for (peer, _), life in zip(places, lives, strict=True)}
