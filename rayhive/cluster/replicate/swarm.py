"""The peers of one replicate as Ray actors: where they are put, how they are reached."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayTaskError
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from rayhive.cluster import actors
from rayhive.cluster.autoscaling import grows
from rayhive.cluster.calls import RETRY_EVERY, repeated, silent
from rayhive.cluster.node import raylets
from rayhive.cluster.node.agent import NodeAgent
from rayhive.cluster.node.raylets import rooms
from rayhive.cluster.replicate.peer_actor import EXITED, PeerActor
from rayhive.cluster.replicate.placement import Bundle, bundles
from rayhive.cluster.testbed.config import DATA_ADDRESS_LABEL
from rayhive.errors import ClusterError, RayhiveError
from rayhive.events import Event
from rayhive.spec.replicate import PeerSpec, ReplicateSpec

_POLL = 20.0
_PLACEMENT_POLL = 2.0
#: What an actor on a node that can't be reached costs at most; Ray notices it much later.
_ANSWER_TIMEOUT = 10.0
_CLOSE_TIMEOUT = 3.0
#: What an actor without work of its own asks for.
_LIGHT = {"num_cpus": 0, "max_restarts": 0}

#: Tells the calls of this process apart, for actors that do a repeated call once.
_NUMBERS = itertools.count()

T = TypeVar("T")
#: Takes a peer's name and one of its events, the last of kind ``exited``.
Listener = Callable[[str, Event], Awaitable[None]]
#: Takes a peer that was started and its ``pid``, ``host``, ``node`` and ``devices``.
Started = Callable[[PeerSpec, Mapping[str, Any]], None]


async def _all(steps: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Await all at once, and raise rayhive's own errors as they were raised in the actors."""
    try:
        return await asyncio.gather(*steps)
    except RayTaskError as error:
        if isinstance(error.cause, RayhiveError):
            raise error.cause from None
        raise


class Swarm:
    """Places, starts, commands and clears away the peers of one replicate.

    Args:
        spec: The replicate.
        agent_options: Arguments of the agents that have to be made.
        listener: Gets every event.
        patience: How long an actor may be unavailable before it counts as lost [s].
    """

    def __init__(
        self,
        spec: ReplicateSpec,
        agent_options: Mapping[str, Any],
        listener: Listener,
        patience: float = 60.0,
    ) -> None:
        self._spec = spec
        self._agent_options = dict(agent_options)
        self._listener = listener
        self._patience = patience
        self._specs: list[PeerSpec] = [spec.peer_spec(i) for i in range(spec.swarm.peers)]
        self._bundles: list[Bundle] = []
        self._reserved: list[str] = []  # node of each bundle
        self._group: PlacementGroup | None = None
        self._nodes: dict[str, str] = {}
        self._addresses: dict[str, str] = {}
        self._agents: dict[str, Any] = {}
        self._actors: dict[str, Any] = {}
        self._pumps: list[asyncio.Task[None]] = []
        self._home = ray.get_runtime_context().get_node_id()

    @property
    def names(self) -> list[str]:
        """The names of the peers that start together, the bootstrap peer first."""
        return [peer.name for peer in self._specs]

    def node_of(self, name: str) -> str:
        """Return the id of the node that a placed peer is on."""
        return self._nodes[name]

    def reserved_node(self, peer: int) -> str:
        """Return the id of the node where room was reserved for a peer."""
        return self._reserved[peer]

    async def place(self, timeout: float) -> None:
        """Reserve room for every peer.

        Raises:
            ClusterError: There is no room, ever or within ``timeout`` seconds.
        """
        if down := await asyncio.to_thread(raylets.missing):
            numbers = ", ".join(map(str, down))
            raise ClusterError(f"node {numbers} of the testbed is down: take it down and up again")
        later, waited = self._spec.slots - len(self._specs), 0.0
        growing = await asyncio.to_thread(grows)
        while not self._bundles:
            present = await asyncio.to_thread(rooms)
            try:
                self._bundles = bundles(self._spec.swarm, present, later, growing)
            except ValueError as error:  # a node that is gone may come back
                if waited >= timeout:
                    raise ClusterError(
                        f"{error} within {timeout:g} s (timeouts.placing)"
                    ) from error
                waited += _PLACEMENT_POLL
                await asyncio.sleep(_PLACEMENT_POLL)
        several = growing or len({room.node for room in present}) > 1
        group = await asyncio.to_thread(self._reserve, several)
        while not await asyncio.to_thread(group.wait, min(_PLACEMENT_POLL, timeout)):
            waited += _PLACEMENT_POLL
            if waited >= timeout:
                what = f"{len(self._specs)} peers within {timeout:g} s (timeouts.placing)"
                grew = "; the autoscaler added too few nodes" if growing else ""
                raise ClusterError(f"no room for {what}{grew}")
        table = await asyncio.to_thread(placement_group_table, group)
        places = table["bundles_to_node_id"]
        self._reserved = [places[index] for index in range(len(self._bundles))]

    def _reserve(self, several: bool) -> PlacementGroup:
        labels = [bundle.labels for bundle in self._bundles]
        self._group = placement_group(
            [bundle.resources for bundle in self._bundles],
            # Links between machines are what is measured, where there are machines to choose.
            strategy="SPREAD" if several else "PACK",
            name=self._spec.run_id,
            bundle_label_selector=labels if any(labels) else None,
        )
        return self._group

    async def spawn(self, started: Started) -> None:
        """Start every peer's actor and process.

        Args:
            started: Called for each peer.

        Raises:
            PeerError: A peer's process did not start.
        """
        if self._group is None:
            raise ClusterError("peers are placed before they are spawned")
        for peer in self._specs:
            self._host(peer, self._reserved[peer.peer])
        by_node = {
            node: [name for name in self.names if self._nodes[name] == node]
            for node in sorted(set(self._reserved[: len(self._specs)]))
        }
        steps = [self._prepare(node, peers) for node, peers in by_node.items()]
        ready = dict(zip(by_node, await _all(steps), strict=True))
        await _all(
            [self._begin(peer, ready[self._nodes[peer.name]], started) for peer in self._specs]
        )

    async def spawn_later(self, peer: PeerSpec, node: str, started: Started) -> None:
        """Start one more peer, or another life of one that is gone.

        Args:
            peer: The peer.
            node: Ray's id of the node that it comes to.
            started: Called with it.

        Raises:
            PeerError: Its process did not start.
        """
        self._nodes[peer.name] = node  # whoever asks meanwhile
        before = [name for name in self._actors if name.partition(".")[0] == peer.slot]
        for name in before:  # it holds the room
            await self._close(self._actors.pop(name))
        self._host(peer, node)
        await self._begin(peer, await self._prepare(node, [peer.name]), started)

    def _host(self, peer: PeerSpec, node: str) -> None:
        """Make the actor of a peer: in the room that was reserved, unless it comes elsewhere."""
        bundle, host = self._bundles[peer.peer], ray.remote(PeerActor)
        options: dict[str, Any]
        if node == self._reserved[peer.peer] and self._group is not None:
            scheduling: Any = PlacementGroupSchedulingStrategy(
                placement_group=self._group, placement_group_bundle_index=peer.peer
            )
            options = {"num_cpus": bundle.cpus}
        else:
            scheduling = NodeAffinitySchedulingStrategy(node_id=node, soft=False)
            options = {"num_cpus": 0}
        self._nodes[peer.name] = node
        self._actors[peer.name] = host.options(
            **options, num_gpus=bundle.gpus, max_restarts=0, scheduling_strategy=scheduling
        ).remote(peer.name)

    async def _begin(self, peer: PeerSpec, ready: Mapping[str, Any], started: Started) -> None:
        bundle, node = self._bundles[peer.peer], self._nodes[peer.name]
        own = peer.model_copy(
            update={
                "host": await asyncio.to_thread(self._address, node),
                "accelerator": "cuda" if bundle.gpus else "cpu",
            }
        )
        at_home = node == self._home
        given = (
            own.model_dump(mode="json", by_alias=True),
            ready["forkserver"],
            str(self.log_of(peer.name)) if at_home else ready["logs"][peer.name],
            ready["temporary"][peer.name],
            bool(bundle.gpus),
        )
        start = self._actors[peer.name].start
        answer = await repeated(lambda: start.remote(*given), self._patience)
        started(peer, {**answer, "node": node})
        self._pumps.append(asyncio.create_task(self._pump(peer.name)))

    def _address(self, node: str) -> str:
        """Return the address that a peer on a node listens on."""
        if node not in self._addresses:
            found = {item["NodeID"]: item for item in raylets.all_nodes()}
            self._addresses = {
                name: (item.get("Labels") or {}).get(DATA_ADDRESS_LABEL)
                or item["NodeManagerAddress"]
                for name, item in found.items()
            }
        # one that comes to another node later would not reach them on the loopback
        several = set(self._reserved) if self._spec.plan is None else self._addresses
        return "127.0.0.1" if len(several) == 1 else self._addresses[node]

    def log_of(self, name: str) -> Path:
        """Return where a peer's log ends up."""
        return Path(self._spec.folder) / "logs" / f"{name}.log"

    async def _prepare(self, node: str, peers: Sequence[str]) -> dict[str, Any]:
        name = actors.agent_name(self._spec.study, node)
        for last_try in (False, True):
            agent = await asyncio.to_thread(self._agent, name, node)
            try:
                answer: dict[str, Any] = await repeated(
                    partial(agent.prepare.remote, self._spec.run_id, list(peers)), self._patience
                )
            except (RayActorError, RuntimeError):
                if last_try:  # once it may have been an agent on its way out
                    raise
                continue
            self._agents[node] = agent
            return answer
        raise AssertionError("unreachable")

    def _agent(self, name: str, node: str) -> Any:
        agent: Any = ray.remote(NodeAgent)
        return agent.options(
            **_LIGHT,
            name=name,
            namespace=actors.NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=node, soft=False),
        ).remote(**self._agent_options)

    async def _pump(self, name: str) -> None:
        actor, taken, silent = self._actors[name], 0, 0.0
        while True:
            try:
                events: list[Event] = await actor.next_events.remote(taken, _POLL)
            except RayActorError as error:
                if isinstance(error, ActorUnavailableError):
                    # It may come back, and keeps its events until they are asked for again.
                    silent = silent or time.monotonic()
                    if time.monotonic() - silent < self._patience:
                        await asyncio.sleep(RETRY_EVERY)
                        continue
                    reason = f"its actor could not be reached for {self._patience:g} s"
                else:
                    reason = f"its actor died: {str(error).strip().splitlines()[0]}"
                await self._listener(name, {"kind": EXITED, "exit_code": None, "reason": reason})
                return
            silent = 0.0
            taken += len(events)
            for event in events:
                await self._listener(name, event)
                if event["kind"] == EXITED:
                    return

    async def command(self, who: Sequence[str], do: str, **fields: Any) -> None:
        """Send a command to some peers; dead ones are passed over, their death is an event."""
        key = f"{do}-{next(_NUMBERS)}"

        async def send(name: str) -> None:
            send_once = partial(self._actors[name].command.remote, {"do": do, **fields}, key)
            await self._attempt(send_once)

        await asyncio.gather(*(send(name) for name in who if name in self._actors))

    @staticmethod
    async def _attempt(call: Callable[[], Awaitable[Any]]) -> None:
        """Make a call that an unavailable actor gets again and a dead one does not need."""
        with contextlib.suppress(RayActorError, asyncio.TimeoutError):
            await asyncio.wait_for(repeated(call, _ANSWER_TIMEOUT), _ANSWER_TIMEOUT)

    async def kill(self, who: Sequence[str]) -> None:
        """Kill the process groups of some peers."""
        calls = [self._actors[name].kill.remote for name in who if name in self._actors]
        await asyncio.gather(*(self._attempt(call) for call in calls))

    @staticmethod
    async def _close(actor: Any) -> None:
        with contextlib.suppress(RayActorError, asyncio.TimeoutError):
            await asyncio.wait_for(actor.close.remote(), _CLOSE_TIMEOUT)
            await asyncio.wait_for(actor.leave.remote(), _CLOSE_TIMEOUT)
        ray.kill(actor)

    async def agent(self, node: str, method: str, *args: Any) -> Any:
        """Call a method of the agent of a node, by Ray's id of the node."""
        if node not in self._agents:
            raise ClusterError(f"there is no agent on node {node}")
        key = f"{self._spec.run_id}-{next(_NUMBERS)}"
        answer = repeated(
            partial(self._agents[node].call.remote, key, method, *args), _ANSWER_TIMEOUT
        )
        try:
            return (await _all([asyncio.wait_for(answer, _ANSWER_TIMEOUT)]))[0]
        except (RayActorError, asyncio.TimeoutError) as error:
            why = str(error).strip().splitlines()[0] if str(error) else "no answer in time"
            raise ClusterError(f"the agent on node {node} can't {method}: {why}") from error

    async def silent_nodes(self, peers: Sequence[str]) -> dict[str, str]:
        """Return the nodes of some peers that do not answer, each with the reason."""
        at = {self._nodes[name] for name in peers if name in self._nodes}
        asked = {node: self._agents[node] for node in sorted(at & self._agents.keys())}
        return await silent(asked, self._patience)

    async def link_counters(self) -> dict[str, dict[str, int]]:
        """Return what has passed the interfaces that peers use, by node; of a testbed's nodes."""
        apart = {
            item["NodeID"]
            for item in await asyncio.to_thread(raylets.all_nodes)
            if item["Alive"] and DATA_ADDRESS_LABEL in (item.get("Labels") or {})
        }
        found = {}
        for node in sorted(apart & self._agents.keys()):
            with contextlib.suppress(ClusterError):
                found[node] = await self.agent(node, "link_counters")
        return found

    async def clear(self) -> list[str]:
        """End all actors, fetch logs from other nodes, and have every node cleaned up.

        Returns:
            What is left although it was cleared, in words.
        """
        await asyncio.gather(*(self._close(actor) for actor in self._actors.values()))
        for pump in self._pumps:
            pump.cancel()
        for name, node in self._nodes.items():
            if node != self._home and node in self._agents:
                with contextlib.suppress(RayActorError, asyncio.TimeoutError, OSError):
                    answer = self._agents[node].fetch_log.remote(self._spec.run_id, name)
                    text = await asyncio.wait_for(answer, _ANSWER_TIMEOUT)
                    self.log_of(name).write_bytes(text)

        async def clean(node: str) -> list[str]:
            try:
                await self.agent(node, "cleanup", self._spec.run_id)
                return list(await self.agent(node, "orphans", self._spec.run_id))
            except (ClusterError, RayTaskError) as error:
                if node not in await asyncio.to_thread(raylets.alive):
                    return []  # what was on a node that is gone is gone
                return [f"nobody knows what is on node {node}: {str(error).splitlines()[-1]}"]

        left = await asyncio.gather(*(clean(node) for node in self._agents))
        if self._group is not None:
            await asyncio.to_thread(remove_placement_group, self._group)
        return [item for items in left for item in items]
