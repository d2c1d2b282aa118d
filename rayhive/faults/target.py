"""Protocol of a fault target: a running swarm as fault kinds act on it and observe it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

from rayhive.events.event import E
from rayhive.faults.node_tools import ToolTarget
from rayhive.spec.commands import FaultCommand

#: Processes of one peer. ``group`` is all of them at once.
ProcessRole = Literal["group", "trainer", "dht", "p2pd", "gradient_averager", "state_averager"]

#: Argument of :meth:`FaultTarget.start` for any node but the one that the peer was on.
OTHER_NODE = "other"


#: Permissions that faults need of a machine; each text completes "the machine lets rayhive ...".
#: ``rayhive doctor`` prints one line for each.
CAPABILITIES: dict[str, str] = {
    "signals": "send signals to peers' processes",
    "cpu_quota": "limit the CPU time of a peer (cgroup)",
    "memory": "hold memory on a node",
    "mount": "mount a small file system on a node",
    "link": "shape, delay or cut the links between nodes that have an interface of their own",
    "node": "end a node and start it again: nodes of a testbed",
    "nodes": "start a peer on another node than its own",
    "drain": "announce to Ray that a node will be taken",
}


class FaultTarget(ToolTarget, Protocol):
    """A running swarm.

    Peers are named by replica (``peer-1``). An operation on a replica acts on its present
    incarnation. Every method may raise :class:`rayhive.errors.RayhiveError` if the cluster refuses.
    """

    def living(self) -> Sequence[str]:
        """Return the replicas with a peer that runs and has not finished."""

    def node_of(self, peer: str) -> str:
        """Return the logical node (``node-0``) that a peer is on, or was on last."""

    def peers_on(self, node: str) -> Sequence[str]:
        """Return the living replicas on a logical node."""

    def role(self, name: str) -> str:
        """Return the replica that holds a dynamic role (``leader``, ``slowest``) now."""

    def expect_loss(self, peer: str) -> None:
        """Attribute the end of the peer's present incarnation to the fault: it is no failure."""

    async def signal(self, peer: str, signum: int, process: ProcessRole = "group") -> list[int]:
        """Send a signal; return the pids that it was delivered to."""

    async def process_states(self, peer: str, process: ProcessRole = "group") -> dict[int, str]:
        """Return the states of processes of a replica's last incarnation.

        Returns:
            pid -> ``running``, ``stopped`` or ``gone``.
        """

    async def command(self, peer: str, command: FaultCommand) -> None:
        """Send a command to a peer, on behalf of the fault that runs."""

    async def start(self, peer: str, node: str | None = None) -> str:
        """Start an incarnation of a replica. Return when the process runs, before it trains.

        A replica that has never run is a joiner.

        Args:
            peer: The replica.
            node: Logical node. None is the replica's last or reserved node; :data:`OTHER_NODE` is
                the node with the fewest peers among all others.

        Returns:
            The incarnation's name in events.
        """

    async def answers(self, node: str) -> bool:
        """Return whether the agent of a logical node answers."""

    async def drain(self, node: str, notice_s: float) -> None:
        """Announce to Ray that the node will be gone after ``notice_s`` seconds."""

    async def kill_node(self, node: str) -> None:
        """End a node's raylet and everything on it; the losses are expected."""

    async def start_node(self, node: str) -> None:
        """Start a node of a testbed that was killed."""

    async def event(
        self,
        record: type[E],
        peer: str,
        timeout: float,
        *,
        count: int = 1,
        fault: str | None = None,
    ) -> E | None:
        """Wait for the next event of a kind; past events do not count.

        Args:
            record: The kind.
            peer: Replica whose present incarnation has to send the event, or any incarnation if it
                has none yet.
            timeout: Longest wait [s].
            count: Number of such events to wait for.
            fault: Required value of the event's field ``fault``; None for any.

        Returns:
            The last of the ``count`` events, or None if it does not come in time.
        """

    def last(self, record: type[E], peer: str) -> E | None:
        """Return the last event of a kind from any incarnation of a replica."""
