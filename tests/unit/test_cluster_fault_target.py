"""The swarm as faults see it, while peers come and go and nodes are restarted."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rayhive.cluster import actors
from rayhive.cluster.node import raylets
from rayhive.cluster.node.agent import AgentOptions, NodeAgent, PreparedNode
from rayhive.cluster.node.link import NodeLink
from rayhive.cluster.node.processes import marked
from rayhive.cluster.node.runs import Runs
from rayhive.cluster.node.tools import Toolbox
from rayhive.cluster.replicate import node_agents
from rayhive.cluster.replicate import swarm as swarm_module
from rayhive.cluster.replicate.fault_target import CAUSE, SwarmTarget
from rayhive.cluster.replicate.node_agents import NodeAgents
from rayhive.cluster.replicate.peer_pool import PeerPool
from rayhive.cluster.replicate.peer_table import PeerTable
from rayhive.cluster.replicate.placement import Room
from rayhive.cluster.replicate.reservation import Reservation
from rayhive.cluster.replicate.swarm import Swarm
from rayhive.cluster.testbed import network
from rayhive.errors import ClusterError
from rayhive.events import FaultActed, PeerReady, Round, TrainingStarted
from rayhive.spec import Link, SwarmConfig
from rayhive.spec.commands import Command, GiveNotice
from tests.fixtures.logs import make_spec

PEERS = 3
SPEC = make_spec(swarm=SwarmConfig(peers=PEERS, target_batch_size=128))


class FakeSwarm:
    """Peers on a node each, that remember the commands that they get."""

    def __init__(self) -> None:
        self.commands: list[tuple[list[str], Command]] = []

    def reserved_node(self, peer: int) -> str:
        return f"id-{peer}"

    def node_of(self, name: str) -> str:
        return f"id-{name.partition('.')[0].removeprefix('peer-')}"

    async def command(self, names: list[str], command: Command) -> None:
        self.commands.append((names, command))


def target(*training: float | None, swarm: Any = None) -> SwarmTarget:
    """Return the target of peers of which some train, at these rates [samples/s]."""
    table = PeerTable([f"peer-{number}" for number in range(PEERS)])
    made = SwarmTarget(SPEC, swarm or FakeSwarm(), Any, table, Any)  # type: ignore[arg-type]
    for number, name in enumerate(table.peers):
        table.spawned(name, 100 + number, "host")
    for number, rate in reversed(list(enumerate(training))):  # the last one is ready first
        name = f"peer-{number}"
        made.heard(PeerReady(peer=name))
        if rate is not None:
            table.take(name, TrainingStarted(peer=name))
            if rate:
                table.take(name, Round(round=1, samples=int(rate), outcome="averaged", clock_s=1.0))
    return made


@pytest.mark.parametrize(("role", "peer"), [("slowest", "peer-0"), ("leader", "peer-2")])
def test_a_role_goes_to_a_peer_that_trains(role: str, peer: str) -> None:
    peers = target(50, None, 0)
    assert peers.training() == ["peer-0", "peer-2"]
    assert peers.role(role) == peer
    with pytest.raises(ClusterError, match=f"no peer is left to be the {role}"):
        target(None).role(role)


def test_events_are_counted_also_of_a_peer_that_has_not_joined_yet() -> None:
    async def body() -> None:
        peers = target(1)
        second = asyncio.ensure_future(peers.event(FaultActed, "peer-9", 10, count=2, fault="f0"))
        await asyncio.sleep(0)
        for fault, round_ in (("f1", 1), ("f0", 2), ("f0", 3), ("f0", 4)):
            for peer in ("peer-0", "peer-9"):
                peers.heard(FaultActed(fault=fault, round=round_, peer=peer))
        found = await second
        assert found is not None and (found.peer, found.round) == ("peer-9", 3)

    asyncio.run(body())


def test_a_node_is_not_started_twice_unless_it_was_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    began: list[str] = []
    faults = [ClusterError("it does not start")]
    slow = [0.2]

    def start(node: str) -> str:
        began.append(node)
        if slow:
            time.sleep(slow.pop())
        if len(began) == 2 and faults:
            raise faults.pop()
        return node

    monkeypatch.setattr(raylets, "start", start)
    monkeypatch.setattr(raylets, "kill", lambda node: None)

    async def body() -> None:
        peers = target()
        with pytest.raises(asyncio.TimeoutError):  # a heal that is given up
            await asyncio.wait_for(peers.start_node("node-1"), 0.05)
        await peers.start_node("node-1")
        await asyncio.sleep(0)
        await peers.start_node("node-1")  # the heal was given up after the node had started
        assert len(began) == 1
        await peers.kill_node("node-1")
        with pytest.raises(ClusterError, match="does not start"):
            await peers.start_node("node-1")
        await peers.start_node("node-1")
        assert len(began) == 3

    monkeypatch.setattr(FakeSwarm, "node_of", lambda self, name: "id-0")
    asyncio.run(body())


def test_a_node_is_started_after_its_end_which_a_cancelled_fault_left_running(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    order: list[str] = []
    dies = threading.Event()

    def kill(node: str) -> None:
        assert dies.wait(10.0)
        order.append("killed")

    def start(node: str) -> str:
        order.append("started")
        return node

    monkeypatch.setattr(raylets, "kill", kill)
    monkeypatch.setattr(raylets, "start", start)
    monkeypatch.setattr(FakeSwarm, "node_of", lambda self, name: "id-0")

    async def body() -> None:
        peers = target()
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(peers.kill_node("node-1"), 0.05)
        starting = asyncio.ensure_future(peers.start_node("node-1"))
        await asyncio.sleep(0)
        dies.set()
        await starting
        assert order == ["killed", "started"]

    asyncio.run(body())


class Placed(Reservation):
    """Room for the peers, without a cluster."""

    def __init__(self, *nodes: str) -> None:
        super().__init__(SPEC)
        self.nodes = list(nodes)

    def actor_options(self, peer: int, node: str) -> dict[str, Any]:
        return {}


def test_a_peer_has_a_node_before_its_process_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    swarm: Swarm

    class Agents(NodeAgents):
        async def prepare(self, node: str, peers: Sequence[str]) -> PreparedNode:
            seen.append(swarm.node_of("peer-1.1"))
            raise RuntimeError("far enough")

    async def listen(name: str, item: object) -> None:
        pass

    monkeypatch.setattr(swarm_module, "create_actor", lambda *given: SimpleNamespace())
    agents = Agents(SPEC, AgentOptions(), 60.0, "supervisor")
    swarm = Swarm(SPEC, Placed("a", "b", "c"), agents, listen, 60.0, "a", PeerPool())
    with pytest.raises(RuntimeError, match="far enough"):
        asyncio.run(swarm.spawn_later(SPEC.peer_spec(1, 1), "after", lambda *_: None))
    assert seen == ["after"]


@pytest.mark.parametrize(("home", "address"), [("w", "127.0.0.1"), ("h", "10.0.0.1")])
def test_peers_reach_a_supervisor_on_another_node(
    home: str, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A head without room for peers, and all of them on one worker."""
    rooms = [Room("h", 0.0, address="10.0.0.1"), Room("w", 4.0, address="10.0.0.2")]
    monkeypatch.setattr(raylets, "nodes", lambda: rooms)

    async def listen(name: str, item: object) -> None:
        pass

    agents = NodeAgents(SPEC, AgentOptions(), 60.0, "supervisor")
    swarm = Swarm(SPEC, Placed("w", "w", "w"), agents, listen, 60.0, home, PeerPool())
    assert swarm.home_address() == address


def _agent(**answers: Any) -> Any:
    async def call(key: str, method: str, *_: Any) -> Any:
        if isinstance(answers[method], Exception):
            raise answers[method]
        return answers[method]

    async def prepare(
        run_id: str, peers: list[str], supervisor: str, sources: object = ()
    ) -> PreparedNode:
        return PreparedNode("socket", {}, {})

    return SimpleNamespace(
        call=SimpleNamespace(remote=call), prepare=SimpleNamespace(remote=prepare)
    )


@pytest.mark.parametrize(("alive", "left"), [(["n"], 1), ([], 0)])
def test_an_agent_that_does_not_answer_has_cleared_nothing(
    monkeypatch: pytest.MonkeyPatch, alive: list[str], left: int
) -> None:
    monkeypatch.setattr(raylets, "alive", lambda: alive)
    monkeypatch.setattr(actors, "agent_name", lambda study, node: node)
    known = {
        "n": _agent(cleanup=asyncio.TimeoutError(), orphans=[]),
        "m": _agent(cleanup=[], orphans=["/dev/shm/x"]),
    }
    monkeypatch.setattr(actors, "detached", lambda actor, name, node, options: known[node])
    agents = NodeAgents(SPEC, AgentOptions(), 60.0, "supervisor")

    async def body() -> list[str]:
        for node in known:
            await agents.prepare(node, [])
        return await agents.clean()

    found = asyncio.run(body())
    assert len(found) == left + 1 and found[-1] == "/dev/shm/x"
    assert all("node n could not be checked" in text for text in found[:left])


def test_a_tool_has_more_time_for_its_answer_than_the_agent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The proof of a fault on a slow link sends and awaits many packets."""
    monkeypatch.setattr(node_agents, "ANSWER_TIMEOUT", 0.05)
    monkeypatch.setattr(actors, "agent_name", lambda study, node: node)

    async def late(*given: Any) -> dict[str, Any]:
        await asyncio.sleep(0.3)
        return {"cut": True}

    slow = _agent()
    slow.call.remote = late
    monkeypatch.setattr(actors, "detached", lambda actor, name, node, options: slow)
    agents = NodeAgents(SPEC, AgentOptions(), 60.0, "supervisor")

    async def body() -> None:
        await agents.prepare("n", [])
        with pytest.raises(ClusterError, match="no answer in time"):
            await agents.call("n", NodeAgent.ping)
        found = await agents.call("n", NodeAgent.use_tool, SPEC.run_id, "cut", "node-0", "state")
        assert found == {"cut": True}

    asyncio.run(body())


def test_a_testbed_that_lacks_a_node_is_no_place_for_a_replicate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(raylets, "missing", lambda: [2])
    with pytest.raises(ClusterError, match="node 2 of the testbed is down"):
        asyncio.run(Reservation(SPEC).place(1.0))


def test_nodes_are_missing_that_ray_does_not_have(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert raylets.missing() == []
    monkeypatch.setenv(raylets.TESTBED_VARIABLE, str(tmp_path))
    state = SimpleNamespace(nodes=[SimpleNamespace(index=number) for number in range(3)])
    monkeypatch.setattr("rayhive.cluster.testbed.state.load", lambda folder: state)
    known = [(True, "0"), (False, "1"), (True, "2"), (True, None)]
    monkeypatch.setattr(
        raylets,
        "nodes",
        lambda: [
            Room("id", 1.0, labels={raylets.NUMBER_LABEL: n} if n else {}, alive=alive)
            for alive, n in known
        ],
    )
    assert raylets.missing() == [1]


def test_whatever_dead_agents_did_to_a_link_is_undone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """An agent without replicates has nothing to keep; that of another study may have."""
    done: list[tuple[str, str]] = []
    dead, own, alive = f"{os.getppid()}.1-f0", marked("f1"), marked("f0", os.getppid())
    chains = [f"1-{dead}", f"11-{dead}", f"2-{dead}", f"1-{own}", f"1-{alive}"]
    monkeypatch.setattr(network, "cuts", lambda switch: chains)
    monkeypatch.setattr(network, "mend", lambda switch, name: done.append(("mend", name)))
    node = SimpleNamespace(index=1, link=Link(rate_mbit=5.0))
    testbed = SimpleNamespace(switch="s", node=lambda number: node, folder=tmp_path)
    monkeypatch.setattr("rayhive.cluster.testbed.state.load", lambda folder: testbed)

    class Veth:
        now = Link(rate_mbit=1.0)

        def __init__(self, *_: Any) -> None: ...

        def update(self, **link: Any) -> tuple[Link, Link]:
            done.append(("restore", str(link["rate_mbit"])))
            return Link(), Link.model_validate(link)

    monkeypatch.setattr("rayhive.cluster.testbed.link_changes.Veth", Veth)
    asyncio.run(Toolbox(Runs(), NodeLink("folder", 1)).recover())
    assert sorted(done) == sorted([("mend", f"1-{dead}"), ("mend", f"1-{own}"), ("restore", "5.0")])
    done.clear()
    asyncio.run(Toolbox(Runs(), NodeLink()).recover())
    assert done == [], "a node without a link of its own"


def test_a_command_names_the_fault_on_whose_behalf_it_is_sent() -> None:
    swarm = FakeSwarm()

    async def body() -> None:
        CAUSE.set("f3")
        await target(1, swarm=swarm).command("peer-0", GiveNotice(deadline_s=2.0))

    asyncio.run(body())
    assert swarm.commands == [(["peer-0"], GiveNotice(deadline_s=2.0, fault="f3"))]
