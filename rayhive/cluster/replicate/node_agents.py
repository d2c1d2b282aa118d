"""The node agents that a replicate uses."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from functools import partial
from typing import Any, Concatenate, ParamSpec, TypeVar

from ray.exceptions import RayActorError, RayTaskError

from rayhive.cluster import actors
from rayhive.cluster.actors import repeated, silent
from rayhive.cluster.node import raylets
from rayhive.cluster.node.agent import AgentOptions, NodeAgent, PreparedNode
from rayhive.cluster.testbed.config import DATA_ADDRESS_LABEL
from rayhive.errors import ClusterError, RayhiveError
from rayhive.spec.replicate import ReplicateSpec

#: Longest wait for an answer [s]: Ray itself notices an unreachable node much later.
ANSWER_TIMEOUT = 10.0
#: Longest wait for the cleanup of a node and for its tools [s]: the end of many processes is slow
#: on a busy machine, and so is the proof of a fault on a slow link.
SLOW_TIMEOUT = 60.0
_SLOW = {m.__name__ for m in (NodeAgent.cleanup, NodeAgent.orphans, NodeAgent.use_tool)}
#: Numbers the calls of this process, for actors that perform a repeated call once.
CALL_NUMBERS = itertools.count()

T = TypeVar("T")
P = ParamSpec("P")


async def gather(steps: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Await all steps; raise an error of rayhive as it was raised in the actor."""
    try:
        return await asyncio.gather(*steps)
    except RayTaskError as error:
        if isinstance(error.cause, RayhiveError):
            raise error.cause from None
        raise


class NodeAgents:
    """Agents of the nodes of one replicate, by Ray's id of the node.

    Args:
        spec: The replicate.
        options: Settings of an agent that has to be created.
        patience: Time that an actor may be unavailable before it counts as lost [s].
        supervisor: Name of the replicate's supervisor. Agents clear up after one that died.

    Attributes:
        on_agent: Called with each node that was prepared.
    """

    def __init__(
        self, spec: ReplicateSpec, options: AgentOptions, patience: float, supervisor: str
    ) -> None:
        self._spec, self._options, self._patience = spec, options, patience
        self._supervisor = supervisor
        self._agents: dict[str, Any] = {}
        self.on_agent: Callable[[str], None] = lambda node: None

    async def prepare(self, node: str, peers: Sequence[str]) -> PreparedNode:
        """Have the agent of a node prepare it for peers; create the agent if there is none.

        Args:
            node: The node.
            peers: Names of the peers.
        """
        try:
            return await self._prepare(node, peers)
        except (RayActorError, RuntimeError):  # of an agent that was just leaving
            return await self._prepare(node, peers)

    async def _prepare(self, node: str, peers: Sequence[str]) -> PreparedNode:
        name = actors.agent_name(self._spec.study, node)
        agent = await asyncio.to_thread(actors.detached, NodeAgent, name, node, self._options)
        given = self._spec.run_id, list(peers), self._supervisor, self._spec.preemption.sources
        answer: PreparedNode = await repeated(partial(agent.prepare.remote, *given), self._patience)
        self._agents[node] = agent
        self.on_agent(node)
        return answer

    async def call(
        self,
        node: str,
        method: Callable[Concatenate[NodeAgent, P], Awaitable[T]],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        """Call a method of the agent of a node.

        Args:
            node: Ray's id of the node.
            method: The method of :class:`NodeAgent`.
            args: Its arguments.
            kwargs: Its arguments by name.

        Raises:
            ClusterError: The node has no agent, or the agent does not answer in time.
        """
        if node not in self._agents:
            raise ClusterError(f"there is no agent on node {node}")
        key = f"{self._spec.run_id}-{next(CALL_NUMBERS)}"
        call = partial(self._agents[node].call.remote, key, method.__name__, *args, **kwargs)
        timeout = SLOW_TIMEOUT if method.__name__ in _SLOW else ANSWER_TIMEOUT
        answer: Coroutine[Any, Any, T] = asyncio.wait_for(repeated(call, timeout), timeout)
        try:
            return (await gather([answer]))[0]
        except (RayActorError, asyncio.TimeoutError) as error:
            why = str(error).strip().splitlines()[0] if str(error) else "no answer in time"
            raise ClusterError(
                f"the agent on node {node} can't {method.__name__}: {why}"
            ) from error

    async def fetch_log(self, node: str, peer: str) -> bytes | None:
        """Return the log of a peer from its node; None if it cannot be fetched."""
        if node in self._agents:
            with contextlib.suppress(RayActorError, asyncio.TimeoutError):
                answer = self._agents[node].fetch_log.remote(self._spec.run_id, peer)
                text: bytes = await asyncio.wait_for(answer, ANSWER_TIMEOUT)
                return text
        return None

    async def silent_nodes(self, nodes: Iterable[str]) -> dict[str, str]:
        """Return those of the nodes that do not answer, each with the reason."""
        asked = {node: self._agents[node] for node in sorted({*nodes} & self._agents.keys())}
        return await silent(asked, self._patience)

    async def link_counters(self) -> dict[str, dict[str, int]]:
        """Return the counters of the interfaces that peers use, for each node of a testbed."""
        rooms = await asyncio.to_thread(raylets.rooms)
        apart = {room.node for room in rooms if DATA_ADDRESS_LABEL in room.labels}
        found = {}
        for node in sorted(apart & self._agents.keys()):
            with contextlib.suppress(ClusterError):
                found[node] = await self.call(node, NodeAgent.link_counters)
        return found

    async def clean(self) -> list[str]:
        """Remove the replicate from every node; return a text for each thing that remains."""

        async def clean(node: str) -> list[str]:
            try:
                run_id = self._spec.run_id
                await self.call(node, NodeAgent.cleanup, run_id)
                return await self.call(node, NodeAgent.orphans, run_id)
            except (ClusterError, RayTaskError) as error:
                if node not in await asyncio.to_thread(raylets.alive):
                    return []  # nothing of the replicate can remain on a node that is gone
                return [f"node {node} could not be checked: {str(error).splitlines()[-1]}"]

        left = await asyncio.gather(*(clean(node) for node in self._agents))
        return [item for items in left for item in items]
