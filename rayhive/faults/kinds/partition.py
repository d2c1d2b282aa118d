"""Fault ``partition``: some nodes cannot reach others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from rayhive.errors import RayhiveError
from rayhive.faults.kind import FaultKind, Proof, Record, Targets
from rayhive.faults.node_tools import CUT, Arrived, CutArgs, CutState, ToolHandle
from rayhive.faults.steps import for_each, stop_each
from rayhive.faults.target import FaultTarget
from rayhive.spec import Model


class PartitionArgs(Model):
    """Parameters of :class:`Partition`.

    Attributes:
        mode: ``full`` cuts each of the nodes from all others, ``one-way`` in one direction only,
            ``halves`` separates the nodes as one group from all the rest.
        direction: Direction of a one-way cut: ``out`` for packets from the nodes, ``in`` for
            packets to them.
    """

    mode: Literal["full", "one-way", "halves"] = "full"
    direction: Literal["out", "in"] = "out"


class Partition(FaultKind):
    """Cuts nodes from others between their data addresses; Ray's own traffic goes on."""

    about = "Nodes can't reach others: at all, in one direction, or across two halves."
    group = "link"
    needs = ("link",)
    target_type = "node"
    effect = "cut_off"
    heals = True
    args: PartitionArgs
    tools: dict[str, ToolHandle[CutArgs, CutState]]

    async def inject(self, swarm: FaultTarget, targets: Targets) -> Record:
        """Cut the nodes off.

        Raises:
            RayhiveError: There is no other node to cut one from.
        """
        tools = {node: CUT.on(swarm, node, self.planned.id) for node in targets}
        keep: tuple[str, ...] = ()
        if self.args.mode == "halves":
            keep = tuple([(await tool.state()).address for tool in tools.values()])
        cut_from: dict[str, list[str]] = {}
        for node, tool in tools.items():
            self.tools[node] = tool
            state = await tool.start(CutArgs(keep=keep, direction=self._direction))
            cut_from[node] = list(state.cut_from)
        if not all(cut_from.values()):
            raise RayhiveError("there is no node that these could be cut from")
        return {"cut_from": cut_from, "direction": self._direction}

    async def verify(self, swarm: FaultTarget, targets: Targets) -> Proof:
        """Send packets both ways between each node and every node that it is cut from, or keeps."""
        states = await for_each(targets, lambda node: self.tools[node].state())
        arrived: Record = {}
        kept: list[Arrived] = []
        for node, state in states.items():
            for address, each in state.arrived.items():
                arrived[f"{node} {address}"] = each.model_dump(by_alias=True)
                if address not in state.cut_from:
                    kept.append(each)
        cut = [[state.arrived[to] for to in state.cut_from] for state in states.values()]
        ok = all(map(self._is_cut, cut)) and all(each.out > 0 and each.back > 0 for each in kept)
        return Proof(ok, {"arrived": arrived})

    async def heal(self, swarm: FaultTarget, targets: Targets) -> Record:
        """Mend the cuts."""
        states = await stop_each(swarm, self.tools, targets)
        dropped = {node: state.dropped if state else 0 for node, state in states.items()}
        return {"dropped_packets": dropped}

    @property
    def _direction(self) -> Literal["out", "in", "both"]:
        return self.args.direction if self.args.mode == "one-way" else "both"

    def _is_cut(self, arrived: Sequence[Arrived]) -> bool:
        """Return whether packets of a node arrived in the open direction, and in no other.

        In the open direction another node may be cut itself, so that one that answers is enough.
        """
        out, back = sum(each.out for each in arrived), sum(each.back for each in arrived)
        cut_out, cut_back = self._direction != "in", self._direction != "out"
        return bool(arrived) and (out == 0) == cut_out and (back == 0) == cut_back
