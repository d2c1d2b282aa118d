"""Nemesis: a fault waits until its targets train and enough other peers are back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any

import pytest

from rayhive.cluster.replicate.nemesis import LATE_S, Nemesis
from rayhive.events import Event
from rayhive.faults.kind import Proof
from rayhive.registry import FAULTS
from rayhive.spec.fault_plan import QUIET_S, At, FaultPlan, PlannedFault
from tests.unit.plan_fakes import Fake, Where

pytestmark = pytest.mark.usefixtures("fakes")


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
        planned(1, "partition", "peer-0", heal_after_s=0.05),
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


# -- two faults, and the end of a replicate -----------------------------------------------------


@pytest.mark.parametrize("second", ["kill", "preempt"])
def test_a_peer_is_not_taken_away_twice_at_once(second: str) -> None:
    swarm = Swarm()
    faults = (
        planned(0, "preempt", "peer-1", heal_after_s=0.1),
        planned(1, second, "peer-1", heal_after_s=0.1),
        planned(2, "kill", "peer-2"),
        planned(3, "straggler", "peer-1", heal_after_s=0.01),  # it takes nobody away
    )
    plan = FaultPlan(peers=4, faults=faults)

    async def body() -> None:
        clock = Nemesis(plan, swarm, swarm.write)  # type: ignore[arg-type]
        clock.start()
        await until(clock, swarm, "fault_fired", "f0", "f2", "f3")
        assert "f0" not in swarm.said("fault_healed")
        await until(clock, swarm, "fault_fired", "f0", "f2", "f3", "f1")
        assert "f0" in swarm.said("fault_healed")
        await clock.close()

    run(body())


def test_the_peer_of_a_role_is_not_taken_away_twice_at_once() -> None:
    swarm = Swarm()
    faults = (planned(0, "kill", "slowest", heal_after_s=0.1), planned(1, "kill", "peer-0"))
    plan = FaultPlan(peers=4, faults=faults)

    async def body() -> None:
        clock = Nemesis(plan, swarm, swarm.write)  # type: ignore[arg-type]
        clock.start()
        await until(clock, swarm, "fault_fired", "f0")
        await until(clock, swarm, "fault_fired", "f0", "f1")
        assert "f0" in swarm.said("fault_healed")
        await clock.close()

    run(body())


def test_a_node_is_struck_though_a_peer_of_it_is_gone_for_good() -> None:
    swarm = Swarm()
    swarm.one_node = True
    faults = (planned(0, "kill", "peer-1"), planned(1, "memory_pressure", "node-0", at=At(round=3)))
    plan = FaultPlan(peers=4, faults=faults)

    async def body() -> None:
        clock = Nemesis(plan, swarm, swarm.write)  # type: ignore[arg-type]
        clock.start()
        await until(clock, swarm, "fault_verified", "f0")
        swarm.trainers.discard("peer-1")
        await settled(clock)
        clock.heard(3)
        await until(clock, swarm, "fault_verified", "f0", "f1")
        await clock.close()

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
