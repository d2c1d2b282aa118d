"""Fault ``flapping``: a link comes and goes."""

from __future__ import annotations

from collections.abc import Sequence

from rayhive.faults.kind import FaultKind, Proof, Record, Targets
from rayhive.faults.node_tools import FLAPPING, FlapArgs, FlapPhase, FlapState, ToolHandle
from rayhive.faults.steps import for_each, poll, stop_each
from rayhive.faults.target import FaultTarget

PATIENCE_S = 6.0


class Flapping(FaultKind):
    """Cuts a node from all others for a while, again and again."""

    about = "A node's link goes down and comes back, again and again."
    group = "link"
    needs = ("link",)
    target_type = "node"
    heals = True
    args: FlapArgs
    tools: dict[str, ToolHandle[FlapArgs, FlapState]]

    async def inject(self, swarm: FaultTarget, targets: Targets) -> Record:
        """Start to flap the links."""
        for node in targets:
            self.tools[node] = FLAPPING.on(swarm, node, self.planned.id)
            await self.tools[node].start(self.args)
        return dict(self.args.model_dump())

    async def verify(self, swarm: FaultTarget, targets: Targets) -> Proof:
        """Check the probes of the first phase, and of the second if it begins soon enough."""
        phases = 2 if self.args.down_s + 1 < PATIENCE_S else 1

        async def observed(node: str) -> tuple[FlapPhase, ...]:
            read = self.tools[node].state
            state = await poll(read, lambda state: len(state.phases) >= phases, PATIENCE_S)
            return state.phases

        logs = await for_each(targets, observed)
        ok = bool(logs) and all(_flaps(log, phases) for log in logs.values())
        dumped = {
            node: [phase.model_dump(by_alias=True, exclude_none=True) for phase in log]
            for node, log in logs.items()
        }
        return Proof(ok, {"phases": dumped})

    async def heal(self, swarm: FaultTarget, targets: Targets) -> Record:
        """Stop flapping, with the links up."""
        states = await stop_each(swarm, self.tools, targets)
        logs = {node: state.phases if state else () for node, state in states.items()}
        return {"times_down": {n: sum(p.phase == "down" for p in log) for n, log in logs.items()}}


def _flaps(log: Sequence[FlapPhase], phases: int) -> bool:
    """Return whether no packet arrived in the first phase, and some did in the second."""
    if len(log) < phases:
        return False
    first, *others = log[:phases]
    down = bool(first.sent) and not first.out and not first.back
    return down and all(phase.out and phase.back for phase in others)
