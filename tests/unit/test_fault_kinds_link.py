"""Link faults against a swarm whose tools can be made to do nothing."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rayhive.errors import ClusterError, RayhiveError
from rayhive.faults.kind import FaultKind
from rayhive.faults.node_tools import (
    Arrived,
    CutArgs,
    CutState,
    FlapArgs,
    FlapState,
    LinkChange,
    LinkMeasurement,
    LinkState,
    Verb,
)
from rayhive.registry import FAULTS
from rayhive.spec import Link
from rayhive.spec.fault_plan import At, PlannedFault

ADDRESSES = {f"node-{i}": f"10.0.0.{i}" for i in range(3)}
MADE = {"rate_mbit": 100.0, "delay_ms": 10.0, "loss": 0.0}


class Agents:
    """Agents of three nodes with links in memory.

    Args:
        idle: The tools report success and have no effect.
    """

    def __init__(self, idle: bool = False) -> None:
        self.idle = idle
        self.links = {node: dict(MADE) for node in ADDRESSES}
        self.before: dict[str, Link] = {}
        self.cuts: dict[str, CutArgs] = {}
        self.flaps: dict[str, FlapState] = {}
        self.dead: set[str] = set()
        self.used = 0

    async def use_tool(
        self, node: str, tool: Any, subject: str, verb: Verb, args: Any = None
    ) -> Any:
        assert subject == "f0"
        self.used += 1
        if node in self.dead:
            raise ClusterError(f"{node} is gone")
        answer = getattr(self, tool.name)(node, verb, args)
        assert answer is None or isinstance(answer, tool.state)
        return answer

    async def answers(self, node: str) -> bool:
        return node not in self.dead

    def now(self, node: str) -> Link:
        return Link.model_validate(self.links[node])

    def link_shaping(self, node: str, verb: Verb, args: LinkChange | None) -> LinkState | None:
        link = self.links[node]
        if verb == "start":
            assert args is not None
            self.before[node] = self.now(node)
            if not self.idle:
                link |= args.model_dump(exclude_none=True)
        if verb == "stop":
            if self.before.pop(node, None) is None:
                return None
            link |= MADE
        measured = LinkMeasurement(
            rate_up_mbit=link["rate_mbit"],
            rate_down_mbit=link["rate_mbit"],
            rtt_ms=2 * link["delay_ms"] + 0.3,
            loss_up=link["loss"],
            loss_down=link["loss"],
        )
        probed = verb == "state" and node in self.before
        return LinkState(
            now=self.now(node),
            before=self.before.get(node),
            measured=measured if probed else None,
        )

    def cut(self, node: str, verb: Verb, args: CutArgs | None) -> CutState | None:
        own = ADDRESSES[node]
        if verb == "start":
            assert args is not None
            self.cuts[node] = args
            return CutState(address=own, cut_from=self.cut_from(node))
        if verb == "stop":
            return CutState(address=own, dropped=7) if self.cuts.pop(node, None) else None
        if node not in self.cuts:
            return CutState(address=own)
        kept = [address for address in self.cuts[node].keep if address != own]
        arrived = {to: self.reach(node, to) for to in [*self.cut_from(node), *kept]}
        return CutState(address=own, cut_from=self.cut_from(node), arrived=arrived)

    def cut_from(self, node: str) -> tuple[str, ...]:
        keep = self.cuts[node].keep
        return tuple(a for n, a in ADDRESSES.items() if n != node and a not in keep)

    def reach(self, node: str, address: str) -> Arrived:
        other = next(n for n, a in ADDRESSES.items() if a == address)
        ways = {"out": 10, "in": 10}
        for here, there, names in ((node, other, ("out", "in")), (other, node, ("in", "out"))):
            taken = self.taken(here) if here in self.cuts and not self.idle else ((), "")
            if ADDRESSES[there] in taken[0]:
                for way, name in zip(("out", "in"), names, strict=True):
                    if taken[1] in (way, "both"):
                        ways[name] = 0
        return Arrived.model_validate({"sent": 10, **ways})

    def taken(self, node: str) -> tuple[tuple[str, ...], str]:
        """Return the addresses that a node is cut from, and in which direction."""
        return self.cut_from(node), self.cuts[node].direction

    def flapping(self, node: str, verb: Verb, args: FlapArgs | None) -> FlapState | None:
        if verb == "stop":
            return self.flaps.pop(node, None)
        if verb == "start":
            down = {"phase": "down", "at": 1.0, "sent": 5, "out": 0, "in": 0}
            up = {"phase": "up", "at": 2.0, "sent": 5, "out": 5, "in": 5}
            phases = [{**up, "phase": "down"}, up] if self.idle else [down, up]
            self.flaps[node] = FlapState.model_validate({"phases": phases})
        return self.flaps[node]


def fault(kind: str, who: tuple[str, ...] = ("node-0",), **args: Any) -> FaultKind:
    planned = PlannedFault(id="f0", kind=kind, who=who, at=At(round=1), args=args)
    made: FaultKind = FAULTS.get(kind)(planned)
    return made


async def run(kind: FaultKind, swarm: Any) -> dict[str, Any]:
    """Go through the phases up to the proof."""
    who = kind.planned.who
    await kind.setup(swarm)
    done = await kind.inject(swarm, who)
    proof = await kind.verify(swarm, who)
    return {"done": done, "ok": proof.ok, "what": proof.what}


KINDS = [
    ("rate", {"rate_mbit": 5.0}),
    ("delay", {"delay_ms": 100.0}),
    ("loss", {"loss": 0.1}),
    ("partition", {"mode": "full"}),
    ("partition", {"mode": "one-way", "direction": "out"}),
    ("partition", {"mode": "one-way", "direction": "in"}),
    ("partition", {"mode": "halves"}),
    ("flapping", {"down_s": 1.0}),
]


@pytest.mark.parametrize(("kind", "args"), KINDS)
def test_a_fault_is_proved_and_healed(kind: str, args: dict[str, Any]) -> None:
    async def go() -> None:
        swarm = Agents()
        made = fault(
            kind, ("node-0", "node-1") if args.get("mode") == "halves" else ("node-0",), **args
        )
        seen = await run(made, swarm)
        assert seen["ok"], seen
        await made.heal(swarm, made.planned.who)
        await made.teardown(swarm)
        assert all(link == MADE for link in swarm.links.values())
        assert not swarm.cuts and not swarm.flaps

    asyncio.run(go())


@pytest.mark.parametrize(("kind", "args"), KINDS)
def test_the_end_of_its_node_heals_a_fault(kind: str, args: dict[str, Any]) -> None:
    async def go() -> None:
        swarm = Agents()
        made = fault(kind, **args)
        await run(made, swarm)
        swarm.dead.add("node-0")
        await made.heal(swarm, made.planned.who)
        await made.teardown(swarm)

    asyncio.run(go())


@pytest.mark.parametrize(("kind", "args"), KINDS)
def test_tools_without_effect_are_no_proof(kind: str, args: dict[str, Any]) -> None:
    seen = asyncio.run(run(fault(kind, **args), Agents(idle=True)))
    assert not seen["ok"], seen


@pytest.mark.parametrize(("kind", "args"), KINDS)
def test_an_unhealed_fault_ends_with_the_replicate(kind: str, args: dict[str, Any]) -> None:
    async def go() -> None:
        swarm = Agents()
        made = fault(kind, **args)
        await run(made, swarm)
        await made.teardown(swarm)
        assert all(link == MADE for link in swarm.links.values())
        assert not swarm.cuts and not swarm.flaps

    asyncio.run(go())


@pytest.mark.parametrize("kind", ["rate", "delay", "loss", "partition", "flapping"])
def test_a_fault_that_was_never_injected_tears_nothing_down(kind: str) -> None:
    swarm = Agents()
    asyncio.run(fault(kind).teardown(swarm))  # type: ignore[arg-type]
    assert all(link == MADE for link in swarm.links.values())
    assert not swarm.cuts and not swarm.flaps and not swarm.used


@pytest.mark.parametrize(
    ("kind", "args"), [("rate", {"rate_mbit": 100.0}), ("delay", {"delay_ms": 10.0})]
)
def test_a_link_that_is_as_bad_already_is_refused(kind: str, args: dict[str, Any]) -> None:
    with pytest.raises(RayhiveError, match="must be worse"):
        asyncio.run(run(fault(kind, **args), Agents()))


def test_a_partition_needs_peers_on_both_sides() -> None:
    with pytest.raises(RayhiveError, match="no node"):
        asyncio.run(run(fault("partition", tuple(ADDRESSES), mode="halves"), Agents()))


def test_a_cut_that_takes_too_much_is_no_proof() -> None:
    """A one-way partition that cuts both ways, and halves that lose their own."""

    class TooMuch(Agents):
        def taken(self, node: str) -> tuple[tuple[str, ...], str]:
            return tuple(a for n, a in ADDRESSES.items() if n != node), "both"

    one_way = fault("partition", mode="one-way")
    assert not asyncio.run(run(one_way, TooMuch()))["ok"]
    halves = fault("partition", ("node-0", "node-1"), mode="halves")
    assert not asyncio.run(run(halves, TooMuch()))["ok"]


@pytest.mark.parametrize("direction", ["out", "in"])
def test_several_nodes_may_be_cut_in_one_direction(direction: str) -> None:
    """Between two of them no packet arrives, as each is cut from the other."""
    nodes = ("node-0", "node-1")
    one_way = fault("partition", nodes, mode="one-way", direction=direction)
    seen = asyncio.run(run(one_way, Agents()))
    assert seen["ok"], seen
    full = asyncio.run(run(fault("partition", nodes, mode="full"), Agents()))
    assert full["ok"], full


@pytest.mark.parametrize("args", [{"rate_mbit": 0}, {"rate": 5}, {"rate_mbit": float("nan")}])
def test_parameters_are_checked(args: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        fault("rate", **args)
