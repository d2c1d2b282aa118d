"""Swarm for tests of the nemesis, whose peers do what the test says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from rayhive.cluster.replicate.nemesis import Nemesis
from rayhive.events import Event
from rayhive.spec.fault_plan import At, FaultPlan, PlannedFault


class Swarm:
    """Peers whose states the test sets, on a node each or on one node."""

    one_node = False

    def __init__(self, peers: int = 4) -> None:
        self.names = [f"peer-{n}" for n in range(peers)]
        self.trainers, self.missing = set(self.names), set[str]()
        self.events: list[Event] = []

    def trains(self, peer: str) -> bool:
        return peer in self.trainers

    def training(self) -> list[str]:
        return sorted(self.trainers)

    def down(self) -> set[str]:
        return self.missing

    def home(self, node: str) -> list[str]:
        return self.names if self.one_node else [f"peer-{node.removeprefix('node-')}"]

    def node_of(self, peer: str) -> str:
        return f"node-{peer.removeprefix('peer-')}"

    def role(self, name: str) -> str:
        return min(self.trainers)

    def replicas(self, who: list[str]) -> list[str]:
        return who

    def incarnations_of(self, who: list[str]) -> list[str]:
        return who

    def write(self, event: Event) -> None:
        self.events.append(event)

    def said(self, kind: str) -> list[str]:
        return [event["fault"] for event in self.events if event.kind == kind]


def planned(number: int, kind: str, who: str, **fields: Any) -> PlannedFault:
    at = fields.pop("at", At(seconds=0.0))
    return PlannedFault(id=f"f{number}", kind=kind, who=(who,), at=at, **fields)


def run(body: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(body, 10))


async def until(clock: Nemesis, swarm: Swarm, kind: str, *faults: str) -> None:
    """Tell the clock again and again that a peer did something, until these faults are told."""
    while sorted(swarm.said(kind)) != sorted(faults):
        clock.heard(0)
        await asyncio.sleep(0)


async def settled(clock: Nemesis) -> None:
    """Let the clock do all that it can do now."""
    for _ in range(50):
        clock.heard(0)
        await asyncio.sleep(0.001)


@asynccontextmanager
async def started(swarm: Swarm, *faults: PlannedFault) -> AsyncIterator[Nemesis]:
    """Yield the started clock of a plan, and close it."""
    clock = Nemesis(FaultPlan(peers=4, faults=faults), swarm, swarm.write)  # type: ignore[arg-type]
    clock.start()
    yield clock
    await clock.close()
