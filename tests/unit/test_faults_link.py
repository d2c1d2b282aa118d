"""Link faults against a swarm whose tools can be made to do nothing."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import rayhive.faults  # noqa: F401  (fills the registry)
from rayhive.errors import RayhiveError
from rayhive.faults.kind import FaultKind
from rayhive.registry import FAULTS
from rayhive.spec.fault_plan import At, PlannedFault

ADDRESSES = {f"node-{i}": f"10.0.0.{i}" for i in range(3)}
MADE = {"rate_mbit": 100.0, "delay_ms": 10.0, "loss": 0.0}


class Agents:
    """Agents of three nodes with links in memory.

    Args:
        idle: The tools say that they did it, and do nothing.
    """

    def __init__(self, idle: bool = False) -> None:
        self.idle = idle
        self.links = {node: dict(MADE) for node in ADDRESSES}
        self.cuts: dict[str, dict[str, tuple[list[str], str]]] = {node: {} for node in ADDRESSES}
        self.flaps: dict[str, list[dict[str, Any]]] = {}

    async def agent(self, node: str, method: str, *args: Any) -> Any:
        return getattr(self, method)(node, *args)

    def data_address(self, node: str) -> str:
        return ADDRESSES[node]

    def link(self, node: str) -> dict[str, Any]:
        return dict(self.links[node])

    def set_link(self, node: str, *values: float | None) -> dict[str, Any]:
        before = self.link(node)
        if not self.idle:
            given = zip(MADE, values, strict=True)
            self.links[node] |= {key: value for key, value in given if value is not None}
        return before

    def restore_link(self, node: str, *keys: str) -> dict[str, Any]:
        self.links[node] |= {key: MADE[key] for key in keys}
        return self.link(node)

    def measure_link(self, node: str, *what: str) -> dict[str, Any]:
        link = self.links[node]
        return {
            "rate_up_mbit": link["rate_mbit"],
            "rate_down_mbit": link["rate_mbit"],
            "rtt_ms": 2 * link["delay_ms"] + 0.3,
            "loss_up": link["loss"],
            "loss_down": link["loss"],
        }

    def cut(self, node: str, name: str, keep: list[str], direction: str) -> list[str]:
        others = [a for n, a in ADDRESSES.items() if n != node and a not in keep]
        if not self.idle:
            self.cuts[node][name] = (others, direction)
        return others

    def mend(self, node: str, name: str) -> int:
        return 0 if self.cuts[node].pop(name, None) is None else 7

    def reach(self, node: str, address: str) -> dict[str, Any]:
        other = next(n for n, a in ADDRESSES.items() if a == address)
        ways = {"sent": 10, "out": 10, "in": 10}
        for here, there, names in ((node, other, ("out", "in")), (other, node, ("in", "out"))):
            for others, direction in self.cuts[here].values():
                if ADDRESSES[there] in others:
                    for way, name in zip(("out", "in"), names, strict=True):
                        if direction in (way, "both"):
                            ways[name] = 0
        return ways

    def flap(self, node: str, name: str, *times: Any) -> None:
        down, up = {"sent": 5, "out": 0, "in": 0}, {"sent": 5, "out": 5, "in": 5}
        self.flaps[node] = [up, up] if self.idle else [down, up]

    def flap_log(self, node: str, name: str, *wait: Any) -> list[dict[str, Any]]:
        return self.flaps[node]

    def settle(self, node: str, name: str) -> int:
        return len(self.flaps.pop(node))


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
        assert not any(swarm.cuts.values()) and not swarm.flaps

    asyncio.run(go())


@pytest.mark.parametrize(("kind", "args"), KINDS)
def test_tools_that_did_nothing_prove_nothing(kind: str, args: dict[str, Any]) -> None:
    seen = asyncio.run(run(fault(kind, **args), Agents(idle=True)))
    assert not seen["ok"], seen


@pytest.mark.parametrize(("kind", "args"), KINDS)
def test_what_is_not_healed_ends_with_the_replicate(kind: str, args: dict[str, Any]) -> None:
    async def go() -> None:
        swarm = Agents()
        made = fault(kind, **args)
        await run(made, swarm)
        await made.teardown(swarm)
        assert all(link == MADE for link in swarm.links.values())
        assert not any(swarm.cuts.values()) and not swarm.flaps

    asyncio.run(go())


@pytest.mark.parametrize("kind", ["rate", "delay", "loss", "partition", "flapping"])
def test_a_fault_that_was_never_injected_tears_nothing_down(kind: str) -> None:
    asyncio.run(fault(kind).teardown(Agents()))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "args"), [("rate", {"rate_mbit": 100.0}), ("delay", {"delay_ms": 10.0})]
)
def test_a_link_that_is_as_bad_already_is_refused(kind: str, args: dict[str, Any]) -> None:
    with pytest.raises(RayhiveError, match="no worse"):
        asyncio.run(run(fault(kind, **args), Agents()))


def test_everybody_on_one_side_is_no_partition() -> None:
    with pytest.raises(RayhiveError, match="no node"):
        asyncio.run(run(fault("partition", tuple(ADDRESSES), mode="halves"), Agents()))


def test_a_cut_that_takes_too_much_is_no_proof() -> None:
    """A one-way partition that cuts both ways, and halves that lose their own."""

    class TooMuch(Agents):
        def cut(self, node: str, name: str, keep: list[str], direction: str) -> list[str]:
            return super().cut(node, name, [], "both")

    one_way = fault("partition", mode="one-way")
    assert not asyncio.run(run(one_way, TooMuch()))["ok"]
    halves = fault("partition", ("node-0", "node-1"), mode="halves")
    assert not asyncio.run(run(halves, TooMuch()))["ok"]


@pytest.mark.parametrize("args", [{"rate_mbit": 0}, {"rate": 5}, {"rate_mbit": float("nan")}])
def test_parameters_are_checked(args: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        fault("rate", **args)
