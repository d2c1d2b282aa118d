"""What a fault can do to a running swarm, and what it can see of it: the cluster provides it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol

from rayhive.events import Event

#: Processes of one peer. ``group`` is all of them at once.
ProcessRole = Literal["group", "trainer", "dht", "p2pd", "gradient_averager", "state_averager"]

#: In place of a node, for :meth:`FaultTarget.start`: any but the one where the peer was.
OTHER_NODE = "other"

#: What a machine may or may not let rayhive do; the reason is what ``rayhive doctor`` says.
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


class FaultTarget(Protocol):
    """A running swarm in the hands of a fault.

    Peers are named by slot (``peer-1``); what happens to a slot happens to the life of it that
    runs. All methods may raise :class:`rayhive.errors.RayhiveError` if the cluster refuses.
    """

    def living(self) -> Sequence[str]:
        """Return the slots with a peer that runs and has not finished."""

    def node_of(self, peer: str) -> str:
        """Return the logical node (``node-0``) that a peer is, or was last, on."""

    def peers_on(self, node: str) -> Sequence[str]:
        """Return the living slots on a logical node."""

    def role(self, name: str) -> str:
        """Return the slot that has a dynamic role (``leader``, ``slowest``) now."""

    def expect_loss(self, peer: str) -> None:
        """Say that the end of the peer's present life is the fault's doing, and no failure."""

    async def signal(self, peer: str, signum: int, process: ProcessRole = "group") -> list[int]:
        """Send a signal; return the pids that got it."""

    async def process_states(self, peer: str, process: ProcessRole = "group") -> dict[int, str]:
        """Return what has become of processes of the last life of a slot.

        Returns:
            pid -> ``running``, ``stopped`` or ``gone``.
        """

    async def command(self, peer: str, do: str, **fields: Any) -> None:
        """Send a command to a peer."""

    async def start(self, peer: str, node: str | None = None) -> str:
        """Start a life of a slot; return the life's name in events.

        It comes to ``node``; to where the slot was, or was to be, if that is None; and to the node
        with the fewest peers that is not that one if it is :data:`OTHER_NODE`.

        A slot that has never run is a joiner. Returns when the process runs, not when it trains.
        """

    async def agent(self, node: str, method: str, *args: Any) -> Any:
        """Call a method of the agent of a logical node; one that wants a run is told this one."""

    async def drain(self, node: str, notice_s: float) -> None:
        """Tell Ray that the node will be gone after ``notice_s`` seconds."""

    async def kill_node(self, node: str) -> None:
        """End a node's raylet and everything on it; the losses are expected."""

    async def start_node(self, node: str) -> None:
        """Start a node of a testbed that was killed."""

    async def event(
        self, kind: str, peer: str | None, timeout: float, *, count: int = 1, **fields: Any
    ) -> Event | None:
        """Wait for the next event of a kind; those of the past do not count.

        Args:
            kind: The kind.
            peer: Slot whose present life has to send it, or any if it has none yet; None for
                anybody.
            timeout: Longest wait [s].
            count: Wait for so many, and return the last.
            fields: Values that its fields must have.

        Returns:
            The event, or None if it does not come in time.
        """

    def last(self, kind: str, peer: str) -> Event | None:
        """Return the last event of a kind that any life of a slot sent."""
