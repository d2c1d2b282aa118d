"""A link comes and goes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field

from rayhive.errors import RayhiveError
from rayhive.faults.kind import FaultKind, Proof
from rayhive.faults.target import FaultTarget
from rayhive.spec import Model

_PATIENCE_S = 6.0


class FlappingArgs(Model):
    """Parameters.

    Attributes:
        down_s: How long the link is cut each time [s].
        up_s: How long it works in between [s].
        times: How often it is cut; None until the fault is healed.
    """

    down_s: float = Field(default=2.0, ge=0.1)
    up_s: float = Field(default=5.0, ge=0.1)
    times: int | None = Field(default=None, ge=1)


class Flapping(FaultKind):
    """Cuts a node from all others for a while, again and again."""

    about = "A node's link goes down and comes back, again and again."
    group = "link"
    needs = ("link",)
    targets = "node"
    heals = True
    Args = FlappingArgs

    _flapping: set[str]

    async def setup(self, swarm: FaultTarget) -> None:
        """Touch nothing."""
        self._flapping = set()

    async def inject(self, swarm: FaultTarget, who: Sequence[str]) -> dict[str, Any]:
        """Have the agents flap their links."""
        for node in who:
            self._flapping.add(node)
            given = (self.planned.id, self.args.down_s, self.args.up_s, self.args.times)
            await swarm.agent(node, "flap", *given)
        return dict(self.args.model_dump())

    async def verify(self, swarm: FaultTarget, who: Sequence[str]) -> Proof:
        """Look at what arrived while the link was down, and once it was up again, if it is soon."""
        phases = 2 if self.args.down_s + 1 < _PATIENCE_S else 1
        given = (self.planned.id, phases, _PATIENCE_S)
        logs = await asyncio.gather(*(swarm.agent(node, "flap_log", *given) for node in who))
        ok = bool(logs) and all(_flaps(log, phases) for log in logs)
        return Proof(ok, {"phases": dict(zip(who, logs, strict=True))})

    async def heal(self, swarm: FaultTarget, who: Sequence[str]) -> dict[str, Any]:
        """End it, with the link up."""
        times = {}
        for node in who:
            times[node] = await swarm.agent(node, "settle", self.planned.id)
            self._flapping.discard(node)
        return {"times_down": times}

    async def teardown(self, swarm: FaultTarget) -> None:
        """End what was not healed; on a node that is gone it went with the agent."""
        for node in list(getattr(self, "_flapping", ())):
            with contextlib.suppress(RayhiveError):
                await self.heal(swarm, [node])


def _flaps(log: Sequence[Mapping[str, Any]], phases: int) -> bool:
    """Return whether nothing arrived in the first phase, and something in the second."""
    if len(log) < phases:
        return False
    arrived = [[int(entry.get(key, 0)) for key in ("sent", "out", "in")] for entry in log[:phases]]
    sent, out, back = arrived[0]
    down = sent > 0 and out == back == 0
    return down and all(out > 0 and back > 0 for _, out, back in arrived[1:])
