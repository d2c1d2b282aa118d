"""The peers of one replicate as Ray actors."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayError

from rayhive.cluster.actors import RETRY_EVERY, repeated
from rayhive.cluster.node import raylets
from rayhive.cluster.node.agent import PreparedNode
from rayhive.cluster.replicate import peer_actor
from rayhive.cluster.replicate.node_agents import ANSWER_TIMEOUT, CALL_NUMBERS, NodeAgents, gather
from rayhive.cluster.replicate.peer_actor import (
    HostedPeer,
    PeerActor,
    PeerAt,
    PeerStart,
    Started,
)
from rayhive.cluster.replicate.peer_pool import PeerPool, end
from rayhive.cluster.replicate.reservation import Reservation
from rayhive.cluster.testbed.config import DATA_ADDRESS_LABEL
from rayhive.spec.commands import Command
from rayhive.spec.replicate import PeerSpec, ReplicateSpec

_CLOSE_TIMEOUT = 3.0
_POLL_S = 20.0

#: Receives the name of a peer and one item of its stream, the last of type ``Exited``.
Listener: TypeAlias = Callable[[str, peer_actor.StreamItem], Awaitable[None]]
#: Asks an actor for the items of its peer.
Ask: TypeAlias = Callable[[int, float], Awaitable[list[peer_actor.StreamItem]]]


def create_actor(options: Mapping[str, Any], key: str, name: str) -> Any:
    """Create an actor for a peer.

    Args:
        options: Ray's options for the actor.
        key: Key of the peer.
        name: Name of the peer.
    """
    return ray.remote(PeerActor).options(**options, max_restarts=0).remote(key, name)


async def relay(name: str, ask: Ask, listener: Listener, patience: float) -> None:
    """Pass the items of a peer on until its last one.

    Args:
        name: The peer.
        ask: Returns its items after a number, see :meth:`HostedPeer.next_items`.
        listener: Receives the items.
        patience: Time that the actor may be unavailable before it counts as lost [s].
    """
    taken, unavailable_since = 0, 0.0
    while True:
        try:
            items = await ask(taken, _POLL_S)
        except ActorUnavailableError:
            # The actor may come back; it keeps its items until their arrival is confirmed.
            unavailable_since = unavailable_since or time.monotonic()
            if time.monotonic() - unavailable_since < patience:
                await asyncio.sleep(RETRY_EVERY)
                continue
            reason = f"its actor could not be reached for {patience:g} s"
            items = [peer_actor.Exited(reason=reason)]
        except RayActorError as error:
            reason = f"its actor died: {str(error).strip().splitlines()[0]}"
            items = [peer_actor.Exited(reason=reason)]
        unavailable_since = 0.0
        taken += len(items)
        for item in items:
            await listener(name, item)
            if isinstance(item, peer_actor.Exited):
                return


class Swarm:
    """Starts, commands and ends the peers of one replicate.

    Args:
        spec: The replicate.
        reservation: Room for the peers.
        agents: Agents of the nodes.
        listener: Receives every item of the peers' streams.
        patience: Time that an actor may be unavailable before it counts as lost [s].
        home: Ray's id of the supervisor's node.
        pool: Idle actors for the peers that start together, and for those of the next replicate.
    """

    def __init__(
        self,
        spec: ReplicateSpec,
        reservation: Reservation,
        agents: NodeAgents,
        listener: Listener,
        patience: float,
        home: str,
        pool: PeerPool,
    ) -> None:
        self._spec, self._reservation, self._agents = spec, reservation, agents
        self._listener, self._patience, self._home = listener, patience, home
        self._pool = pool
        self._specs: list[PeerSpec] = [spec.peer_spec(i) for i in range(spec.swarm.peers)]
        self._nodes: dict[str, str] = {}
        self._addresses: dict[str, str] = {}
        self._peers: dict[str, PeerAt] = {}
        self._relays: list[asyncio.Task[None]] = []

    @property
    def names(self) -> list[str]:
        """Names of the peers that start together, the bootstrap peer first."""
        return [peer.name for peer in self._specs]

    def node_of(self, name: str) -> str:
        """Return Ray's id of the node of a peer that was started."""
        return self._nodes[name]

    def reserved_node(self, peer: int) -> str:
        """Return Ray's id of the node where room is reserved for a peer, by its number."""
        return self._reservation.node_of(peer)

    async def spawn(self, started: Started) -> None:
        """Start actor and process of every peer that starts at the beginning.

        Args:
            started: Called for each peer.

        Raises:
            ClusterError: Nothing is reserved yet.
            PeerError: A process did not start.
        """
        for peer in self._specs:
            self._nodes[peer.name] = self.reserved_node(peer.peer)
        warm = await gather([self._host_warm(peer) for peer in self._specs])
        await self._pool.close()  # those of nodes that this replicate does not use
        for peer in itertools.compress(self._specs, (not found for found in warm)):
            self._host(peer, self._nodes[peer.name])
        by_node: dict[str, list[str]] = {}
        for name in self.names:
            by_node.setdefault(self._nodes[name], []).append(name)
        steps = [self._agents.prepare(node, by_node[node]) for node in sorted(by_node)]
        ready = dict(zip(sorted(by_node), await gather(steps), strict=True))
        await gather(
            [self._begin(peer, ready[self._nodes[peer.name]], started) for peer in self._specs]
        )

    async def spawn_later(self, peer: PeerSpec, node: str, started: Started) -> None:
        """Start one more peer, or another incarnation of a replica whose process has ended.

        Args:
            peer: The peer.
            node: Ray's id of its node.
            started: Called with the peer.

        Raises:
            PeerError: Its process did not start.
        """
        self._nodes[peer.name] = node  # may be asked for before the process runs
        before = [name for name in self._peers if name.partition(".")[0] == peer.replica]
        for name in before:  # it may hold a device
            await self._end(self._peers.pop(name))
        self._host(peer, node)
        await self._begin(peer, await self._agents.prepare(node, [peer.name]), started)

    async def _host_warm(self, peer: PeerSpec) -> bool:
        """Host a peer on an idle actor of its node; return whether there is one."""
        node = self._nodes[peer.name]
        if self._reservation.bundles[peer.peer].gpus:
            return False  # Ray gives devices to the actor of a bundle
        key = self._key(peer)
        actor = await self._pool.take(node, lambda actor: actor.open.remote(key, peer.name))
        if actor is not None:
            self._peers[peer.name] = PeerAt(actor, key, node, reusable=True)
        return actor is not None

    def _host(self, peer: PeerSpec, node: str) -> None:
        """Host a peer on a new actor. A peer that starts later always gets one.

        The time until such a peer trains is measured, and must not depend on the replicate before.
        """
        options = self._reservation.actor_options(peer.peer, node)
        reusable = not (peer.joins or self._reservation.bundles[peer.peer].gpus)
        self._nodes[peer.name] = node
        key = self._key(peer)
        actor = create_actor(options, key, peer.name)
        self._peers[peer.name] = PeerAt(actor, key, node, reusable)

    def _key(self, peer: PeerSpec) -> str:
        return f"{self._spec.run_id}/{peer.name}"

    async def _begin(self, peer: PeerSpec, ready: PreparedNode, started: Started) -> None:
        node, gpus = self._nodes[peer.name], self._reservation.bundles[peer.peer].gpus
        own = peer.model_copy(
            update={
                "host": await asyncio.to_thread(self._address, node),
                "accelerator": "cuda" if gpus else "cpu",
            }
        )
        own_log = str(peer_actor.log_of(self._spec.folder, peer.name))
        log = own_log if node == self._home else ready.logs[peer.name]
        given = PeerStart(own, ready.forkserver, log, ready.temporary[peer.name], bool(gpus))
        at = self._peers[peer.name]
        process = await repeated(partial(at.call, HostedPeer.start, given), self._patience)
        started(peer, node, process)

        def ask(after: int, timeout: float) -> Awaitable[list[peer_actor.StreamItem]]:
            return at.call(HostedPeer.next_items, after, timeout)

        stream = relay(peer.name, ask, self._listener, self._patience)
        self._relays.append(asyncio.create_task(stream))

    def _address(self, node: str) -> str:
        """Return the address of a node for the peers of this replicate."""
        if node not in self._addresses:
            self._addresses = {
                room.node: room.labels.get(DATA_ADDRESS_LABEL) or room.address
                for room in raylets.nodes()
            }
        # With a plan, a peer may later start on another node, which cannot reach a loopback.
        nodes = {*self._reservation.nodes, node}  # the supervisor's need not be among them
        several = nodes if self._spec.plan is None else self._addresses
        return "127.0.0.1" if len(several) == 1 else self._addresses[node]

    def home_address(self) -> str:
        """Return the address at which peers reach the node of this process."""
        return self._address(self._home)

    async def command(self, who: Sequence[str], command: Command) -> None:
        """Send a command to peers. Dead ones are skipped: their death is an event."""
        key = f"{command.do}-{next(CALL_NUMBERS)}"

        peers = [self._peers[name] for name in who if name in self._peers]
        calls = [partial(at.call, HostedPeer.command, command, key) for at in peers]
        await asyncio.gather(*(self._attempt(call) for call in calls))

    @staticmethod
    async def _attempt(call: Callable[[], Awaitable[Any]]) -> None:
        """Make a call, again if the actor is unavailable; ignore that an actor is dead."""
        with contextlib.suppress(RayActorError, asyncio.TimeoutError):
            await asyncio.wait_for(repeated(call, ANSWER_TIMEOUT), ANSWER_TIMEOUT)

    async def kill(self, who: Sequence[str]) -> None:
        """Kill the process groups of peers."""
        peers = [self._peers[name] for name in who if name in self._peers]
        calls = [partial(at.call, HostedPeer.kill) for at in peers]
        await asyncio.gather(*(self._attempt(call) for call in calls))

    @staticmethod
    async def _close(at: PeerAt) -> bool:
        """Kill what remains of a peer; return whether its actor has done so."""
        try:
            await asyncio.wait_for(at.call(HostedPeer.close), _CLOSE_TIMEOUT)
        except (RayError, asyncio.TimeoutError):
            return False
        return True

    async def _end(self, at: PeerAt) -> None:
        """End a peer and its actor."""
        await self._close(at)
        await end(at.actor)

    async def silent_nodes(self, peers: Sequence[str]) -> dict[str, str]:
        """Return the nodes of these peers that do not answer, each with the reason."""
        at = {self._nodes[name] for name in peers if name in self._nodes}
        return await self._agents.silent_nodes(at)

    async def clear(self) -> list[str]:
        """End all peers, fetch logs from other nodes, clean up every node, free the room.

        The actors wait for the next replicate if nothing remains of this one.

        Returns:
            A text for each thing that remains on a node.
        """
        peers = list(self._peers.values())
        closed = await asyncio.gather(*(self._close(at) for at in peers))
        for task in self._relays:
            task.cancel()
        for name, node in self._nodes.items():
            if node != self._home:
                text = await self._agents.fetch_log(node, name)
                with contextlib.suppress(OSError):
                    if text is not None:
                        peer_actor.log_of(self._spec.folder, name).write_bytes(text)
        left = await self._agents.clean()
        keep = [
            answers and at.reusable and not left for answers, at in zip(closed, peers, strict=True)
        ]
        await asyncio.gather(
            *(end(at.actor) for at, kept in zip(peers, keep, strict=True) if not kept)
        )
        for at in itertools.compress(peers, keep):
            self._pool.give(at.node, at.actor)
        await self._reservation.release()
        return left
