"""Fault ``memory_pressure``: the peers of a node have less memory."""

from __future__ import annotations

from pydantic import Field

from rayhive.errors import RayhiveError
from rayhive.faults.kind import FaultKind, Proof, Record, Targets
from rayhive.faults.node_tools import MEMORY_HOG, HeldMemory, MemorySize, ToolHandle
from rayhive.faults.steps import for_each, stop_all
from rayhive.faults.target import FaultTarget
from rayhive.spec import Model

#: Share of the held memory that has to be resident for a proof.
_RESIDENT = 0.95
_MB = 10**6


class MemoryPressureArgs(Model):
    """Parameters of :class:`MemoryPressure`.

    Attributes:
        megabytes: Memory to hold on each node [MB].
    """

    megabytes: int = Field(default=256, ge=1)


class MemoryPressure(FaultKind):
    """Holds memory on a node, all of it touched, until it is healed.

    A reserve of the node's memory always stays free: a machine that swaps, or that ends processes
    at random, would break more than the plan says.
    """

    about = "Holds memory on a node, within what is free besides a reserve."
    group = "node"
    needs = ("memory",)
    target_type = "node"
    heals = True
    args: MemoryPressureArgs
    tools: dict[str, ToolHandle[MemorySize, HeldMemory]]

    async def setup(self, swarm: FaultTarget) -> None:
        """Check that the memory is free, on nodes that are known before training starts.

        Raises:
            RayhiveError: It is not.
        """
        for node in self.planned.who:
            if node.startswith("node-"):
                free = (await MEMORY_HOG.on(swarm, node, node).state()).free // _MB
                if free < self.args.megabytes:
                    raise RayhiveError(
                        f"megabytes: {self.args.megabytes} must be at most {free}, the memory that "
                        f"is free on {node} besides a reserve"
                    )

    async def inject(self, swarm: FaultTarget, targets: Targets) -> Record:
        """Hold the memory.

        Raises:
            RayhiveError: A node has no living peer, or too little free memory.
        """
        for node in targets:
            if not swarm.peers_on(node):
                raise RayhiveError(f"no peer runs on {node}")
        self.tools = {node: MEMORY_HOG.on(swarm, node, node) for node in targets}
        size = MemorySize(size=self.args.megabytes * _MB)
        done = await for_each(targets, lambda node: self.tools[node].start(size))
        return {"held": {node: {"pid": s.pid, "rss": s.rss} for node, s in done.items()}}

    async def verify(self, swarm: FaultTarget, targets: Targets) -> Proof:
        """Check that the memory is resident."""
        seen = await for_each(targets, lambda node: self.tools[node].state())
        enough = _RESIDENT * self.args.megabytes * _MB
        rss = {node: state.rss for node, state in seen.items()}
        return Proof(all(held >= enough for held in rss.values()), {"rss": rss})

    async def heal(self, swarm: FaultTarget, targets: Targets) -> Record:
        """Free the memory."""
        return {"failed": await stop_all(self.tools)}
