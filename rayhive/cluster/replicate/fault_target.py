"""Implementation of :class:`rayhive.faults.target.FaultTarget` on a running swarm."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import cast

from rayhive.cluster.node import raylets
from rayhive.cluster.node.agent import NodeAgent
from rayhive.cluster.replicate.node_agents import NodeAgents
from rayhive.cluster.replicate.peer_actor import Started
from rayhive.cluster.replicate.peer_table import PeerRecord, PeerTable
from rayhive.cluster.replicate.swarm import Swarm
from rayhive.errors import ClusterError
from rayhive.events import GROUPED, Event, PeerReady, Round
from rayhive.events.event import E
from rayhive.faults.node_tools import ArgsT, NodeTool, StateT, Verb
from rayhive.faults.target import OTHER_NODE, ProcessRole
from rayhive.spec.commands import FaultCommand, Start, Train
from rayhive.spec.replicate import ReplicateSpec

#: Id of the fault on whose behalf the running task acts.
CAUSE: ContextVar[str | None] = ContextVar("cause", default=None)


class SwarmTarget:
    """The swarm of one replicate, addressed by replicas and logical nodes.

    Args:
        spec: The replicate.
        swarm: Its peers, spawned.
        agents: Agents of the nodes.
        peer_table: State of the peers.
        spawned: Takes the id of the fault that starts a peer, and returns a callback for the peer.
        own_drains: Receives the ids of the nodes that are drained here.
    """

    def __init__(
        self,
        spec: ReplicateSpec,
        swarm: Swarm,
        agents: NodeAgents,
        peer_table: PeerTable,
        spawned: Callable[[str | None], Started],
        own_drains: set[str] | None = None,
    ) -> None:
        self._spec, self._swarm, self._agents = spec, swarm, agents
        self._peer_table, self._spawned = peer_table, spawned
        self._own_drains = set() if own_drains is None else own_drains
        self._incarnations = {f"peer-{i}": [spec.peer_spec(i)] for i in range(spec.swarm.peers)}
        self._nodes = {f"node-{i}": swarm.reserved_node(i) for i in range(spec.replicas)}
        self._moved: dict[str, str] = {}  # id of a node -> its id after a restart
        self._latest: dict[tuple[type[Event], str], Event] = {}  # of each replica
        self._waiting: list[tuple[Callable[[Event], bool], asyncio.Future[Event]]] = []
        self._ready: list[str] = []
        self._commands: set[asyncio.Task[None]] = set()
        self._starting: dict[str, asyncio.Task[None]] = {}
        self._killing: dict[str, asyncio.Future[None]] = {}

    # -- events --------------------------------------------------------------------------------

    def heard(self, event: Event) -> None:
        """Take an event about a peer, after the peer table has."""
        if isinstance(event, PeerReady) and event.peer is not None:
            self._ready.append(event.peer)
            if self._peer_table.peers[event.peer].late:
                task = asyncio.ensure_future(self._swarm.command([event.peer], Train()))
                self._commands.add(task)
                task.add_done_callback(self._commands.discard)
        if event.peer is not None:
            self._latest[type(event), event.peer.partition(".")[0]] = event
        for matches, found in self._waiting:
            if not found.done() and matches(event):
                found.set_result(event)

    async def event(
        self,
        record: type[E],
        peer: str,
        timeout: float,
        *,
        count: int = 1,
        fault: str | None = None,
    ) -> E | None:
        """See :class:`~rayhive.faults.target.FaultTarget`."""
        incarnation = self.incarnation(peer) if peer in self._incarnations else None
        left = count

        def matches(event: Event) -> bool:
            nonlocal left
            found = (
                isinstance(event, record)
                and event.peer is not None
                and incarnation in (None, event.peer)
                and event.peer.partition(".")[0] == peer
                and fault in (None, getattr(event, "fault", None))
            )
            left -= found
            return found and left == 0

        entry = matches, asyncio.get_running_loop().create_future()
        self._waiting.append(entry)
        try:
            return cast(E, await asyncio.wait_for(entry[1], timeout))
        except asyncio.TimeoutError:
            return None
        finally:
            self._waiting.remove(entry)

    def last(self, record: type[E], peer: str) -> E | None:
        """See :class:`~rayhive.faults.target.FaultTarget`."""
        return cast(E | None, self._latest.get((record, peer)))

    # -- replicas and nodes --------------------------------------------------------------------

    def incarnation(self, peer: str) -> str:
        """Return the name of the latest incarnation of a replica.

        Raises:
            ClusterError: The replica has not run yet.
        """
        if peer not in self._incarnations:
            raise ClusterError(f"{peer} has not joined yet")
        return self._incarnations[peer][-1].name

    def _record(self, peer: str) -> PeerRecord:
        return self._peer_table.peers[self.incarnation(peer)]

    def incarnations_of(self, who: Sequence[str]) -> list[str]:
        """Return the names of the latest incarnations of replicas, or of those on nodes."""
        return [self.incarnation(peer) for peer in self.replicas(who) if peer in self._incarnations]

    def replicas(self, who: Sequence[str]) -> list[str]:
        """Return replicas, with each node replaced by the living replicas on it."""
        return [
            peer
            for name in who
            for peer in (self.peers_on(name) if name.startswith("node-") else [name])
        ]

    def training(self) -> list[str]:
        """Return the replicas that train."""
        return [peer for peer in self._incarnations if self.trains(peer)]

    def living(self) -> Sequence[str]:
        """See :class:`~rayhive.faults.target.FaultTarget`."""
        return [peer for peer in self._incarnations if self._record(peer).lives]

    def trains(self, peer: str) -> bool:
        """Return whether a replica has a peer that has begun to train and has not ended."""
        if peer not in self._incarnations:
            return False
        record = self._record(peer)
        return record.lives and record.state == "training"

    def down(self) -> set[str]:
        """Return the replicas that ran once, and do not train or have not joined a round yet."""
        return {
            peer for peer in self._incarnations if not (self.trains(peer) and self._joined(peer))
        }

    def _joined(self, peer: str) -> bool:
        """Return whether a peer has averaged with other peers, which a late one has to do first."""
        if not self._record(peer).late:
            return True
        last = self.last(Round, peer)
        if last is None or last.peer != self.incarnation(peer):
            return False
        return last.outcome in GROUPED

    def home(self, node: str) -> list[str]:
        """Return the replicas whose latest incarnation is, or was, on a logical node."""
        at = self._node(node)
        return [peer for peer in self._incarnations if self._place(peer) == at]

    def _place(self, peer: str) -> str:
        """Return the present id of the node of a replica's latest incarnation."""
        at = self._swarm.node_of(self.incarnation(peer))
        while at in self._moved:
            at = self._moved[at]
        return at

    def node_of(self, peer: str) -> str:
        """See :class:`~rayhive.faults.target.FaultTarget`."""
        if peer not in self._incarnations:
            return f"node-{peer.removeprefix('peer-')}"
        at = self._place(peer)
        home = f"node-{self._incarnations[peer][-1].peer}"
        if self._nodes.get(home) == at:
            return home
        return next(name for name, node in self._nodes.items() if node == at)

    def peers_on(self, node: str) -> Sequence[str]:
        """See :class:`~rayhive.faults.target.FaultTarget`."""
        at = self._node(node)
        return [peer for peer in self.living() if self._swarm.node_of(self.incarnation(peer)) == at]

    def _node(self, node: str) -> str:
        if node not in self._nodes:
            raise ClusterError(f"there is no {node}: the nodes are {', '.join(self._nodes)}")
        return self._nodes[node]

    def role(self, name: str) -> str:
        """See :class:`~rayhive.faults.target.FaultTarget`."""
        training = self.training()
        if not training:
            raise ClusterError(f"no peer is left to be the {name}")
        if name == "slowest":
            rates = {peer: self._record(peer).samples_per_s for peer in training}
            known = {peer: rate for peer, rate in rates.items() if rate is not None}
            return min(known, key=known.__getitem__) if known else training[0]
        # the leader is the peer that was ready first
        order = {name: index for index, name in enumerate(self._ready)}
        return min(training, key=lambda peer: order.get(self.incarnation(peer), len(order)))

    # -- actions -------------------------------------------------------------------------------

    def expect_loss(self, peer: str) -> None:
        """See :class:`~rayhive.faults.target.FaultTarget`."""
        self._record(peer).loss_expected = True

    def _processes(self, peer: str, process: ProcessRole) -> list[int] | None:
        """Return the pids of a peer's processes, None for all of them."""
        if process == "group":
            return None
        record = self._record(peer)
        known = {**record.processes, "trainer": record.pid}
        pid = known.get(process)
        if pid is None:
            raise ClusterError(f"{peer} has not reported the pid of its {process}")
        return [pid]

    async def signal(self, peer: str, signum: int, process: ProcessRole = "group") -> list[int]:
        """See :class:`~rayhive.faults.target.FaultTarget`."""
        pids = self._processes(peer, process)
        at, about = self._host_of(peer)
        return await self._agents.call(at, NodeAgent.signal_processes, *about, signum, pids)

    async def process_states(self, peer: str, process: ProcessRole = "group") -> dict[int, str]:
        """See :class:`~rayhive.faults.target.FaultTarget`."""
        pids = self._processes(peer, process)
        at, about = self._host_of(peer)
        return await self._agents.call(at, NodeAgent.process_states, *about, pids)

    async def command(self, peer: str, command: FaultCommand) -> None:
        """See :class:`~rayhive.faults.target.FaultTarget`."""
        caused = command.model_copy(update={"fault": CAUSE.get()})
        await self._swarm.command([self.incarnation(peer)], caused)

    async def start(self, peer: str, node: str | None = None) -> str:
        """See :class:`~rayhive.faults.target.FaultTarget`."""
        earlier = self._incarnations.get(peer, [])
        number = int(peer.removeprefix("peer-"))
        at = self._place(peer) if earlier else self._node(f"node-{number}")
        if node == OTHER_NODE:
            at = await self._other_node(at)
        elif node is not None:
            at = self._node(node)
        spec = self._spec.peer_spec(number, len(earlier))
        known = [a for other in self.living() for a in self._record(other).addresses]
        self._incarnations[peer] = [*earlier, spec]
        self._peer_table.add(spec.name)
        await self._swarm.spawn_later(spec, at, self._spawned(CAUSE.get()))
        await self._swarm.command([spec.name], Start(initial_peers=tuple(known)))
        return spec.name

    async def _other_node(self, at: str) -> str:
        alive = await asyncio.to_thread(raylets.alive)
        usable = set(alive) - self._own_drains - {at}
        others = usable & set(self._nodes.values())
        if not others:
            raise ClusterError("there is no other living node")
        busy = [self._swarm.node_of(self.incarnation(peer)) for peer in self.living()]
        return min(sorted(others), key=busy.count)

    async def use_tool(
        self,
        node: str,
        tool: NodeTool[ArgsT, StateT],
        subject: str,
        verb: Verb,
        args: ArgsT | None = None,
    ) -> StateT | None:
        """See :class:`~rayhive.faults.node_tools.ToolTarget`."""
        given = None if args is None else args.model_dump(mode="json", by_alias=True)
        about = self._spec.run_id, tool.name, subject
        answer = await self._agents.call(self._node(node), NodeAgent.use_tool, *about, verb, given)
        return None if answer is None else tool.state.model_validate(answer)

    async def answers(self, node: str) -> bool:
        """See :class:`~rayhive.faults.target.FaultTarget`."""
        try:
            await self._agents.call(self._node(node), NodeAgent.ping)
        except ClusterError:
            return False
        return True

    def _host_of(self, peer: str) -> tuple[str, tuple[str, int]]:
        """Return the node of a peer, and the run and leader that name the peer there."""
        leader = self._record(peer).pid
        if leader is None:
            raise ClusterError(f"the process of {peer} has not started")
        return self._swarm.node_of(self.incarnation(peer)), (self._spec.run_id, leader)

    async def drain(self, node: str, notice_s: float) -> None:
        """See :class:`~rayhive.faults.target.FaultTarget`."""
        deadline_ms = int((time.time() + notice_s) * 1000)
        self._own_drains.add(self._node(node))
        await asyncio.to_thread(raylets.drain, self._node(node), deadline_ms)

    async def kill_node(self, node: str) -> None:
        """See :class:`~rayhive.faults.target.FaultTarget`."""
        for peer in self.peers_on(node):
            self.expect_loss(peer)
        self._starting.pop(node, None)
        # A thread goes on when the fault is cancelled; the node is started after its end.
        killing = asyncio.ensure_future(asyncio.to_thread(raylets.kill, self._node(node)))
        self._killing[node] = killing
        await asyncio.shield(killing)

    async def start_node(self, node: str) -> None:
        """See :class:`~rayhive.faults.target.FaultTarget`."""
        # A heal that timed out while the node started is repeated at the end of the replicate.
        starting = self._starting.get(node)
        if starting is None or (starting.done() and starting.exception() is not None):
            starting = self._starting[node] = asyncio.ensure_future(self._start_node(node))
        await asyncio.shield(starting)

    async def _start_node(self, node: str) -> None:
        if (killing := self._killing.pop(node, None)) is not None:
            await asyncio.wait([killing])
        before = self._node(node)
        after = await asyncio.to_thread(raylets.start, before)
        self._moved[before] = after
        self._nodes = {n: after if at == before else at for n, at in self._nodes.items()}
