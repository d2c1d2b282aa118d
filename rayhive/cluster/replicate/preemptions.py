"""Real preemption notices during a replicate: from the nodes' agents to the peers."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable

from rayhive.cluster.node import raylets
from rayhive.cluster.node.agent import NodeAgent
from rayhive.cluster.node.notices.base import NodeNotice
from rayhive.cluster.replicate.node_agents import ANSWER_TIMEOUT, NodeAgents
from rayhive.cluster.replicate.peer_table import PeerTable
from rayhive.cluster.replicate.swarm import Swarm
from rayhive.errors import ClusterError
from rayhive.events import Event, NodeNoticed
from rayhive.spec.commands import GiveNotice, Leave
from rayhive.spec.study import PreemptionConfig

#: Wait of an agent for a notice [s]; shorter than the longest wait for its answer.
_POLL_S = ANSWER_TIMEOUT / 2
_RETRY_S = 5.0
#: Longest time for which a lost replicate waits for the end of the supervisor's own node, and the
#: time that the node has for its end after the deadline [s].
_LONGEST_HOLD_S, _AFTER_S = 180.0, 15.0


class Preemptions:
    """Passes the real notices about nodes to the peers there, like those that a fault injects.

    Args:
        config: The reaction that the study asks for.
        swarm: The peers.
        agents: Agents of the nodes; each is followed from its first use on.
        peer_table: State of the peers.
        write: Receives the events.
        changed: Called after each notice.
        home: Ray's id of the supervisor's node.

    Attributes:
        cause: Description of the first certain notice; None without one.
        own_drains: Ids of nodes that this replicate drains, because of a fault or of a notice of a
            cloud; their drain is no further notice.
    """

    def __init__(
        self,
        config: PreemptionConfig,
        swarm: Swarm,
        agents: NodeAgents,
        peer_table: PeerTable,
        write: Callable[[Event], None],
        changed: Callable[[], None],
        home: str,
    ) -> None:
        self.cause: str | None = None
        self.own_drains: set[str] = set()
        self._config, self._swarm, self._agents = config, swarm, agents
        self._peer_table, self._write, self._changed = peer_table, write, changed
        self._home, self._hold_until = home, 0.0
        self._tasks: dict[str, asyncio.Task[None]] = {}
        if config.sources:
            agents.on_agent = self._start

    def _start(self, node: str) -> None:
        if node not in self._tasks:
            self._tasks[node] = asyncio.ensure_future(self._follow(node))

    async def _follow(self, node: str) -> None:
        """Take the notices about one node, as long as its agent answers."""
        taken = 0
        while True:
            try:
                found = await self._agents.call(node, NodeAgent.notices, taken, _POLL_S)
            except ClusterError:  # the node is gone, or cut off for a while
                if node not in await asyncio.to_thread(raylets.alive):
                    return
                await asyncio.sleep(_RETRY_S)
                continue
            taken += len(found)
            for notice in found:
                await self._take(node, notice)

    async def _take(self, node: str, notice: NodeNotice) -> None:
        if notice.source == "ray" and node in self.own_drains:
            return
        # the replicate needs the supervisor's node, which cannot be avoided for a risk
        risk = self._config.on_risk == "leave" and node != self._home
        leaving = notice.certain or risk
        peers = [
            name
            for name, peer in self._peer_table.peers.items()
            if peer.lives and self._swarm.node_of(name) == node
        ]
        if leaving:
            for name in peers:
                self._peer_table.peers[name].loss_expected = True
            if notice.left_s is None:
                await self._swarm.command(peers, Leave(source=notice.source))
            else:
                command = GiveNotice(deadline_s=notice.left_s, source=notice.source)
                await self._swarm.command(peers, command)
        self._write(
            NodeNoticed(
                node=node,
                source=notice.source,
                what=notice.what,
                deadline_s=notice.left_s,
                certain=notice.certain,
                lives=peers if leaving else [],
                drained=leaving and await self._drain(node, notice),
            )
        )
        if leaving:
            self.cause = (
                self.cause or f"node {node[:8]} is taken away: {notice.source}, {notice.what}"
            )
            self._changed()

    async def _drain(self, node: str, notice: NodeNotice) -> bool:
        """Tell Ray to start nothing on a node any more; return whether it knows.

        The supervisor's own node is not drained: the driver and its next supervisor need it.
        """
        left_s = 0.0 if notice.left_s is None else notice.left_s
        if node == self._home:
            hold_s = min(left_s + _AFTER_S, _LONGEST_HOLD_S)
            self._hold_until = time.monotonic() + hold_s
            return False
        if notice.source == "ray":
            return True
        self.own_drains.add(node)  # Ray's notice of it would be a second one
        with contextlib.suppress(ClusterError):
            deadline_ms = int((time.time() + left_s) * 1000) if left_s else 0
            await asyncio.to_thread(raylets.drain, node, deadline_ms)
            return True
        return False

    def problem(self, training: bool) -> str | None:
        """Return why the replicate has to be repeated; None if it goes on.

        Args:
            training: Whether training has begun; before that no peer can be missed.
        """
        return None if training and self._config.then == "continue" else self.cause

    @property
    def hold_until(self) -> float:
        """Time until which a lost replicate waits [s of the monotonic clock].

        It is in the future if the supervisor's own node will be taken away. The replicate would be
        repeated on that node, again and again until the node is gone.
        """
        return self._hold_until

    async def close(self) -> None:
        """Take no further notices."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
