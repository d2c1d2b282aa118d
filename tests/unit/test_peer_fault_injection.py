"""In-training faults: their acts, their rounds, and the proof from the peer's report."""

from __future__ import annotations

import asyncio
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rayhive.events import Event, FaultActed
from rayhive.faults.in_training import RoundsArgs
from rayhive.faults.kind import Proof
from rayhive.peer.fault_injection import FaultInjection
from rayhive.registry import FAULTS
from rayhive.spec.fault_plan import At, PlannedFault

INSIDE = sorted(name for name, kind in FAULTS.items() if kind.in_training)

#: Kinds that change gradients, in some rounds.
GRADIENT = [name for name in INSIDE if issubclass(FAULTS.get(name).Args, RoundsArgs)]


def planned(kind: str, at: int = 3, **args: Any) -> PlannedFault:
    return PlannedFault(id="f0", kind=kind, who=("peer-1",), at=At(round=at), args=args)


class Run:
    """Rounds in which a peer accumulates two gradients: the number of the round, and ones."""

    def __init__(self, *faults: PlannedFault, seconds: float = 0.0, quorum: bool = False) -> None:
        self.events: list[FaultActed] = []
        self.seconds = seconds
        self.injection = FaultInjection(faults, self.events.append, lambda: self.seconds)
        tracker, state_averager = SimpleNamespace(quorum=quorum), SimpleNamespace()
        self.injection.attach(SimpleNamespace(tracker=tracker, state_averager=state_averager))

    def round(self, number: int) -> list[torch.Tensor]:
        times = 2
        gradients = [torch.full((3, 2), float(number)), torch.full((4,), 1.0)]
        for gradient in gradients:
            gradient.mul_(times)
        averager = SimpleNamespace(
            _grad_accumulators=lambda: iter(gradients),
            local_samples_accumulated=8 * times,
            _anchor_batch_size=8,
        )
        self.undo = self.injection.before_round(number, averager)
        self.gradients = gradients
        return [gradient / times for gradient in gradients]


def proof(fault: PlannedFault, events: list[FaultActed]) -> Proof:
    """Return the proof of the kind from the reports."""

    class FaultTarget:
        async def event(
            self, record: type[Event], peer: str, timeout: float, *, count: int, fault: str
        ) -> Event:
            assert (record, fault) == (FaultActed, "f0")
            if len(events) < count:
                await asyncio.Event().wait()
            return events[count - 1].of_peer(peer)

    async def body() -> Proof:
        kind, swarm = FAULTS.get(fault.kind)(fault), FaultTarget()
        await kind.setup(swarm)
        await kind.inject(swarm, fault.who)
        try:
            result: Proof = await asyncio.wait_for(kind.verify(swarm, fault.who), 0.2)
        finally:
            await kind.teardown(swarm)
        return result

    return asyncio.run(body())


@pytest.mark.parametrize("kind", GRADIENT)
def test_only_the_planned_rounds_are_touched_and_the_report_is_the_proof(kind: str) -> None:
    fault = planned(kind, at=3, rounds=2, **({"age": 2} if kind == "stale_gradient" else {}))
    run = Run(fault)
    seen = {number: run.round(number) for number in range(1, 7)}
    for number in (1, 2, 5, 6):
        assert seen[number][0].unique().tolist() == [number]
    assert [event.round for event in run.events] == [3, 4]
    expected = {
        "nan_gradient": math.nan,
        "scaled_gradient": 3000.0,
        "sign_flip": -3.0,
        "stale_gradient": 1.0,
    }[kind]
    assert seen[3][0].flatten()[0].item() == pytest.approx(expected, nan_ok=True)
    assert proof(fault, run.events).ok
    with pytest.raises(asyncio.TimeoutError):  # one round of two proves nothing
        proof(fault, run.events[:1])


@pytest.mark.parametrize("kind", GRADIENT)
def test_a_report_of_something_else_is_no_proof(kind: str) -> None:
    what = {"act": kind, "norm_before": 2.0, "norm_after": 2.0, "cosine": 1.0}
    event = FaultActed(fault="f0", round=3, what=what)
    assert not proof(planned(kind), [event]).ok


def test_a_peer_absent_in_the_planned_round_acts_in_its_next() -> None:
    run = Run(planned("sign_flip", at=3))
    run.round(2)
    assert run.round(7)[0][0, 0] == -7 and run.events[0].round == 7
    assert run.round(8)[0][0, 0] == 8


def test_a_fault_of_a_missed_round_is_undone_and_acts_in_the_next() -> None:
    corrupt = planned("corrupt_state", at=3).model_copy(update={"id": "f1"})
    run = Run(planned("sign_flip", at=3), corrupt)
    assert run.round(3)[0][0, 0] == -3
    run.undo()
    assert [gradient[0].flatten()[0].item() for gradient in run.gradients] == [6, 2]
    assert run.round(4)[0][0, 0] == -4
    assert run.round(5)[0][0, 0] == 5
    assert [event.what["act"] for event in run.events].count("corrupt_state") == 1


def test_a_fault_of_a_round_that_may_be_missed_is_reported_once_it_counts() -> None:
    run = Run(planned("sign_flip", at=3), quorum=True)
    run.round(3)
    run.undo()
    run.round(4)
    assert not run.events
    run.round(5)
    assert [event.round for event in run.events] == [4], "the first time did not count"


def test_the_age_of_gradients_is_counted_without_missed_rounds() -> None:
    run = Run(planned("stale_gradient", at=3, age=1), quorum=True)
    run.round(2)
    run.round(3)
    run.undo()
    assert run.round(4)[0][0, 0] == 2, "those of the round before, not those of the missed one"


def test_two_faults_of_the_gradients_act_in_two_rounds() -> None:
    flips = [planned("sign_flip", at=3).model_copy(update={"id": name}) for name in ("f0", "f1")]
    run = Run(*flips)
    assert [run.round(number)[0][0, 0].item() for number in (3, 4, 5)] == [-3, -4, 5]
    assert [(event.fault, event.round) for event in run.events] == [("f0", 3), ("f1", 4)]


def test_a_fault_may_be_planned_by_time() -> None:
    fault = PlannedFault(id="f0", kind="sign_flip", who=("peer-1",), at=At(seconds=5.0))
    run = Run(fault)
    assert run.round(1)[0][0, 0] == 1
    run.seconds = 6.0
    assert run.round(2)[0][0, 0] == -2


def test_gradients_older_than_the_peer_are_its_oldest() -> None:
    run = Run(planned("stale_gradient", at=1, age=5))
    assert run.round(1)[0][0, 0] == 1 and not run.events, "there is nothing old yet"
    assert run.round(2)[0][0, 0] == 1 and run.events[0].what["of_round"] == 1


@pytest.mark.parametrize(("what", "factor"), [("nan", math.nan), ("scaled", 1000.0)])
def test_a_state_is_corrupt_from_the_planned_round_on_for_every_joiner(
    what: str, factor: float
) -> None:
    fault = planned("corrupt_state", what=what)
    run = Run(fault)
    state = [torch.ones(4), torch.tensor([3])]
    assert run.injection.serving(state) is state
    run.round(3)
    served = run.injection.serving(state)
    assert served[0][0].item() == pytest.approx(factor, nan_ok=True) and served[1] is state[1]
    assert state[0][0] == 1, "its own is not"
    assert run.events[1].what["served"] and proof(fault, run.events).ok


def test_kinds_that_act_inside_the_training_need_no_tools() -> None:
    assert {"nan_gradient", "corrupt_state", "clock_skew"} <= set(INSIDE)
    for kind in INSIDE:
        assert FAULTS.get(kind).needs == () and FAULTS.get(kind).about
