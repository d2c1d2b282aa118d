"""Data link of a node of a testbed: shaping, cuts, probes and counters."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from rayhive.cluster.node.processes import is_of_another, marked
from rayhive.cluster.testbed.config import NODE_VARIABLE, TESTBED_VARIABLE
from rayhive.errors import ClusterError
from rayhive.faults.node_tools import Arrived, LinkChange, LinkMeasurement
from rayhive.spec import Link

if TYPE_CHECKING:
    from rayhive.cluster.testbed.link_changes import LinkChanges
    from rayhive.cluster.testbed.state import NodeState, TestbedState
    from rayhive.cluster.testbed.veth import Veth

T = TypeVar("T")


class NodeLink:
    """The link of one node that has an interface of its own.

    Only the data plane, which peers use, is changed. Ray's plane stays as it is, so that the agent
    can still be reached to restore the link. Every method but :attr:`exists` raises
    :class:`rayhive.errors.ClusterError` on a node outside a testbed.

    Args:
        folder: The testbed's folder; by default that of this process's environment.
        number: The node's number in the testbed; by default that of the environment.
    """

    def __init__(self, folder: str | None = None, number: int | None = None) -> None:
        variable = os.environ.get(NODE_VARIABLE)
        self._folder = os.environ.get(TESTBED_VARIABLE) if folder is None else folder
        self._number = int(variable) if number is None and variable is not None else number

    @property
    def exists(self) -> bool:
        """Whether the node has a link of its own."""
        return self._folder is not None and self._number is not None

    async def address(self) -> str:
        """Return the node's address on the data plane."""
        return await self._do(lambda state, node: node.data_address)

    async def neighbours(self) -> list[str]:
        """Return the data addresses of the testbed's other nodes."""
        return await self._do(_others)

    async def now(self) -> Link:
        """Return the present setting."""
        return await self._with_veth(lambda veth: veth.now)

    async def change(self, to: LinkChange, name: str = "") -> Link:
        """Change the link in both directions; return the setting before.

        Args:
            to: The quantities to change.
            name: Name of the change, for :meth:`undo`.
        """
        given = to.model_dump(exclude_none=True)
        return await self._with_changes(lambda changes: changes.add(marked(name), given))

    async def undo(self, name: str) -> Link:
        """Undo a change. The newest change that is left, or the testbed, gives the values.

        Returns:
            The setting afterwards.
        """
        return await self._with_changes(lambda changes: changes.remove(marked(name)))

    async def restore(self) -> Link:
        """Restore the testbed's setting, but for changes of other processes that live.

        Returns:
            The setting afterwards.
        """
        return await self._with_changes(lambda changes: changes.restore(is_of_another))

    async def counters(self) -> dict[str, int]:
        """Return the bytes and packets that passed the node's data interface, and the drops."""
        return await self._with_veth(lambda veth: veth.counters())

    async def measure(self, *what: str) -> LinkMeasurement:
        """Measure the link to the switch. Traffic of peers takes its share meanwhile.

        Args:
            what: Any of ``rate``, ``rtt`` and ``loss``; without any, all are measured.
        """
        from rayhive.cluster.testbed.link_probe import measure_link

        now = await self.now()
        return await self._do(lambda state, node: measure_link(state, node, now, what))

    async def cut(self, name: str, keep: Sequence[str] = (), direction: str = "both") -> list[str]:
        """Cut the node from other nodes, established connections included.

        Args:
            name: Name of the cut; a cut of this name on this node is replaced.
            keep: Data addresses that stay reachable in both directions.
            direction: ``out`` cuts packets from the node, ``in`` packets to it, ``both`` all.

        Returns:
            The addresses that the node was cut from.
        """
        from rayhive.cluster.testbed import network

        def cut(state: TestbedState, node: NodeState) -> list[str]:
            here = node.data_address
            others = [address for address in _others(state, node) if address not in keep]
            pairs = [(here, other) for other in others if direction != "in"]
            pairs += [(other, here) for other in others if direction != "out"]
            network.cut(state.switch, _chain(node, name), pairs)
            return others

        return await self._do(cut)

    async def mend(self, name: str) -> int:
        """Undo a cut, if there is one of this name; return the packets that it dropped."""
        from rayhive.cluster.testbed import network

        return await self._do(lambda state, node: network.mend(state.switch, _chain(node, name)))

    async def mend_left(self) -> None:
        """Undo every cut of the node, but for those of other processes that live."""
        from rayhive.cluster.testbed import network

        def mend(state: TestbedState, node: NodeState) -> None:
            prefix = f"{node.index}-"
            for chain in network.cuts(state.switch):
                if chain.startswith(prefix) and not is_of_another(chain.removeprefix(prefix)):
                    network.mend(state.switch, chain)

        await self._do(mend)

    async def reach(self, address: str, count: int = 10, patience_s: float = 1.0) -> Arrived:
        """Send probe packets to another node's data address, and from there to this node.

        Args:
            address: Data address of the other node.
            count: Packets in each direction.
            patience_s: Time limit for the last packet, besides the delay of the links [s].
        """
        from rayhive.cluster.testbed.link_probe import path
        from rayhive.cluster.testbed.veth import Veth

        def send(state: TestbedState, node: NodeState) -> Arrived:
            other = next((each for each in state.nodes if each.data_address == address), None)
            if other is None:
                raise ClusterError(f"address: {address} must be a data address of the testbed")
            slow = sum(Veth(state, each).now.delay_ms for each in (node, other))
            with path(state, node, other) as ends:
                out, back = ends.reach(count, patience_s + slow / 1e3)
            return Arrived(sent=count, out=out, back=back)

        return await self._do(send)

    async def _do(self, step: Callable[[TestbedState, NodeState], T]) -> T:
        """Call a function with the testbed and the node, in a thread."""
        folder, number = self._folder, self._number
        if folder is None or number is None:
            raise ClusterError(
                "this node has no link of its own that could be changed: links are those of a "
                "testbed's nodes (rayhive testbed up)"
            )
        from rayhive.cluster.testbed.state import load

        def do() -> T:
            state = load(folder)
            return step(state, state.node(number))

        return await asyncio.to_thread(do)

    async def _with_veth(self, do: Callable[[Veth], T]) -> T:
        from rayhive.cluster.testbed.veth import Veth

        return await self._do(lambda state, node: do(Veth(state, node)))

    async def _with_changes(self, do: Callable[[LinkChanges], T]) -> T:
        from rayhive.cluster.testbed.link_changes import LinkChanges

        return await self._do(lambda state, node: do(LinkChanges(state, node)))


def _others(state: TestbedState, node: NodeState) -> list[str]:
    return [other.data_address for other in state.nodes if other.index != node.index]


def _chain(node: NodeState, name: str) -> str:
    """Return the name of a cut: that of its node and its maker, which recovery goes by."""
    return f"{node.index}-{marked(name)}"
