"""Implementation of :class:`rayhive.faults.target.FaultTarget` on a running swarm."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any

from rayhive.cluster.node import raylets
from rayhive.cluster.node.process_faults import NodeTools
from rayhive.cluster.replicate.peer_table import PeerTable
from rayhive.cluster.replicate.swarm import Started, Swarm
from rayhive.errors import ClusterError
from rayhive.events import GROUPED, Event, make_event
from rayhive.faults.target import OTHER_NODE, ProcessRole
from rayhive.spec.replicate import ReplicateSpec

#: Id of the fault on whose behalf the running task acts.
CAUSE: ContextVar[str | None] = ContextVar("cause", default=None)


class SwarmTarget:
    """The swarm of one replicate, by slots and logical nodes.

    Args:
        spec: The replicate.
        swarm: Its peers, spawned.
        peer_table: What is known of them.
        spawned: Takes the fault that a peer is started for, and returns what takes the peer.
        write: Takes events of the supervisor's.
    """

    def __init__(
        self,
        spec: ReplicateSpec,
        swarm: Swarm,
        peer_table: PeerTable,
        spawned: Callable[[str | None], Started],
        write: Callable[[Event], None],
    ) -> None:
        self._spec, self._swarm, self._peer_table = spec, swarm, peer_table
        self._spawned, self._write = spawned, write
        self._lives = {f"peer-{i}": [spec.peer_spec(i)] for i in range(spec.swarm.peers)}
        self._nodes = {f"node-{i}": swarm.reserved_node(i) for i in range(spec.slots)}
        self._moved: dict[str, str] = {}  # a node that was started again has another id
        self._latest: dict[tuple[str, str], Event] = {}
        self._waiting: list[tuple[Callable[[Event], bool], asyncio.Future[Event]]] = []
        self._ready: list[str] = []
        self._errands: set[asyncio.Task[None]] = set()
        self._starting: dict[str, asyncio.Task[None]] = {}

    # -- what happens --------------------------------------------------------------------------

    def heard(self, name: str, event: Event) -> None:
        """Take an event of a peer, after the peer_table has."""
        kind, slot = event["kind"], name.partition(".")[0]
        self._latest[kind, slot] = {**event, "peer": name}
        if kind == "peer_ready":
            self._ready.append(name)
            if self._peer_table.peers[name].late:
                self._errand(self._swarm.command([name], "train"))
        for matches, found in self._waiting:
            if not found.done() and matches({**event, "peer": name}):
                found.set_result(event)

    def _errand(self, job: Any) -> None:
        task = asyncio.ensure_future(job)
        self._errands.add(task)
        task.add_done_callback(self._errands.discard)

    async def event(
        self, kind: str, peer: str | None, timeout: float, *, count: int = 1, **fields: Any
    ) -> Event | None:
        """See :class:`~rayhive.faults.target.FaultTarget`."""
        name, left = self.life(peer) if peer in self._lives else None, count

        def matches(event: Event) -> bool:
            nonlocal left
            found = (
                event["kind"] == kind
                and name in (None, event["peer"])
                and peer in (None, event["peer"].partition(".")[0])
                and all(event.get(key) == value for key, value in fields.items())
            )
            left -= found
            return found and left == 0

        entry = matches, asyncio.get_running_loop().create_future()
        self._waiting.append(entry)
        try:
            return await asyncio.wait_for(entry[1], timeout)
        except asyncio.TimeoutError:
            return None
        finally:
            self._waiting.remove(entry)

    def last(self, kind: str, peer: str) -> Event | None:
        """See :class:`~rayhive.faults.target.FaultTarget`."""
        return self._latest.get((kind, peer))

    def note(self, kind: str, **fields: Any) -> None:
        """See :class:`~rayhive.faults.target.FaultTarget`."""
        self._write(make_event(kind, **fields))

    # -- who is where --------------------------------------------------------------------------

    def life(self, peer: str) -> str:
        """Return the name in events of the latest life of a slot.

        Raises:
            ClusterError: The slot has not run yet.
        """
        if peer not in self._lives:
            raise ClusterError(f"{peer} has not joined yet")
        return self._lives[peer][-1].name

    def lives_of(self, who: Sequence[str]) -> list[str]:
        """Return the names in events of the latest lives of slots, or of those on nodes."""
        return [self.life(slot) for slot in self.slots(who) if slot in self._lives]

    def slots(self, who: Sequence[str]) -> list[str]:
        """Return slots, with nodes replaced by the living ones on them."""
        return [
            slot
            for name in who
            for slot in (self.peers_on(name) if name.startswith("node-") else [name])
        ]

    def training(self) -> list[str]:
        """Return the slots that train."""
        return [slot for slot in self._lives if self.trains(slot)]

    def living(self) -> Sequence[str]:
        """See :class:`~rayhive.faults.target.FaultTarget`."""
        return [slot for slot in self._lives if self._peer_table.peers[self.life(slot)].lives]

    def trains(self, peer: str) -> bool:
        """Return whether a slot has a peer that has begun to train and has not ended."""
        if peer not in self._lives:
            return False
        record = self._peer_table.peers[self.life(peer)]
        return record.lives and record.state == "training"

    def down(self) -> set[str]:
        """Return the slots that ran once and do not train, or wait to be let into a round."""
        return {slot for slot in self._lives if not (self.trains(slot) and self._is_in(slot))}

    def _is_in(self, peer: str) -> bool:
        if not self._peer_table.peers[self.life(peer)].late:
            return True
        kind = "state_round" if self._spec.swarm.use_local_updates else "round"
        last = self._latest.get((kind, peer))
        return last is not None and last["peer"] == self.life(peer) and last["outcome"] in GROUPED

    def home(self, node: str) -> list[str]:
        """Return the slots whose latest lives are, or were, on a logical node."""
        at = self._node(node)
        return [slot for slot in self._lives if self._place(slot) == at]

    def _place(self, peer: str) -> str:
        """Return the id that the node of a slot's latest life has now."""
        at = self._swarm.node_of(self.life(peer))
        while at in self._moved:
            at = self._moved[at]
        return at

    def node_of(self, peer: str) -> str:
        """See :class:`~rayhive.faults.target.FaultTarget`."""
        if peer not in self._lives:
            return f"node-{peer.removeprefix('peer-')}"
        at = self._place(peer)
        home = f"node-{self._lives[peer][-1].peer}"
        if self._nodes.get(home) == at:
            return home
        return next(name for name, node in self._nodes.items() if node == at)

    def peers_on(self, node: str) -> Sequence[str]:
        """See :class:`~rayhive.faults.target.FaultTarget`."""
        at = self._node(node)
        return [s for s in self.living() if self._swarm.node_of(self.life(s)) == at]

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
            rates = {
                slot: self._peer_table.peers[self.life(slot)].samples_per_s for slot in training
            }
            known = {slot: rate for slot, rate in rates.items() if rate is not None}
            return min(known, key=known.__getitem__) if known else training[0]
        # the peer that has been there for the longest leads
        order = {life: index for index, life in enumerate(self._ready)}
        return min(training, key=lambda slot: order.get(self.life(slot), len(order)))

    # -- what can be done to them --------------------------------------------------------------

    def expect_loss(self, peer: str) -> None:
        """See :class:`~rayhive.faults.target.FaultTarget`."""
        self._peer_table.doom(self.life(peer))

    def _processes(self, peer: str, process: ProcessRole) -> list[int] | None:
        """Return the pids of a peer's processes, None for all of them."""
        if process == "group":
            return None
        record = self._peer_table.peers[self.life(peer)]
        known = {**record.processes, "trainer": record.pid}
        pid = known.get(process)
        if pid is None:
            raise ClusterError(f"{peer} has not told which process is its {process}")
        return [pid]

    async def signal(self, peer: str, signum: int, process: ProcessRole = "group") -> list[int]:
        """See :class:`~rayhive.faults.target.FaultTarget`."""
        pids = self._processes(peer, process)
        hit: list[int] = await self._agent_of(peer, "signal_processes", signum, pids)
        return hit

    async def process_states(self, peer: str, process: ProcessRole = "group") -> dict[int, str]:
        """See :class:`~rayhive.faults.target.FaultTarget`."""
        pids = self._processes(peer, process)
        states: dict[int, str] = await self._agent_of(peer, "process_states", pids)
        return states

    async def command(self, peer: str, do: str, **fields: Any) -> None:
        """See :class:`~rayhive.faults.target.FaultTarget`."""
        await self._swarm.command([self.life(peer)], do, fault=CAUSE.get(), **fields)

    async def start(self, peer: str, node: str | None = None) -> str:
        """See :class:`~rayhive.faults.target.FaultTarget`."""
        lives = self._lives.get(peer, [])
        number = int(peer.removeprefix("peer-"))
        at = self._place(peer) if lives else self._swarm.reserved_node(number)
        if node == OTHER_NODE:
            at = await self._other_node(at)
        elif node is not None:
            at = self._node(node)
        spec = self._spec.peer_spec(number, len(lives))
        known = [a for s in self.living() for a in self._peer_table.peers[self.life(s)].addresses]
        self._lives[peer] = [*lives, spec]
        self._peer_table.add(spec.name)
        await self._swarm.spawn_later(spec, at, self._spawned(CAUSE.get()))
        await self._swarm.command([spec.name], "start", initial_peers=known)
        return spec.name

    async def _other_node(self, at: str) -> str:
        alive = await asyncio.to_thread(raylets.alive)
        others = {other for other in self._nodes.values() if other != at and other in alive}
        if not others:
            raise ClusterError("no other node is there")
        busy = [self._swarm.node_of(self.life(slot)) for slot in self.living()]
        return min(sorted(others), key=busy.count)

    async def agent(self, node: str, method: str, *args: Any) -> Any:
        """See :class:`~rayhive.faults.target.FaultTarget`."""
        # what is done to processes belongs to a run, what is done to a link to the node
        about = (self._spec.run_id,) if hasattr(NodeTools, method) else ()
        return await self._swarm.agent(self._node(node), method, *about, *args)

    async def _agent_of(self, peer: str, method: str, *args: Any) -> Any:
        """Call the agent of a peer's node about the peer."""
        life = self.life(peer)
        about = self._spec.run_id, self._peer_table.peers[life].pid
        return await self._swarm.agent(self._swarm.node_of(life), method, *about, *args)

    async def drain(self, node: str, notice_s: float) -> None:
        """See :class:`~rayhive.faults.target.FaultTarget`."""
        deadline_ms = int((time.time() + notice_s) * 1000)
        await asyncio.to_thread(raylets.drain, self._node(node), deadline_ms)

    async def kill_node(self, node: str) -> None:
        """See :class:`~rayhive.faults.target.FaultTarget`."""
        for slot in self.peers_on(node):
            self.expect_loss(slot)
        self._starting.pop(node, None)
        await asyncio.to_thread(raylets.kill, self._node(node))

    async def start_node(self, node: str) -> None:
        """See :class:`~rayhive.faults.target.FaultTarget`."""
        # a heal may be given up while the node or its peers start: at the end it is asked for again
        starting = self._starting.get(node)
        if starting is None or (starting.done() and starting.exception() is not None):
            starting = self._starting[node] = asyncio.ensure_future(self._start_node(node))
        await asyncio.shield(starting)

    async def _start_node(self, node: str) -> None:
        before = self._node(node)
        after = await asyncio.to_thread(raylets.start, before)
        self._moved[before] = after
        self._nodes = {n: after if at == before else at for n, at in self._nodes.items()}
