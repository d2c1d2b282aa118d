"""What the kinds that make a link worse have in common."""

from __future__ import annotations

import asyncio
import contextlib
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from rayhive.errors import RayhiveError
from rayhive.faults.kind import FaultKind, Proof
from rayhive.faults.target import FaultTarget


class LinkFault(FaultKind):
    """Sets one quantity of some nodes' links, and proves it by measuring them against the switch.

    Attributes:
        key: The field of :class:`rayhive.spec.Link`, and the only parameter of the kind.
        measured: What the agents measure for the proof.
    """

    group = "link"
    needs = ("link",)
    targets = "node"
    heals = True
    key: ClassVar[str]
    measured: ClassVar[str]

    #: What the links were before, by node; of those that are not healed yet.
    _before: dict[str, Any]

    async def setup(self, swarm: FaultTarget) -> None:
        """Touch nothing."""
        self._before = {}

    async def inject(self, swarm: FaultTarget, who: Sequence[str]) -> dict[str, Any]:
        """Change the links.

        Raises:
            RayhiveError: A link is as bad already, so nothing could be proved.
        """
        value = getattr(self.args, self.key)
        for node in who:
            present = (await swarm.agent(node, "link"))[self.key]
            if not self.worse(value, present):
                text = f"{self.key} {value:g} is no worse than what the link of {node} has"
                raise RayhiveError(f"{text}: {present}")
        for node in who:
            self._before[node] = None
            self._before[node] = await swarm.agent(node, "set_link", *self.arguments(value))
        return {"before": dict(self._before), "now": {self.key: value}}

    async def verify(self, swarm: FaultTarget, who: Sequence[str]) -> Proof:
        """Measure every link that was changed."""
        found = await asyncio.gather(
            *(swarm.agent(node, "measure_link", self.measured) for node in who)
        )
        seen = dict(zip(who, found, strict=True))
        ok = bool(seen) and all(self.proves(each, self._before[n]) for n, each in seen.items())
        return Proof(ok, {"asked": getattr(self.args, self.key), "measured": seen})

    async def heal(self, swarm: FaultTarget, who: Sequence[str]) -> dict[str, Any]:
        """Give the links back what the testbed was made with."""
        links = {}
        for node in who:
            links[node] = await swarm.agent(node, "restore_link", self.key)
            self._before.pop(node, None)
        return {"links": links}

    async def teardown(self, swarm: FaultTarget) -> None:
        """Restore what was not healed; a node that is gone gets a new link when it comes back."""
        for node in list(getattr(self, "_before", {})):
            with contextlib.suppress(RayhiveError):
                await self.heal(swarm, [node])

    def arguments(self, value: float) -> tuple[float | None, float | None, float | None]:
        """Return the arguments of the agent's ``set_link`` that set the quantity alone."""
        rate, delay, loss = (value if key == self.key else None for key in _KEYS)
        return rate, delay, loss

    @abstractmethod
    def worse(self, value: float, present: float | None) -> bool:
        """Return whether a value is worse than the present one; None is no limit."""

    @abstractmethod
    def proves(self, seen: Mapping[str, Any], before: Mapping[str, Any]) -> bool:
        """Return whether a measurement can only be that of the changed link.

        Args:
            seen: What was measured.
            before: What the link was set to before.
        """


_KEYS = ("rate_mbit", "delay_ms", "loss")
