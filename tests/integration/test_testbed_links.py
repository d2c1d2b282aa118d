"""Links of a testbed on real interfaces, without Ray: measured and configured values agree."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from rayhive.cluster.node.link import NodeLink
from rayhive.cluster.node.processes import marked
from rayhive.cluster.node.runs import Runs
from rayhive.cluster.node.tools import Toolbox
from rayhive.cluster.testbed import Testbed, namespaces, network
from rayhive.cluster.testbed.link_changes import LinkChanges
from rayhive.cluster.testbed.link_probe import measure_link, path
from rayhive.errors import ClusterError
from rayhive.faults.node_tools import Arrived, LinkChange
from rayhive.registry import FAULTS
from rayhive.spec import Link
from rayhive.spec.fault_plan import At, PlannedFault
from tests.integration.testbed_helpers import FaultTarget, bare, link_of, needs_testbed

pytestmark = needs_testbed

LINKS: tuple[dict[str, float], ...] = (
    {"rate_mbit": 50, "delay_ms": 10},
    {"rate_mbit": 10, "delay_ms": 25, "loss": 0.05},
    {"rate_mbit": 20},
)


@pytest.fixture(scope="module")
def testbed() -> Iterator[Testbed]:
    with bare(*LINKS) as made:
        yield made


def near(seen: float | None, asked: float, share: float = 0.1) -> bool:
    return seen is not None and abs(seen - asked) <= share * asked


def check(testbed: Testbed, index: int, link: Link) -> None:
    """Check that the measured link is within 10 % of the configured one."""
    seen = measure_link(testbed.state, testbed.nodes[index], link)
    assert link.rate_mbit is not None
    assert near(seen.rate_up_mbit, link.rate_mbit), seen
    assert near(seen.rate_down_mbit, link.rate_mbit), seen
    assert (
        seen.rtt_ms is not None and abs(seen.rtt_ms - 2 * link.delay_ms) < 0.2 * link.delay_ms + 1
    )
    # 200 of the probes are lost on the way in each direction: four deviations are 28 %.
    assert near(seen.loss_up, link.loss, 0.28) and near(seen.loss_down, link.loss, 0.28), seen


@pytest.mark.parametrize("index", range(len(LINKS)))
def test_a_measured_link_agrees_with_its_configuration(testbed: Testbed, index: int) -> None:
    check(testbed, index, Link.model_validate(LINKS[index]))


@pytest.mark.slow
def test_a_link_changes_at_run_time_and_comes_back(testbed: Testbed) -> None:
    cable = testbed.link(2)
    steps = (
        {"rate_mbit": 40, "delay_ms": 5},
        {"rate_mbit": 40, "delay_ms": 15, "loss": 0.1},
        {"rate_mbit": 5, "delay_ms": 15},
        {"rate_mbit": 20},
    )
    for step in steps:
        link = Link.model_validate(step)
        cable.set(link)
        assert cable.now == link
        check(testbed, 2, link)
        if not testbed.state.netem:
            assert bool(cable.relays()) == bool(link.delay_ms)


def test_changes_at_the_same_time_add_up(testbed: Testbed) -> None:
    link = link_of(testbed, 2)

    async def go() -> None:
        changes = [LinkChange(rate_mbit=30.0), LinkChange(delay_ms=5.0), LinkChange(loss=0.5)]
        await asyncio.gather(*map(link.change, changes, "abc"))
        assert await link.now() == Link(rate_mbit=30, delay_ms=5, loss=0.5)
        await asyncio.gather(*map(link.undo, "abc"))
        assert await link.now() == Link.model_validate(LINKS[2])

    asyncio.run(go())


def test_a_link_without_a_rate_is_not_shaped(testbed: Testbed) -> None:
    link = link_of(testbed, 2)

    async def go() -> None:
        testbed.link(2).set(Link())
        free = (await link.measure("rate")).rate_up_mbit
        await link.restore()
        shaped = (await link.measure("rate")).rate_up_mbit
        assert free is not None and shaped is not None and free > 2 * shaped

    asyncio.run(go())


def test_counters_count_the_passed_bytes(testbed: Testbed) -> None:
    cable = testbed.link(2)
    before = cable.counters()
    with path(testbed.state, testbed.nodes[2]) as ends:
        assert ends.reach(50) == (50, 50)
    after = cable.counters()
    assert {key: after[key] - before[key] for key in before} == {
        "rx_packets": 50,
        "tx_packets": 50,
        "rx_bytes": 50 * 64,
        "tx_bytes": 50 * 64,
        "dropped": 0,
    }


def test_a_cut_takes_one_direction_and_heals(testbed: Testbed) -> None:
    link, other = link_of(testbed, 0), testbed.nodes[2].data_address

    def arrived(out: int, back: int) -> Arrived:
        return Arrived(sent=10, out=out, back=back)

    async def go() -> None:
        assert await link.reach(other) == arrived(10, 10)
        await link.cut("f0", (), "out")
        await link.cut("f1", (), "in")
        assert await link.reach(other) == arrived(0, 0)
        assert await link.mend("f0") == 10
        assert await link.reach(other) == arrived(10, 0)
        assert await link.mend("f1") == 20
        assert await link.mend("f1") == 0
        await link.cut("f2", [other])
        third = testbed.nodes[1].data_address
        assert await link.reach(other) == arrived(10, 10)
        assert await link.reach(third) == arrived(0, 0)
        await link.mend("f2")

    asyncio.run(go())
    assert network.cuts(testbed.state.switch) == []


def test_an_agent_that_recovers_leaves_what_a_living_one_did(testbed: Testbed) -> None:
    """Agents belong to studies, and several studies may share a node."""
    node, link = testbed.nodes[2], link_of(testbed, 2)
    alive, dead = marked("f0", os.getppid()), f"{os.getppid()}.1-f0"
    pair = (node.data_address, testbed.nodes[0].data_address)
    changes = LinkChanges(testbed.state, node)
    for maker, change in ((alive, {"rate_mbit": 5.0}), (dead, {"delay_ms": 5.0})):
        network.cut(testbed.state.switch, f"2-{maker}", [pair])
        changes.add(maker, change)

    async def go() -> None:
        await link.cut("f1")
        await Toolbox(Runs(), link).recover()
        assert network.cuts(testbed.state.switch) == [f"2-{alive}"]
        assert await link.now() == Link(rate_mbit=5.0)
        assert network.mend(testbed.state.switch, f"2-{alive}") == 0
        changes.remove(alive)
        assert await link.now() == Link.model_validate(LINKS[2])

    asyncio.run(go())


def test_a_cut_reaches_established_connections(testbed: Testbed) -> None:
    first, second = testbed.nodes[0], testbed.nodes[2]

    def listen() -> socket.socket:
        return socket.create_server((second.data_address, 0))

    with namespaces.inside(second.namespace, listen) as server:
        to = server.getsockname()
        near_end = namespaces.inside(first.namespace, lambda: socket.create_connection(to, 10))
        far_end, _ = server.accept()
    with near_end, far_end:
        far_end.settimeout(0.5)
        near_end.sendall(b"before")
        assert far_end.recv(100) == b"before"
        pair = (first.data_address, second.data_address)
        network.cut(testbed.state.switch, "0-f0", [pair])
        near_end.sendall(b"during")
        with pytest.raises(TimeoutError):
            far_end.recv(100)
        far_end.sendall(b"the other way")
        assert near_end.recv(100) == b"the other way"
        assert network.mend(testbed.state.switch, "0-f0") > 0
        far_end.settimeout(30)
        assert far_end.recv(100) == b"during"


@pytest.mark.parametrize(
    ("kind", "args"),
    [
        ("rate", {"rate_mbit": 3.0}),
        ("delay", {"delay_ms": 60.0}),
        ("loss", {"loss": 0.2}),
        ("partition", {"mode": "full"}),
        ("partition", {"mode": "one-way", "direction": "in"}),
        ("partition", {"mode": "halves"}),
        ("flapping", {"down_s": 0.4, "up_s": 0.4}),
    ],
)
def test_faults_take_effect_and_heal(testbed: Testbed, kind: str, args: dict[str, Any]) -> None:
    who = ("node-0", "node-2") if args.get("mode") == "halves" else ("node-2",)
    planned = PlannedFault(id="f7", kind=kind, who=who, at=At(round=1), args=args)

    async def go() -> None:
        swarm: Any = FaultTarget(testbed)
        fault = FAULTS.get(kind)(planned)
        await fault.setup(swarm)
        await fault.inject(swarm, who)
        proof = await fault.verify(swarm, who)
        assert proof.ok, proof.what
        await fault.heal(swarm, who)
        # The same proof fails as soon as the fault is gone.
        if kind in ("rate", "delay", "loss"):
            before = Link.model_validate(LINKS[2])
            assert not fault.proves(await link_of(testbed, 2).measure(), before)
        await fault.teardown(swarm)

    asyncio.run(go())
    assert network.cuts(testbed.state.switch) == []
    assert testbed.link(2).now == Link.model_validate(LINKS[2])
    with path(testbed.state, testbed.nodes[2], testbed.nodes[0]) as ends:
        assert ends.reach(10) == (10, 10)


def test_elsewhere_the_tools_refuse() -> None:
    with pytest.raises(ClusterError, match="no link of its own"):
        asyncio.run(NodeLink().change(LinkChange(rate_mbit=1.0)))
