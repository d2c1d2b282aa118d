"""Bases and parts of the kinds that end peers or nodes: notice, end, replacement."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from rayhive.events import Left, Notice, PeerFailed
from rayhive.faults.kind import FaultKind, Proof, Record, Targets
from rayhive.faults.steps import (
    SETTLE_S,
    Listening,
    all_are,
    end_processes,
    for_each,
    poll,
    wait_for_states,
)
from rayhive.faults.target import OTHER_NODE, FaultTarget, ProcessRole
from rayhive.spec import Model
from rayhive.spec.commands import GiveNotice

#: Time limit for a peer to end by itself after a child process was killed [s].
CHILD_S = 20.0
#: Longest way of an event from a peer to the supervisor [s].
DELIVERY_S = 5.0
#: Time that the end of a node may take to be known [s].
NODE_S = 15.0


class ReplacedArgs(Model):
    """Parameters of a kind whose heal starts a replacement.

    Attributes:
        where: ``same`` starts the replacement on the node of the ended peer, ``other`` on another.
    """

    where: Literal["same", "other"] = "same"


class EndsPeers(FaultKind):
    """A fault that ends incarnations of peers. The heal starts new ones."""

    group = "process"
    effect = "gone"
    heals = True
    args: ReplacedArgs

    @classmethod
    def needs_for(cls, args: Mapping[str, Any]) -> tuple[str, ...]:
        """Return ``needs``, and ``nodes`` if the replacement starts on another node."""
        return cls.needs if args.get("where", "same") == "same" else (*cls.needs, "nodes")

    async def heal(self, swarm: FaultTarget, targets: Targets) -> Record:
        """Start a replacement of each peer."""
        node = OTHER_NODE if self.args.where == "other" else None
        return {"lives": await for_each(targets, lambda peer: swarm.start(peer, node))}


class EndsNodes(FaultKind):
    """A fault that ends nodes. The heal starts them, and on each the peers that it had.

    A node that was not healed is started by the teardown: the next replicate needs it.
    """

    group = "node"
    target_type = "node"
    effect = "gone"
    heals = True

    #: Replicas on each node that the fault ends; recorded by ``inject``.
    _peers: dict[str, list[str]]
    _ended: frozenset[str] = frozenset()

    async def end(self, swarm: FaultTarget) -> None:
        """End the nodes whose peers ``inject`` recorded."""

        async def end(node: str) -> None:
            self._ended |= {node}  # also of an end that is cut off half way
            await swarm.kill_node(node)

        await for_each(self._peers, end)

    async def gone(self, swarm: FaultTarget) -> Proof:
        """Check that the agents of the nodes do not answer and that their peers are gone."""

        async def answers(node: str) -> bool:
            try:
                return await asyncio.wait_for(swarm.answers(node), SETTLE_S)
            except asyncio.TimeoutError:
                return False

        async def alive() -> list[str]:
            return sorted(ended & set(swarm.living()))

        found = await for_each(self._peers, answers)
        ended = {peer for replicas in self._peers.values() for peer in replicas}
        left = await poll(alive, lambda names: not names, NODE_S)
        return Proof(not left and not any(found.values()), {"answers": found, "alive": left})

    async def heal(self, swarm: FaultTarget, targets: Targets) -> Record:
        """Start the nodes, and on each the peers that it had."""
        await for_each(self._peers, swarm.start_node)
        home = {peer: node for node, replicas in self._peers.items() for peer in replicas}
        names = await for_each(home, lambda peer: swarm.start(peer, home[peer]))
        self._ended = frozenset()
        return {"lives": names}

    async def teardown(self, swarm: FaultTarget) -> None:
        """Start the nodes that are still down, without peers."""
        await for_each(sorted(self._ended), swarm.start_node)


class ChildProcessKill:
    """Kills one process that a peer cannot train without: the peer has to detect it and end.

    Args:
        process: The process to kill.
    """

    def __init__(self, process: ProcessRole) -> None:
        self._process = process

    async def inject(self, swarm: FaultTarget, targets: Targets) -> Record:
        """Send SIGKILL to the process."""
        self._failed = Listening(swarm, PeerFailed, targets)
        self._began = time.monotonic()
        self._hit = await end_processes(swarm, targets, signal.SIGKILL, self._process)
        return {"process": self._process, "pids": self._hit}

    async def verify(self, swarm: FaultTarget, targets: Targets) -> Proof:
        """Check that the process is gone, and that its peer reported it and ended."""
        ok = True

        async def check(peer: str) -> Record:
            nonlocal ok
            hit, gone = self._hit[peer], all_are("gone", self._hit[peer])
            one = gone(await wait_for_states(swarm, peer, gone, SETTLE_S, self._process))
            event = await self._failed.heard(peer, CHILD_S)
            whole = gone(await wait_for_states(swarm, peer, gone, SETTLE_S))
            ok = ok and bool(hit) and one and whole and event is not None
            return {
                "process_gone": one,
                "peer_gone": whole,
                "error": None if event is None else event.error,
                "seconds": round(time.monotonic() - self._began, 3),
            }

        what = await for_each(targets, check)
        return Proof(ok, what)


class Preemption:
    """Notice to peers of their end, and signals to peers that outlive the deadline.

    Args:
        swarm: The swarm.
        peers: The replicas.
        notice_s: Time between the notice and SIGTERM [s].
        grace_s: Time between SIGTERM and SIGKILL [s].
    """

    def __init__(
        self, swarm: FaultTarget, peers: Sequence[str], notice_s: float, grace_s: float
    ) -> None:
        self._swarm, self._peers = swarm, peers
        self._notice_s, self._grace_s = notice_s, grace_s
        self._noticed = Listening(swarm, Notice, peers)
        self._left = Listening(swarm, Left, peers)

    async def give_notice(self) -> None:
        """Send the notice to every peer; their end is expected from now on."""
        for peer in self._peers:
            self._swarm.expect_loss(peer)
        states = await for_each(self._peers, self._swarm.process_states)
        self._gone = {
            peer: all_are("gone", [pid for pid, state in seen.items() if state != "gone"])
            for peer, seen in states.items()
        }
        self._began = time.monotonic()
        if self._notice_s > 0:
            notice = GiveNotice(deadline_s=self._notice_s)
            await for_each(self._peers, lambda peer: self._swarm.command(peer, notice))

    async def end(self) -> dict[str, dict[str, Any]]:
        """Wait until every peer is gone; from the deadline on, send signals.

        Returns:
            For each peer ``noticed`` (whether it confirmed the notice; None without notice),
            ``left`` (fields of its ``left`` event, None if it sent none), ``by`` (``itself``,
            ``SIGTERM`` or ``SIGKILL``), ``gone`` and ``seconds`` (since the notice).
        """
        return await for_each(self._peers, self._end)

    async def _end(self, peer: str) -> Record:
        noticed, left, gone = None, None, self._gone[peer]
        if self._notice_s > 0:
            noticed = await self._noticed.heard(peer, self._remaining())
            left = await self._left.heard(peer, self._remaining())
        by = "itself"
        states = await wait_for_states(self._swarm, peer, gone, self._remaining())
        for number, patience in ((signal.SIGTERM, self._grace_s), (signal.SIGKILL, SETTLE_S)):
            if gone(states):
                break
            by = number.name
            await self._swarm.signal(peer, number)
            states = await wait_for_states(self._swarm, peer, gone, patience)
        if self._notice_s > 0:
            # events that the peer sent in time may arrive after the deadline of a short notice
            noticed = noticed or await self._noticed.heard(peer, DELIVERY_S)
            left = left or await self._left.heard(peer, 0.0)
        return {
            "noticed": None if self._notice_s == 0 else noticed is not None,
            "left": handed_over(left),
            "by": by,
            "gone": gone(states),
            "seconds": round(time.monotonic() - self._began, 3),
        }

    async def wait_for_deadline(self) -> None:
        """Wait for the deadline."""
        await asyncio.sleep(self._remaining())

    def _remaining(self) -> float:
        return max(0.0, self._began + self._notice_s - time.monotonic())


def handed_over(event: Left | None) -> dict[str, int | None] | None:
    """Return the fields of a ``left`` event for a proof; None without an event."""
    if event is None:
        return None
    return {"round": event.round, "handed_over": event.handed_over, "lost": event.lost}
