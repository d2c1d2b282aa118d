"""Wait of a peer that has done its share of a round: when it waits, for how long, how often."""

from __future__ import annotations

import threading
from collections.abc import Mapping

import pytest

from rayhive.membership.progress_view import ProgressView
from rayhive.membership.round_wait import BATCHES, LONGEST_S, RoundWait
from rayhive.membership.view import Heartbeat, MembershipView

TARGET, BATCH = 640, 32


def make_wait(own: float, others: Mapping[str, float], target: int = TARGET) -> RoundWait:
    """Return the decision of a peer with a speed, beside others [samples/s]."""
    view = MembershipView(Heartbeat(b"own", 0.0, 1, takes_part=True), silence=1e9)
    view.announce(samples_per_second=own)
    for name, speed in others.items():
        heard(view, name, samples_per_second=speed)
    return RoundWait(ProgressView(view, target, threading.Event()))


def heard(view: MembershipView, name: str, **fields: float) -> None:
    known = view.find(name.encode())
    version = 1 if known is None else known.version + 1
    speed = {} if known is None else {"samples_per_second": known.samples_per_second}
    told: dict[str, float] = {**speed, **fields}
    view.receive(Heartbeat(name.encode(), 0.0, version, takes_part=True, **told))  # type: ignore[arg-type]
    with view.lock:
        view.lock.notify_all()


EQUAL = {"a": 1200.0, "b": 1250.0, "c": 1300.0}


def batches_before_the_wait(wait: RoundWait, most: int = 100) -> int:
    for done in range(1, most):
        wait.swarm.view.announce(samples=done * BATCH)
        if wait.seconds(BATCH):
            return done
    return most


@pytest.mark.parametrize(
    "own, others, batches",
    [
        (1250.0, EQUAL, 5),
        (2500.0, {"a": 1250.0, "b": 1250.0, "c": 1250.0}, 8),
        (1250.0, {"a": 2500.0, "b": 3750.0, "c": 5000.0}, 2),
        (10.0, {"a": 2500.0, "b": 3750.0}, 1),
    ],
)
def test_a_peer_waits_once_it_has_done_its_share(
    own: float, others: dict[str, float], batches: int
) -> None:
    wait = make_wait(own, others)
    assert batches_before_the_wait(wait) == batches


def test_it_waits_for_two_of_its_batches_at_most() -> None:
    wait = make_wait(1280.0, EQUAL)
    wait.swarm.view.announce(samples=5 * BATCH)
    assert wait.seconds(BATCH) == pytest.approx(BATCHES * BATCH / 1280.0)
    slow = make_wait(0.5, {"a": 0.5})
    slow.swarm.view.announce(samples=TARGET // 2)
    assert slow.seconds(BATCH) == LONGEST_S


def test_it_waits_once_a_round() -> None:
    wait = make_wait(1250.0, EQUAL)
    wait.swarm.view.announce(samples=5 * BATCH)
    assert wait.seconds(BATCH) > 0
    wait.swarm.view.announce(samples=6 * BATCH)
    assert wait.seconds(BATCH) == 0
    wait.swarm.view.announce(round=1, samples=5 * BATCH)
    assert wait.seconds(BATCH) > 0


@pytest.mark.parametrize(
    "own, others",
    [(1250.0, {}), (0.0, EQUAL), (1250.0, {**EQUAL, "new": 0.0})],
    ids=["alone", "own speed unknown", "a speed unknown"],
)
def test_it_does_not_wait_without_knowledge(own: float, others: dict[str, float]) -> None:
    assert batches_before_the_wait(make_wait(own, others), most=19) == 19


def test_it_does_not_wait_for_a_round_that_is_due() -> None:
    wait = make_wait(1250.0, EQUAL)
    wait.swarm.view.announce(samples=5 * BATCH)
    for name in EQUAL:
        heard(wait.swarm.view, name, samples=5 * BATCH)
    assert wait.seconds(BATCH) == 0


def test_the_wait_ends_when_the_round_is_due() -> None:
    wait = make_wait(1250.0, EQUAL)
    view = wait.swarm.view
    view.announce(samples=5 * BATCH)
    assert wait.seconds(BATCH) > 0
    checked = threading.Event()
    waiting = threading.Thread(target=wait.wait, args=(60.0, checked.set))
    waiting.start()
    for name in EQUAL:
        heard(view, name, samples=5 * BATCH)
    waiting.join(30.0)
    assert not waiting.is_alive() and wait.swarm.is_round_due


def test_an_error_ends_the_wait() -> None:
    wait = make_wait(1250.0, EQUAL)
    wait.swarm.view.announce(samples=5 * BATCH)
    assert wait.seconds(BATCH) > 0

    def check() -> None:
        raise InterruptedError("a process of this peer has died")

    with pytest.raises(InterruptedError):
        wait.wait(60.0, check)


def test_the_wait_ends_with_the_tracker() -> None:
    wait = make_wait(1250.0, EQUAL)
    wait.swarm.view.announce(samples=5 * BATCH)
    wait.swarm.ended.set()
    assert wait.seconds(BATCH) > 0
    wait.wait(60.0, lambda: None)


def test_waits_in_vain_get_rare_and_one_that_was_not_brings_them_back() -> None:
    """As where the batches do not divide the round: one peer always has to do one more."""
    wait, waited = make_wait(1250.0, EQUAL), []
    view = wait.swarm.view
    for round_ in range(20):
        view.announce(round=round_, samples=5 * BATCH)
        if wait.seconds(BATCH):
            waited.append(round_)
            wait.wait(0.0, lambda: None)
    assert waited == [0, 1, 3, 6, 11]
    view.announce(round=20, samples=5 * BATCH)
    assert wait.seconds(BATCH) > 0
    for name in EQUAL:
        heard(view, name, round=20, samples=5 * BATCH)
    wait.wait(0.0, lambda: None)
    for round_ in (21, 22):
        view.announce(round=round_, samples=5 * BATCH)
        for name in EQUAL:
            heard(view, name, round=round_, samples=0)
        assert wait.seconds(BATCH) > 0
        wait.wait(0.0, lambda: None)
