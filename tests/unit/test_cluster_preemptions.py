"""Real notices about nodes: which peers leave, and what becomes of the replicate."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from rayhive.cluster.node import raylets
from rayhive.cluster.node.notices.base import NodeNotice
from rayhive.cluster.replicate.peer_table import PeerTable
from rayhive.cluster.replicate.preemptions import Preemptions
from rayhive.errors import ClusterError
from rayhive.events import Event, NodeNoticed
from rayhive.spec.commands import Command, GiveNotice, Leave
from rayhive.spec.study import PreemptionConfig

CERTAIN = NodeNotice("aws", "spot instance-action: terminate", 100.0)
RISK = NodeNotice("aws", "rebalance recommendation", certain=False)
DRAIN = NodeNotice("ray", "node drain")


@dataclass
class Swarm:
    """Peers 0 and 1 on node A, peer 2 on node B."""

    sent: list[tuple[list[str], Command]] = field(default_factory=list)

    def node_of(self, name: str) -> str:
        return "B" if name == "peer-2" else "A"

    async def command(self, who: Sequence[str], command: Command) -> None:
        self.sent.append((list(who), command))


class Agents:
    """Agent of node A, which answers with the given notices, and then is gone."""

    def __init__(self, notices: Sequence[NodeNotice]) -> None:
        self.notices = list(notices)
        self.over = asyncio.Event()

    async def call(self, node: str, method: object, after: int, timeout: float) -> Any:
        if after < len(self.notices):
            return self.notices[after : after + 1]
        self.over.set()
        raise ClusterError("gone")


@dataclass
class Taken:
    preemptions: Preemptions
    sent: list[tuple[list[str], Command]]
    events: list[Event]
    expected: list[str]
    drained: list[str]


def take(
    monkeypatch: pytest.MonkeyPatch,
    notices: Sequence[NodeNotice],
    home: str = "C",
    own_drains: Sequence[str] = (),
    **config: Any,
) -> Taken:
    """Return what becomes of notices about node A."""
    drained: list[str] = []
    monkeypatch.setattr(raylets, "alive", lambda: ["B", "C"])
    monkeypatch.setattr(raylets, "drain", lambda node, deadline_ms: drained.append(node))
    table = PeerTable(["peer-0", "peer-1", "peer-2"])
    for name in ("peer-0", "peer-2"):
        table.spawned(name, 1, "host")
    swarm, events = Swarm(), list[Event]()

    async def run() -> Preemptions:
        agents = Agents(notices)
        made = Preemptions(
            PreemptionConfig(**config),
            swarm,  # type: ignore[arg-type]
            agents,  # type: ignore[arg-type]
            table,
            events.append,
            lambda: None,
            home,
        )
        made.own_drains.update(own_drains)
        agents.on_agent("A")  # type: ignore[attr-defined]
        await asyncio.wait_for(agents.over.wait(), 60.0)
        await made.close()
        return made

    preemptions = asyncio.run(run())
    expected = [name for name, peer in table.peers.items() if peer.loss_expected]
    return Taken(preemptions, swarm.sent, events, expected, drained)


def test_a_notice_reaches_the_living_peers_of_its_node_and_ray(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken = take(monkeypatch, [CERTAIN])
    assert taken.sent == [(["peer-0"], GiveNotice(deadline_s=100.0, source="aws"))]
    assert taken.expected == ["peer-0"] and taken.drained == ["A"]
    (event,) = taken.events
    assert isinstance(event, NodeNoticed)
    assert (event.node, event.source, event.what) == ("A", CERTAIN.source, CERTAIN.what)
    assert (event.deadline_s, event.certain, event.lives, event.drained) == (
        100.0,
        True,
        ["peer-0"],
        True,
    )


def test_a_replicate_is_repeated_unless_the_study_asks_to_continue(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert take(monkeypatch, []).preemptions.problem(training=True) is None
    cause = take(monkeypatch, [CERTAIN]).preemptions.problem(training=True)
    assert cause == "node A is taken away: aws, spot instance-action: terminate"
    going_on = take(monkeypatch, [CERTAIN], then="continue").preemptions
    assert going_on.problem(training=True) is None
    assert going_on.problem(training=False) == going_on.cause == cause


def test_a_risk_is_recorded_and_makes_peers_leave_only_on_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken = take(monkeypatch, [RISK])
    assert (taken.sent, taken.expected, taken.drained) == ([], [], [])
    assert taken.preemptions.cause is None
    (event,) = taken.events
    assert isinstance(event, NodeNoticed) and not event.certain and event.lives == []
    taken = take(monkeypatch, [RISK, CERTAIN], on_risk="leave")
    assert [command for _, command in taken.sent] == [
        Leave(source="aws"),
        GiveNotice(deadline_s=100.0, source="aws"),
    ]
    assert take(monkeypatch, [RISK], on_risk="leave").drained == ["A"], "else it is taken again"
    own = take(monkeypatch, [RISK], on_risk="leave", home="A")
    assert (own.sent, own.drained, own.preemptions.cause) == ([], [], None), "it cannot be avoided"


def test_a_drain_by_a_fault_of_the_plan_is_no_real_notice(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = take(monkeypatch, [DRAIN], own_drains=["A"])
    assert (taken.sent, taken.events, taken.preemptions.cause) == ([], [], None)
    assert len(take(monkeypatch, [CERTAIN, DRAIN]).events) == 1, "the drain follows from the other"
    taken = take(monkeypatch, [DRAIN], own_drains=["B"])
    assert taken.sent == [(["peer-0"], Leave(source="ray"))]
    assert taken.drained == [], "Ray drains it already"


def test_a_lost_replicate_waits_for_the_end_of_its_own_node(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = time.monotonic()
    assert take(monkeypatch, [CERTAIN]).preemptions.hold_until < now
    taken = take(monkeypatch, [CERTAIN], home="A")
    assert taken.preemptions.hold_until > now + 100.0
    assert taken.drained == [], "the driver needs the node"
    (event,) = taken.events
    assert isinstance(event, NodeNoticed) and not event.drained


def test_without_sources_no_agent_is_asked() -> None:
    agents: Any = SimpleNamespace(on_agent=None)
    for sources, asked in ((("aws",), True), ((), False)):
        config = PreemptionConfig(sources=sources)
        swarm: Any = Swarm()
        Preemptions(config, swarm, agents, PeerTable([]), print, lambda: None, "C")
        assert (agents.on_agent is not None) == asked
        agents.on_agent = None
