"""What a node's agent does to the node's data link, on a testbed."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from rayhive.cluster.testbed.config import NODE_VARIABLE, TESTBED_VARIABLE
from rayhive.errors import ClusterError

if TYPE_CHECKING:
    from rayhive.cluster.testbed.state import NodeState, TestbedState
    from rayhive.cluster.testbed.veth import Veth

#: What a cut takes: what the node sends, what it gets, or both.
DIRECTIONS = ("out", "in", "both")
_FLAP_PROBES = 5

T = TypeVar("T")


class LinkTools:
    """Shapes, delays, cuts and measures the link of a node that has an interface of its own.

    Only the data plane, where peers meet, is touched; Ray's plane stays as it is, so that whoever
    broke the link can still be told to mend it. Every method raises
    :class:`rayhive.errors.ClusterError` on a node that is not a testbed's.
    """

    _flaps: dict[str, _Flapping]

    async def data_address(self) -> str:
        """Return the node's address on the data plane."""
        return (await self._known())[1].data_address

    async def link(self) -> dict[str, Any]:
        """Return what the link is set to: ``rate_mbit``, ``delay_ms``, ``loss``."""
        return await self._with_cable(lambda cable: cable.now.model_dump())

    async def set_link(
        self,
        rate_mbit: float | None = None,
        delay_ms: float | None = None,
        loss: float | None = None,
    ) -> dict[str, Any]:
        """Change the link in both directions; what is None stays as it is.

        Args:
            rate_mbit: Rate [Mbit/s].
            delay_ms: Delay in each direction [ms].
            loss: Share of the packets that get lost, in each direction.

        Returns:
            What the link was set to before.
        """
        asked = {"rate_mbit": rate_mbit, "delay_ms": delay_ms, "loss": loss}

        given = {key: value for key, value in asked.items() if value is not None}
        return await self._with_cable(lambda cable: cable.update(**given)[0].model_dump())

    async def restore_link(self, *keys: str) -> dict[str, Any]:
        """Set the link to what the testbed was made with.

        Args:
            keys: Of ``rate_mbit``, ``delay_ms``, ``loss``: only these; all if none is given.

        Returns:
            What it is set to now.
        """
        _, node = await self._known()
        made = node.link.model_dump()
        given = {key: made[key] for key in keys or made}
        return await self._with_cable(lambda cable: cable.update(**given)[1].model_dump())

    async def heal_link(self) -> None:
        """Undo all that was done to the node's link; nothing to do on a node that has none."""
        from rayhive.cluster.testbed import firewall

        if None in self._place():
            return
        for name in list(getattr(self, "_flaps", {})):
            await self.settle(name)
        state, node = await self._known()
        for name in await asyncio.to_thread(firewall.cuts, state.switch):
            if name.startswith(_chain(node, "")):
                await asyncio.to_thread(firewall.mend, state.switch, name)
        await self.restore_link()

    async def link_counters(self) -> dict[str, int]:
        """Return the bytes and packets that passed the node's data interface, and those dropped."""
        return await self._with_cable(lambda cable: cable.counters())

    async def measure_link(self, *what: str) -> dict[str, Any]:
        """Measure the link against the switch; what peers send meanwhile takes its share.

        Args:
            what: Of ``rate``, ``rtt``, ``loss``: only these; all if none is given.

        Returns:
            The fields of :class:`rayhive.cluster.testbed.link_probe.Measured`.
        """
        from rayhive.cluster.testbed.link_probe import measure_link
        from rayhive.cluster.testbed.veth import Veth

        state, node = await self._known()
        now = Veth(state, node).now
        found = await asyncio.to_thread(measure_link, state, node, now, what)
        return found.model_dump()

    async def cut(self, name: str, keep: Sequence[str] = (), direction: str = "both") -> list[str]:
        """Cut the node from all others, connections that are established included.

        Args:
            name: Of the cut; one of this name on this node is replaced.
            keep: Data addresses of nodes that it can still reach and be reached by.
            direction: ``out`` for what the node sends, ``in`` for what it gets, ``both``.

        Returns:
            The addresses that it was cut from.
        """
        from rayhive.cluster.testbed import firewall

        if direction not in DIRECTIONS:
            raise ClusterError(f"a cut is one of {', '.join(DIRECTIONS)}, not {direction!r}")
        state, node = await self._known()
        others = [
            other.data_address
            for other in state.nodes
            if other.index != node.index and other.data_address not in keep
        ]
        here = node.data_address
        pairs = [(here, other) for other in others if direction != "in"]
        pairs += [(other, here) for other in others if direction != "out"]
        await asyncio.to_thread(firewall.cut, state.switch, _chain(node, name), pairs)
        return others

    async def mend(self, name: str) -> int:
        """Undo a cut; return the packets that it took. None of this name is fine."""
        from rayhive.cluster.testbed import firewall

        state, node = await self._known()
        return await asyncio.to_thread(firewall.mend, state.switch, _chain(node, name))

    async def reach(self, address: str, count: int = 10, patience_s: float = 1.0) -> dict[str, Any]:
        """Send packets to another node's data address and from there to this one.

        Args:
            address: The other node's.
            count: Packets in each direction.
            patience_s: How long the last may take, beside the delay of the links [s].

        Returns:
            How many were ``sent`` in each direction, and how many arrived: ``out`` and ``in``.
        """
        from rayhive.cluster.testbed.link_probe import path
        from rayhive.cluster.testbed.veth import Veth

        state, node = await self._known()
        other = next((each for each in state.nodes if each.data_address == address), None)
        if other is None:
            raise ClusterError(f"{address} is no data address of the testbed")

        def send() -> tuple[int, int]:
            with path(state, node, other) as ends:
                slow = sum(Veth(state, each).now.delay_ms for each in (node, other))
                return ends.reach(count, patience_s + slow / 1e3)

        out, back = await asyncio.to_thread(send)
        return {"sent": count, "out": out, "in": back}

    async def neighbours(self) -> list[str]:
        """Return the data addresses of the testbed's other nodes."""
        state, node = await self._known()
        return [other.data_address for other in state.nodes if other.index != node.index]

    async def flap(self, name: str, down_s: float, up_s: float, times: int | None) -> None:
        """Cut the node from all others for a while, again and again, in the background.

        Args:
            name: Of the cut.
            down_s: How long it is cut [s].
            up_s: How long it is not, in between [s].
            times: How often; None until :meth:`settle`.
        """
        await self.settle(name)
        others = await self.neighbours()
        if not hasattr(self, "_flaps"):
            self._flaps = {}
        run = self._flaps[name] = _Flapping()
        other = others[0] if others else None
        flapping = self._keep_flapping(name, run, other, down_s, up_s, times)
        run.task = asyncio.get_running_loop().create_task(flapping)

    async def flap_log(
        self, name: str, phases: int = 0, timeout: float = 0.0
    ) -> list[dict[str, Any]]:
        """Return what packets to another node showed, in each phase of a flapping link so far.

        Args:
            name: Of the cut.
            phases: Wait until there are so many.
            timeout: But not longer than this [s].

        Returns:
            For each phase ``phase`` (``down``, ``up``), ``at`` (Unix time [s]), ``sent``, ``out``
            and ``in``.
        """
        run = getattr(self, "_flaps", {}).get(name)
        if run is None:
            return []
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(run.seen(phases), timeout)
        return list(run.log)

    async def settle(self, name: str) -> int:
        """End the flapping of a link; return how often it was down."""
        run = getattr(self, "_flaps", {}).pop(name, None)
        if run is not None:
            run.stop.set()
            with contextlib.suppress(ClusterError):
                await run.task
        await self.mend(name)
        return 0 if run is None else sum(entry["phase"] == "down" for entry in run.log)

    async def _keep_flapping(
        self,
        name: str,
        run: _Flapping,
        other: str | None,
        down_s: float,
        up_s: float,
        times: int | None,
    ) -> None:
        for _ in itertools.count() if times is None else range(times):
            for phase, seconds in (("down", down_s), ("up", up_s)):
                at, end = time.time(), time.monotonic() + seconds
                await (self.cut(name) if phase == "down" else self.mend(name))
                seen: dict[str, Any] = {}
                if other is not None:
                    seen = await self.reach(other, _FLAP_PROBES, min(1.0, seconds / 2))
                await run.note({"phase": phase, "at": at, **seen})
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(run.stop.wait(), max(0.0, end - time.monotonic()))
                if run.stop.is_set():
                    return

    def _place(self) -> tuple[str | None, str | None]:
        """Return the testbed's folder and the node's number, of the environment."""
        return os.environ.get(TESTBED_VARIABLE), os.environ.get(NODE_VARIABLE)

    async def _known(self) -> tuple[TestbedState, NodeState]:
        """Return the testbed and the node that this agent is on."""
        folder, number = self._place()
        if folder is None or number is None:
            raise ClusterError(
                "this node has no link of its own that could be changed: links are those of a "
                "testbed's nodes (rayhive testbed up)"
            )
        from rayhive.cluster.testbed.state import load

        state = await asyncio.to_thread(load, folder)
        return state, state.node(int(number))

    async def _with_cable(self, do: Callable[[Veth], T]) -> T:
        from rayhive.cluster.testbed.veth import Veth

        state, node = await self._known()
        return await asyncio.to_thread(lambda: do(Veth(state, node)))


class _Flapping:
    """A link that comes and goes: the task that does it, how to end it, and what was seen."""

    task: asyncio.Task[None]

    def __init__(self) -> None:
        self.log: list[dict[str, Any]] = []
        self.stop = asyncio.Event()
        self._more = asyncio.Condition()

    async def note(self, entry: dict[str, Any]) -> None:
        """Add what was seen in a phase."""
        async with self._more:
            self.log.append(entry)
            self._more.notify_all()

    async def seen(self, phases: int) -> None:
        """Wait until so many phases were seen."""
        async with self._more:
            await self._more.wait_for(lambda: len(self.log) >= phases)


def _chain(node: NodeState, name: str) -> str:
    return f"{node.index}-{name}"
