"""Faults on processes: their effects on real processes, and proofs that must not hold."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from rayhive.errors import RayhiveError
from rayhive.faults.steps import all_are, wait_for_states
from rayhive.spec.commands import GiveNotice
from tests.unit.fault_fakes import ROLES, FakeSwarm, planned, run, shorten


@pytest.fixture
def short_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten time limits, for proofs that must not hold; others have the limits of a user."""
    shorten(monkeypatch)


def play(scene: Coroutine[Any, Any, None]) -> None:
    asyncio.run(scene)


def test_all_processes_of_a_killed_peer_end_and_it_is_replaced_on_its_node(tmp_path: Path) -> None:
    async def scene() -> None:
        async with FakeSwarm(tmp_path) as swarm:
            kind = planned("kill")
            before = set(await swarm.process_states("peer-1"))
            proof = await run(kind, swarm)
            assert proof.ok
            assert proof.what == {"left": {"peer-1": []}, "killed": 1 + len(ROLES)}
            assert set((await swarm.process_states("peer-1")).values()) == {"gone"}
            assert swarm.living() == ["peer-0", "peer-2"]
            healed = await kind.heal(swarm, ["peer-1"])
            assert healed == {"lives": {"peer-1": "peer-1.1"}}
            assert swarm.node_of("peer-1") == "node-1"
            assert not before & set(await swarm.process_states("peer-1"))
            await kind.teardown(swarm)
            assert len(swarm.living()) == 3

    play(scene())


def test_a_replacement_may_start_on_another_node(tmp_path: Path) -> None:
    async def scene() -> None:
        async with FakeSwarm(tmp_path) as swarm:
            kind = planned("kill", where="other")
            assert (await run(kind, swarm)).ok
            await kind.heal(swarm, ["peer-1"])
            assert swarm.node_of("peer-1") == "node-0"

    play(scene())


@pytest.mark.parametrize("name", ["kill", "preempt", "pause", "kill_p2pd", "leave"])
def test_a_fault_on_a_peer_that_does_not_run_is_refused(name: str, tmp_path: Path) -> None:
    async def scene() -> None:
        async with FakeSwarm(tmp_path) as swarm:
            with pytest.raises(RayhiveError, match="no process of peer-9 runs"):
                await planned(name).inject(swarm, ["peer-0", "peer-9"])
            assert swarm.expected == []
            assert swarm.signals == []

    play(scene())


def test_a_pause_stops_all_of_a_peer_until_it_is_healed(tmp_path: Path) -> None:
    async def scene() -> None:
        async with FakeSwarm(tmp_path) as swarm:
            kind = planned("pause")
            proof = await run(kind, swarm)
            assert proof.ok
            assert list(proof.what["states"]["peer-1"].values()) == ["stopped"] * 5
            assert swarm.living() == ["peer-0", "peer-1", "peer-2"]
            assert swarm.expected == []
            done = await kind.heal(swarm, ["peer-1"])
            assert done["running"] == {"peer-1": True}
            assert set((await swarm.process_states("peer-1")).values()) == {"running"}

    play(scene())


def test_a_pause_that_is_never_healed_ends_with_the_replicate(tmp_path: Path) -> None:
    async def scene() -> None:
        async with FakeSwarm(tmp_path) as swarm:
            kind = planned("pause")
            await run(kind, swarm)
            await kind.teardown(swarm)
            states = await wait_for_states(swarm, "peer-1", all_are("running"), timeout=5.0)
            assert set(states.values()) == {"running"}

    play(scene())


@pytest.mark.usefixtures("short_limits")
def test_a_pause_of_which_one_process_runs_on_is_no_pause(tmp_path: Path) -> None:
    async def scene() -> None:
        async with FakeSwarm(tmp_path) as swarm:
            kind = planned("pause")
            await kind.inject(swarm, ["peer-1"])
            os.kill(swarm.incarnations["peer-1"].roles["p2pd"], signal.SIGCONT)
            proof = await kind.verify(swarm, ["peer-1"])
            assert not proof.ok
            await kind.teardown(swarm)

    play(scene())


def test_a_peer_may_leave_by_itself_within_its_notice(tmp_path: Path) -> None:
    async def scene() -> None:
        async with FakeSwarm(tmp_path) as swarm:
            kind = planned("preempt", notice_s=30)
            proof = await run(kind, swarm)
            assert swarm.commands == [("peer-1", GiveNotice(deadline_s=30.0))]
            seen = proof.what["peer-1"]
            assert proof.ok
            assert seen["by"] == "itself"
            assert seen["noticed"]
            assert seen["left"] == {"round": 7, "handed_over": 64, "lost": 0}
            assert swarm.signals == []

    play(scene())


def test_a_confirmation_that_arrives_after_a_short_notice_counts(tmp_path: Path) -> None:
    async def scene() -> None:
        async with FakeSwarm(tmp_path, delivery_s=0.15) as swarm:
            proof = await run(planned("preempt", notice_s=0.02), swarm)
            seen = proof.what["peer-1"]
            assert proof.ok
            assert seen["noticed"]
            assert seen["left"] == {"round": 7, "handed_over": 64, "lost": 0}

    play(scene())


def test_without_a_notice_the_peer_gets_sigterm_at_once(tmp_path: Path) -> None:
    async def scene() -> None:
        async with FakeSwarm(tmp_path) as swarm:
            proof = await run(planned("preempt", notice_s=0), swarm)
            assert proof.ok
            assert proof.what["peer-1"]["by"] == "SIGTERM"
            assert proof.what["peer-1"]["noticed"] is None
            assert swarm.commands == []

    play(scene())


@pytest.mark.usefixtures("short_limits")
def test_a_peer_that_ignores_its_notice_is_ended_and_the_proof_fails(tmp_path: Path) -> None:
    async def scene() -> None:
        async with FakeSwarm(tmp_path, rude=True) as swarm:
            proof = await run(planned("preempt", notice_s=0.2, grace_s=0.1), swarm)
            seen = proof.what["peer-1"]
            assert not proof.ok
            assert seen["gone"]
            assert not seen["noticed"]
            assert seen["left"] is None

    play(scene())


def test_a_peer_that_survives_sigterm_gets_sigkill(tmp_path: Path) -> None:
    async def scene() -> None:
        async with FakeSwarm(tmp_path) as swarm:
            os.killpg(
                swarm.incarnations["peer-1"].process.pid, signal.SIGSTOP
            )  # SIGTERM stays pending
            proof = await run(planned("preempt", notice_s=0, grace_s=0.05), swarm)
            assert proof.ok
            assert proof.what["peer-1"]["by"] == "SIGKILL"
            assert swarm.signals == [("peer-1", signal.SIGTERM), ("peer-1", signal.SIGKILL)]

    play(scene())


def test_a_drain_goes_with_a_replacement_elsewhere(tmp_path: Path) -> None:
    async def scene() -> None:
        async with FakeSwarm(tmp_path) as swarm:
            kind = planned("preempt", notice_s=5, drain=True, where="other")
            done = await kind.inject(swarm, ["peer-1"])
            assert done["drained"] == {"node-1": None}
            assert swarm.drained == {"node-1": 5.0}
            await kind.teardown(swarm)  # else no later replicate could start a peer there
            assert swarm.restarts == ["node-1"]

    play(scene())
    with pytest.raises(ValueError, match="where: other"):
        planned("preempt", drain=True)


@pytest.mark.parametrize(
    ("name", "args", "role"),
    [
        ("kill_p2pd", {}, "p2pd"),
        ("kill_averager", {}, "gradient_averager"),
        ("kill_averager", {"which": "state"}, "state_averager"),
    ],
)
def test_a_peer_that_lost_a_process_ends_and_is_replaced(
    name: str, args: dict[str, Any], role: str, tmp_path: Path
) -> None:
    async def scene() -> None:
        async with FakeSwarm(tmp_path) as swarm:
            kind = planned(name, **args)
            victim = swarm.incarnations["peer-1"].roles[role]
            done = await kind.inject(swarm, ["peer-1"])
            assert done == {"process": role, "pids": {"peer-1": [victim]}}
            proof = await kind.verify(swarm, ["peer-1"])
            assert proof.ok
            assert "PeerProcessDied" in proof.what["peer-1"]["error"]
            assert await kind.heal(swarm, ["peer-1"]) == {"lives": {"peer-1": "peer-1.1"}}

    play(scene())


@pytest.mark.usefixtures("short_limits")
def test_a_peer_that_goes_on_without_its_daemon_is_no_proof(tmp_path: Path) -> None:
    async def scene() -> None:
        async with FakeSwarm(tmp_path) as swarm:
            kind = planned("kill_p2pd")
            os.kill(swarm.incarnations["peer-1"].process.pid, signal.SIGSTOP)  # it can't notice
            assert not (await run(kind, swarm)).ok
            os.kill(swarm.incarnations["peer-1"].process.pid, signal.SIGCONT)

    play(scene())


def test_a_joiner_runs_and_leaves_again(tmp_path: Path) -> None:
    async def scene() -> None:
        async with FakeSwarm(tmp_path) as swarm:
            join = planned("join", who=["peer-3"])
            proof = await run(join, swarm, ["peer-3"])
            assert proof.ok
            assert proof.what["pids"]["peer-3"] == [swarm.incarnations["peer-3"].process.pid]
            proof = await run(planned("leave", who=["peer-3"]), swarm, ["peer-3"])
            assert proof.ok
            assert proof.what["peer-3"]["left"]["handed_over"] == 64
            assert swarm.expected == ["peer-3"]
            assert "peer-3" not in swarm.living()

    play(scene())


@pytest.mark.usefixtures("short_limits")
def test_a_joiner_that_dies_at_once_is_no_proof(tmp_path: Path) -> None:
    async def scene() -> None:
        async with FakeSwarm(tmp_path) as swarm:
            join = planned("join", who=["peer-3"])
            await join.inject(swarm, ["peer-3"])
            swarm.expect_loss("peer-3")
            await swarm.signal("peer-3", signal.SIGKILL)
            swarm.incarnations["peer-3"].process.wait(10)
            assert not (await join.verify(swarm, ["peer-3"])).ok

    play(scene())


@pytest.mark.parametrize("args", [{"grace": 1}, {"notice_s": -1}, {"where": "elsewhere"}])
def test_wrong_parameters_are_refused(args: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        planned("preempt", **args)


def test_a_process_that_is_no_longer_listed_is_gone() -> None:
    """As a training process that an elastic member started again, and that nobody recorded."""
    gone = all_are("gone", [1, 2])
    assert gone({1: "gone"}) and gone({})
    assert not gone({1: "gone", 2: "running"})
    assert not gone({1: "gone", 3: "running"})
    assert not all_are("stopped", [1])({2: "stopped"})
    assert not all_are("gone")({})
