"""What a swarm says of itself while peers come and go, and what becomes of nodes and links."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rayhive.cluster.node import link_faults, raylets
from rayhive.cluster.node.link_faults import LinkTools
from rayhive.cluster.replicate import swarm
from rayhive.cluster.replicate.fault_target import CAUSE, SwarmTarget
from rayhive.cluster.replicate.swarm import Swarm
from rayhive.cluster.testbed import firewall
from rayhive.errors import ClusterError
from tests.fixtures.logs import make_spec


def target(**lives: Any) -> Any:
    """Return the target of peers of which something is known: state and samples per second."""
    made: Any = SwarmTarget.__new__(SwarmTarget)
    made._lives = {slot: [SimpleNamespace(name=f"{slot}.1")] for slot in lives}
    records = {
        f"{slot}.1": SimpleNamespace(lives=True, state=state, samples_per_s=rate)
        for slot, (state, rate) in lives.items()
    }
    made._peer_table = SimpleNamespace(peers=records)
    made._ready, made._waiting, made._latest = ["b.1", "a.1"], [], {}
    made._errands = set()
    return made


@pytest.mark.parametrize("role", ["slowest", "leader"])
def test_a_role_goes_to_one_that_trains(role: str) -> None:
    peers = target(a=("training", 50.0), b=("starting", None), c=("training", None))
    assert peers.training() == ["a", "c"]
    assert peers.role(role) == "a"
    with pytest.raises(ClusterError, match=f"no peer is left to be the {role}"):
        target(b=("starting", None)).role(role)


def test_events_are_counted_also_of_a_peer_that_has_not_joined_yet() -> None:
    async def body() -> None:
        peers = target(a=("training", 1.0))
        second = asyncio.ensure_future(peers.event("sabotaged", "z", 10, count=2, fault="f0"))
        await asyncio.sleep(0)
        for fault, round_ in (("f1", 1), ("f0", 2), ("f0", 3), ("f0", 4)):
            for slot in ("a", "z"):
                event = {"kind": "sabotaged", "fault": fault, "round": round_, "peer": slot}
                peers.heard(slot, event)
        found = await second
        assert found is not None and (found["peer"], found["round"]) == ("z", 3)

    asyncio.run(body())


def test_a_node_is_not_started_twice_unless_it_was_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    began: list[str] = []
    going = asyncio.Event()
    faults = [ClusterError("it does not start")]

    async def start(self: Any, node: str) -> None:
        began.append(node)
        await going.wait()
        if len(began) == 2 and faults:
            raise faults.pop()

    monkeypatch.setattr(SwarmTarget, "_start_node", start)
    monkeypatch.setattr(SwarmTarget, "peers_on", lambda self, node: [])
    monkeypatch.setattr(SwarmTarget, "_node", lambda self, node: node)
    monkeypatch.setattr(raylets, "kill", lambda node: None)

    async def body() -> None:
        peers = target()
        peers._starting = {}
        with pytest.raises(asyncio.TimeoutError):  # a heal that is given up
            await asyncio.wait_for(peers.start_node("node-1"), 0.05)
        going.set()
        await peers.start_node("node-1")
        await asyncio.sleep(0)
        await peers.start_node("node-1")  # the heal was given up after the node had started
        assert began == ["node-1"]
        await peers.kill_node("node-1")
        with pytest.raises(ClusterError, match="does not start"):
            await peers.start_node("node-1")
        await peers.start_node("node-1")
        assert began == ["node-1"] * 3

    asyncio.run(body())


def test_a_peer_has_a_node_from_the_moment_on_when_it_is_about_to_start() -> None:
    made: Any = Swarm.__new__(Swarm)
    made._nodes, made._actors = {"peer-1": "before"}, {"peer-1": "actor"}
    seen: list[str] = []

    async def close(actor: Any) -> None:
        seen.append(made.node_of("peer-1.1"))
        raise RuntimeError("far enough")

    made._close = close
    peer = SimpleNamespace(name="peer-1.1", slot="peer-1")
    with pytest.raises(RuntimeError, match="far enough"):
        asyncio.run(made.spawn_later(peer, "after", lambda *_: None))
    assert seen == ["after"]


def _agent(**answers: Any) -> Any:
    async def call(key: str, method: str, *_: Any) -> Any:
        if isinstance(answers[method], Exception):
            raise answers[method]
        return answers[method]

    return SimpleNamespace(call=SimpleNamespace(remote=call))


@pytest.mark.parametrize(("alive", "left"), [(["n"], 1), ([], 0)])
def test_an_agent_that_does_not_answer_has_cleared_nothing(
    monkeypatch: pytest.MonkeyPatch, alive: list[str], left: int
) -> None:
    monkeypatch.setattr(raylets, "alive", lambda: alive)
    made: Any = Swarm.__new__(Swarm)
    made._actors, made._pumps, made._nodes, made._group = {}, [], {}, None
    made._spec = make_spec()
    silent = _agent(cleanup=asyncio.TimeoutError(), orphans=[])
    tidy = _agent(cleanup=[], orphans=["/dev/shm/x"])
    made._agents = {"n": silent, "m": tidy}
    found = asyncio.run(made.clear())
    assert len(found) == left + 1 and found[-1] == "/dev/shm/x"
    assert all("nobody knows what is on node n" in text for text in found[:left])


def test_a_testbed_that_lacks_a_node_is_no_place_for_a_replicate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(swarm.raylets, "missing", lambda: [2])
    made = Swarm.__new__(Swarm)
    with pytest.raises(ClusterError, match="node 2 of the testbed is down"):
        asyncio.run(made.place(1.0))


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
        "all_nodes",
        lambda: [
            {"Alive": alive, "Labels": {raylets.NUMBER_LABEL: number} if number else {}}
            for alive, number in known
        ],
    )
    assert raylets.missing() == [1]


def test_whatever_was_done_to_a_link_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[tuple[str, str]] = []
    monkeypatch.setattr(
        firewall, "cuts", lambda switch: ["1-partition", "11-partition", "2-x", "1-y"]
    )
    monkeypatch.setattr(firewall, "mend", lambda switch, name: done.append(("mend", name)))

    class Tools(LinkTools):
        def _place(self) -> tuple[str | None, str | None]:
            return "folder", "1"

        async def _known(self) -> Any:
            return SimpleNamespace(switch="s"), SimpleNamespace(index=1)

        async def restore_link(self, *keys: str) -> dict[str, Any]:
            done.append(("restore", ""))
            return {}

        async def settle(self, name: str) -> int:
            done.append(("settle", name))
            self._flaps.pop(name)
            return 0

    tools = Tools()
    tools._flaps = {"f3": link_faults._Flapping()}
    asyncio.run(tools.heal_link())
    expected = [("settle", "f3"), ("mend", "1-partition"), ("mend", "1-y"), ("restore", "")]
    assert done == expected

    class Elsewhere(LinkTools):
        def _place(self) -> tuple[str | None, str | None]:
            return None, None

    asyncio.run(Elsewhere().heal_link())


def test_a_command_names_the_fault_on_whose_behalf_it_is_given() -> None:
    sent: list[tuple[list[str], str, dict[str, Any]]] = []

    async def command(names: list[str], do: str, **fields: Any) -> None:
        sent.append((names, do, fields))

    async def body() -> None:
        peers = target(a=("training", 1.0))
        peers._swarm = SimpleNamespace(command=command)
        CAUSE.set("f3")
        await asyncio.gather(peers.command("a", "notice", deadline_s=2.0))

    asyncio.run(body())
    assert sent == [(["a.1"], "notice", {"fault": "f3", "deadline_s": 2.0})]
