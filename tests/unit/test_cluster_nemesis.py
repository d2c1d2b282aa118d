"""Nemesis: a fault waits until its targets train and enough other peers are back."""

from __future__ import annotations

import asyncio
import time

import pytest

from rayhive.cluster.replicate.nemesis import LATE_S, Nemesis
from rayhive.spec.fault_plan import QUIET_S, At, FaultPlan
from tests.unit.nemesis_fakes import Swarm, planned, run, settled, until

pytestmark = pytest.mark.usefixtures("fakes")


@pytest.mark.parametrize(
    ("kind", "who"), [("kill", "peer-1"), ("kill_node", "node-1"), ("partition", "peer-1")]
)
@pytest.mark.parametrize("at", [At(seconds=0.0), At(round=3)], ids=str)
def test_a_fault_waits_until_its_target_trains(kind: str, who: str, at: At) -> None:
    swarm = Swarm()
    swarm.trainers.discard("peer-1")
    plan = FaultPlan(peers=4, faults=(planned(0, kind, who, at=at),))

    async def body() -> None:
        clock = Nemesis(plan, swarm, swarm.write)  # type: ignore[arg-type]
        clock.start()
        clock.heard(3)
        await settled(clock)
        assert swarm.events == []
        assert clock.problem() == f"f0 ({kind} of {who} at {at}) did not fire before the end"
        swarm.trainers.add("peer-1")
        clock.heard(5)
        await until(clock, swarm, "fault_verified", "f0")
        fired = swarm.events[0]
        assert fired["slip_rounds"] == 2 if at.round else fired["slip_s"] > 0.02
        assert clock.problem() is None
        await clock.close()

    run(body())


@pytest.mark.parametrize("at", [At(seconds=0.05), At(round=5)], ids=str)
def test_the_report_of_a_peer_is_awaited_from_the_time_on_when_it_is_due(at: At) -> None:
    swarm = Swarm()
    swarm.trainers.clear()  # the act is in the spec of the peer, which need not be reachable
    plan = FaultPlan(peers=4, faults=(planned(0, "nan_gradient", "peer-1", at=at),))

    async def body() -> None:
        clock = Nemesis(plan, swarm, swarm.write)  # type: ignore[arg-type]
        clock.start()
        clock.heard(3)
        await asyncio.sleep(0)
        assert swarm.events == []
        clock.heard(4)  # it is in round 5 now
        await until(clock, swarm, "fault_verified", "f0")
        fired = swarm.events[0]
        assert fired["slip_rounds"] == 0 if at.round else fired["slip_s"] >= 0
        await clock.close()

    run(body())


def test_a_joiner_is_not_awaited_and_a_role_goes_to_a_training_peer() -> None:
    swarm = Swarm()
    swarm.trainers.clear()
    plan = FaultPlan(peers=4, faults=(planned(0, "join", "peer-4"), planned(1, "kill", "leader")))

    async def body() -> None:
        clock = Nemesis(plan, swarm, swarm.write)  # type: ignore[arg-type]
        clock.start()
        await until(clock, swarm, "fault_verified", "f0")
        await settled(clock)
        assert swarm.said("fault_fired") == ["f0"], "nobody is there to lead"
        swarm.trainers.add("peer-2")
        await until(clock, swarm, "fault_verified", "f0", "f1")
        await clock.close()

    run(body())


def test_two_faults_of_one_link_come_one_after_the_other() -> None:
    swarm = Swarm()
    faults = (
        planned(0, "rate", "peer-1", heal_after_s=0.05),
        planned(1, "rate", "peer-1", heal_after_s=0.05),
        planned(2, "straggler", "peer-1", heal_after_s=0.05),
    )
    plan = FaultPlan(peers=4, at_most=1, faults=faults)

    async def body() -> None:
        clock = Nemesis(plan, swarm, swarm.write)  # type: ignore[arg-type]
        clock.start()
        await until(clock, swarm, "fault_fired", "f0", "f2")
        assert not swarm.said("fault_healed")
        await until(clock, swarm, "fault_fired", "f0", "f2", "f1")
        assert "f0" in swarm.said("fault_healed")
        await clock.close()

    run(body())


def test_a_gentle_fault_of_the_only_node_may_strike_all_peers() -> None:
    swarm = Swarm()
    swarm.one_node = True
    faults = (planned(0, "memory_pressure", "peer-1", heal_after_s=0.05),)
    plan = FaultPlan(peers=4, at_most=1, faults=faults)

    async def body() -> None:
        clock = Nemesis(plan, swarm, swarm.write)  # type: ignore[arg-type]
        swarm.missing.add("peer-3")
        clock.start()
        await settled(clock)
        assert not swarm.events, "one is down already"
        swarm.missing.clear()
        await until(clock, swarm, "fault_healed", "f0")
        await clock.close()

    run(body())


@pytest.mark.parametrize("at_most", [1, None])
def test_no_more_are_struck_at_once_than_the_plan_allows(at_most: int | None) -> None:
    swarm = Swarm()
    faults = (
        planned(0, "partition", "peer-0", heal_after_s=0.05),
        planned(1, "straggler", "peer-0", heal_after_s=0.05),
        planned(2, "kill", "peer-0", heal_after_s=0.05),
        planned(3, "kill", "peer-1", heal_after_s=0.05),
    )
    plan = FaultPlan(peers=4, at_most=at_most, faults=faults)

    async def body() -> None:
        clock = Nemesis(plan, swarm, swarm.write)  # type: ignore[arg-type]
        clock.start()
        if at_most is None:
            await until(clock, swarm, "fault_healed", "f0", "f1", "f2", "f3")
            kinds = [event.kind for event in swarm.events]
            assert "fault_fired" not in kinds[kinds.index("fault_healed") :]
            await clock.close()
            return
        await until(clock, swarm, "fault_fired", "f0", "f1")
        assert not swarm.said("fault_healed"), "who is struck twice is struck once"
        await until(clock, swarm, "fault_fired", "f0", "f1", "f2")
        assert sorted(swarm.said("fault_healed")) == ["f0", "f1"], "what ends a peer comes alone"
        swarm.missing.add("peer-0")
        await until(clock, swarm, "fault_healed", "f0", "f1", "f2")
        await settled(clock)
        assert swarm.said("fault_fired") == ["f0", "f1", "f2"], "peer-0 is not back"
        swarm.missing.clear()
        await until(clock, swarm, "fault_healed", "f0", "f1", "f2", "f3")
        await clock.close()

    run(body())


def test_the_end_of_training_moves_by_the_delay_of_the_latest_fault() -> None:
    swarm = Swarm()
    swarm.trainers.discard("peer-1")
    plan = FaultPlan(peers=4, faults=(planned(0, "kill", "peer-1"), planned(1, "kill", "peer-2")))

    async def body() -> None:
        news = asyncio.Event()
        clock = Nemesis(plan, swarm, swarm.write, news.set)  # type: ignore[arg-type]
        clock.start()
        began = time.monotonic()
        await until(clock, swarm, "fault_verified", "f1")
        assert not clock.over() and clock.slip_s < LATE_S
        assert clock.quiet_from(began + 60) == began + 60
        await asyncio.sleep(LATE_S)
        swarm.trainers.add("peer-1")
        await until(clock, swarm, "fault_verified", "f1", "f0")
        news.clear()
        await asyncio.wait_for(news.wait(), 5)
        assert clock.over() and LATE_S < clock.slip_s <= time.monotonic() - began
        assert clock.quiet_from(began + 60) == began + 60 + clock.slip_s
        assert began + QUIET_S < clock.quiet_from(began) <= time.monotonic() + QUIET_S
        await clock.close()

    run(body())


def test_a_fault_that_failed_is_not_waited_for() -> None:
    swarm = Swarm()
    swarm.node_of = lambda peer: 1 / 0  # type: ignore[assignment, method-assign]
    plan = FaultPlan(
        peers=4,
        faults=(planned(0, "kill_node", "peer-1"), planned(1, "kill", "peer-2", at=At(round=9))),
    )

    async def body() -> None:
        clock = Nemesis(plan, swarm, swarm.write)  # type: ignore[arg-type]
        clock.start()
        await until(clock, swarm, "fault_failed", "f0")
        assert clock.over() and clock.problem() is not None
        await clock.close()

    run(body())
