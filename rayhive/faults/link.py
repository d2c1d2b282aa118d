"""Base of the kinds that change one quantity of a node's link."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

from rayhive.errors import RayhiveError
from rayhive.faults.kind import FaultKind, Proof, Record, Targets
from rayhive.faults.node_tools import (
    LINK_SHAPING,
    LinkChange,
    LinkMeasurement,
    LinkState,
    ToolHandle,
)
from rayhive.faults.steps import for_each, stop_each
from rayhive.faults.target import FaultTarget
from rayhive.spec import Link


class LinkFault(FaultKind):
    """Changes one quantity of the links of some nodes; the proof measures them to the switch.

    Attributes:
        key: The quantity: the field of :class:`rayhive.spec.Link` and only parameter of the kind.
    """

    group = "link"
    needs = ("link",)
    target_type = "node"
    heals = True
    key: ClassVar[str]
    tools: dict[str, ToolHandle[LinkChange, LinkState]]

    async def inject(self, swarm: FaultTarget, targets: Targets) -> Record:
        """Change the links.

        Raises:
            RayhiveError: A link is as bad already, so nothing could be proved.
        """
        value = getattr(self.args, self.key)
        tools = {node: LINK_SHAPING.on(swarm, node, self.planned.id) for node in targets}
        for node, tool in tools.items():
            present = getattr((await tool.state()).now, self.key)
            if not self.worse(value, present):
                raise RayhiveError(
                    f"{self.key} {value:g} must be worse than the present one of {node} ({present})"
                )
        self._before: dict[str, Link] = {}
        for node, tool in tools.items():
            self.tools[node] = tool
            state = await tool.start(LinkChange.model_validate({self.key: value}))
            assert state.before is not None
            self._before[node] = state.before
        before = {node: link.model_dump() for node, link in self._before.items()}
        return {"before": before, "now": {self.key: value}}

    async def verify(self, swarm: FaultTarget, targets: Targets) -> Proof:
        """Measure every changed link."""
        found = await for_each(targets, lambda node: self.tools[node].state())
        seen = {node: state.measured for node, state in found.items()}
        ok = bool(targets) and all(
            measured is not None and self.proves(measured, self._before[node])
            for node, measured in seen.items()
        )
        measured = {node: each.model_dump() for node, each in seen.items() if each is not None}
        return Proof(ok, {"asked": getattr(self.args, self.key), "measured": measured})

    async def heal(self, swarm: FaultTarget, targets: Targets) -> Record:
        """Restore the quantity that the testbed was made with."""
        states = await stop_each(swarm, self.tools, targets)
        return {"links": {node: state and state.now.model_dump() for node, state in states.items()}}

    def worse(self, value: float, present: float | None) -> bool:
        """Return whether a value is worse than the present one; None is no limit."""
        return value > (present or 0.0)

    @abstractmethod
    def proves(self, seen: LinkMeasurement, before: Link) -> bool:
        """Return whether only the changed link explains a measurement.

        Args:
            seen: The measurement.
            before: Setting of the link before the fault.
        """
