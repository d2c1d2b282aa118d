"""Nemesis: two faults on one peer or node, and faults at the end of a replicate."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rayhive.cluster.replicate.nemesis import LATE_S, Nemesis
from rayhive.faults.kind import Proof
from rayhive.registry import FAULTS
from rayhive.spec.fault_plan import At, FaultPlan
from tests.unit.nemesis_fakes import Swarm, planned, run, settled, started, until
from tests.unit.plan_fakes import Fake, Where

pytestmark = pytest.mark.usefixtures("fakes")


@pytest.mark.parametrize("second", ["kill", "preempt"])
def test_a_peer_is_not_taken_away_twice_at_once(second: str) -> None:
    swarm = Swarm()
    faults = (
        planned(0, "preempt", "peer-1", heal_after_s=0.1),
        planned(1, second, "peer-1", heal_after_s=0.1),
        planned(2, "kill", "peer-2"),
        planned(3, "straggler", "peer-1", heal_after_s=0.01),  # it takes nobody away
    )

    async def body() -> None:
        async with started(swarm, *faults) as clock:
            await until(clock, swarm, "fault_fired", "f0", "f2", "f3")
            assert "f0" not in swarm.said("fault_healed")
            await until(clock, swarm, "fault_fired", "f0", "f2", "f3", "f1")
            assert "f0" in swarm.said("fault_healed")

    run(body())


def test_the_peer_of_a_role_is_not_taken_away_twice_at_once() -> None:
    swarm = Swarm()
    faults = (planned(0, "kill", "slowest", heal_after_s=0.1), planned(1, "kill", "peer-0"))

    async def body() -> None:
        async with started(swarm, *faults) as clock:
            await until(clock, swarm, "fault_fired", "f0")
            await until(clock, swarm, "fault_fired", "f0", "f1")
            assert "f0" in swarm.said("fault_healed")

    run(body())


def test_a_node_is_struck_though_a_peer_of_it_is_gone_for_good() -> None:
    swarm = Swarm()
    swarm.one_node = True
    faults = (planned(0, "kill", "peer-1"), planned(1, "memory_pressure", "node-0", at=At(round=3)))

    async def body() -> None:
        async with started(swarm, *faults) as clock:
            await until(clock, swarm, "fault_verified", "f0")
            swarm.trainers.discard("peer-1")
            await settled(clock)
            clock.heard(3)
            await until(clock, swarm, "fault_verified", "f0", "f1")

    run(body())


class Slow(Fake):
    """Takes its time for one of the steps."""

    Args = Where
    effect, heals = "gone", True
    step = ""

    async def inject(self, swarm: Any, targets: Any) -> dict[str, Any]:
        await asyncio.sleep(60.0 if self.step == "inject" else 0.0)
        return {}

    async def verify(self, swarm: Any, targets: Any) -> Proof:
        await asyncio.sleep(60.0 if self.step == "verify" else 0.0)
        return Proof(self.step != "refute")


@pytest.mark.parametrize(
    ("step", "told", "at_target"),
    [
        ("inject", "was cut off by the end", True),
        ("verify", "was not proved to have taken effect", False),
        ("refute", "was not proved to have taken effect", True),
    ],
)
def test_what_the_target_excuses(step: str, told: str, at_target: bool) -> None:
    swarm = Swarm()
    plan = FaultPlan(peers=4, faults=(planned(0, "kill", "peer-1"),))

    async def body() -> None:
        with FAULTS.replaced("kill", type("kill", (Slow,), {"step": step})):
            clock = Nemesis(plan, swarm, swarm.write)  # type: ignore[arg-type]
        clock.start()
        await settled(clock)
        await clock.close()
        problem = f"f0 (kill of peer-1 at 0 s) {told}"
        assert clock.problem() == problem
        assert clock.problem(at_target=True) == (problem if at_target else None)

    run(body())


@pytest.mark.parametrize(
    ("at", "held", "excused"),
    [(At(seconds=30.0), 0.0, True), (At(seconds=0.0), LATE_S, False), (At(round=9), 0.0, True),
     (At(round=3), 0.0, False)],
    ids=str,
)  # fmt: skip
def test_the_target_excuses_faults_that_were_due_later(at: At, held: float, excused: bool) -> None:
    swarm = Swarm()
    swarm.trainers.discard("peer-1")  # the fault is held back
    plan = FaultPlan(peers=4, faults=(planned(0, "kill", "peer-1", at=at),))

    async def body() -> None:
        clock = Nemesis(plan, swarm, swarm.write)  # type: ignore[arg-type]
        clock.start()
        clock.heard(4)
        await asyncio.sleep(1.5 * held)
        await clock.close()
        assert clock.problem() is not None
        assert (clock.problem(at_target=True) is None) == excused

    run(body())


def test_nodes_are_started_again_only_after_the_peers_were_released() -> None:
    swarm = Swarm()
    torn_down: list[str] = []

    def remembering(kind: str) -> type[Fake]:
        async def teardown(self: Any, swarm: Any) -> None:
            torn_down.append(kind)

        return type(kind, (FAULTS.get(kind),), {"teardown": teardown})

    plan = FaultPlan(
        peers=4, faults=(planned(0, "kill_node", "node-1"), planned(1, "pause", "peer-2"))
    )

    async def body() -> None:
        with (
            FAULTS.replaced("kill_node", remembering("kill_node")),
            FAULTS.replaced("pause", remembering("pause")),
        ):
            clock = Nemesis(plan, swarm, swarm.write)  # type: ignore[arg-type]
        await clock.setup()
        clock.start()
        await settled(clock)
        await clock.release()
        assert torn_down == ["pause"]
        await clock.close()
        await clock.close()
        assert torn_down == ["pause", "kill_node"]

    run(body())
