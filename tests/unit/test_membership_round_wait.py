"""Wait of a peer that has done its share of a round: when it waits, for how long, how often."""

from __future__ import annotations

import threading
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayhive.membership.progress_view import ProgressView, shares
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
    """Tell of another peer; what is not given stays as it was, but for a promise."""
    known = view.find(name.encode())
    version = 1 if known is None else known.version + 1
    kept = ("samples_per_second", "samples", "round")
    before = {} if known is None else {name: getattr(known, name) for name in kept}
    told: dict[str, float] = {**before, **fields}
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


# -- promises --------------------------------------------------------------------------------------


@given(
    total=st.integers(0, 200),
    weights=st.dictionaries(st.binary(max_size=4), st.floats(1e-3, 1e6), min_size=1, max_size=8),
)
def test_shares_add_up_and_are_next_to_their_quotas(
    total: int, weights: dict[bytes, float]
) -> None:
    found = shares(total, weights)
    assert sum(found.values()) == total
    for peer, weight in weights.items():
        assert abs(found[peer] - total * weight / sum(weights.values())) < 1 + 1e-6


def compute(wait: RoundWait, done: int) -> tuple[bool, int]:
    """End a batch as the tracker does; return what it would tell."""
    view = wait.swarm.view
    aloud, promised = wait.news(done * BATCH, BATCH, view.loud.counted_samples)
    view.announce(aloud, samples=done * BATCH, promised=promised)
    return aloud, promised


@pytest.mark.parametrize("news_s, told_after", [(0.0, 4), (0.02, 4), (0.06, 3), (0.2, 1)], ids=str)
def test_a_share_is_promised_before_the_last_batch_or_as_early_as_news_need(
    news_s: float, told_after: int
) -> None:
    """A batch takes 26 ms."""
    wait = make_wait(1250.0, EQUAL)
    wait.news_s = news_s
    told = [compute(wait, done) for done in range(1, 6)]
    promised = (True, 5 * BATCH)
    kept = (False, 5 * BATCH)
    assert told == [(False, 0)] * (told_after - 1) + [promised] + [kept] * (5 - told_after)


def test_a_promise_is_kept_before_the_round_begins() -> None:
    wait = make_wait(1250.0, EQUAL)
    compute(wait, 4)
    for name in EQUAL:
        heard(wait.swarm.view, name, samples=8 * BATCH)
    assert not wait.swarm.is_round_due and wait.seconds(BATCH) == 0
    compute(wait, 5)
    assert wait.swarm.is_round_due


def test_promises_of_others_count_and_no_sample_counts_twice() -> None:
    wait = make_wait(1250.0, EQUAL)
    for done in range(1, 6):
        compute(wait, done)
    for name in EQUAL:
        assert not wait.swarm.is_round_due
        heard(wait.swarm.view, name, samples=2 * BATCH, promised=5 * BATCH)
    assert wait.swarm.view.samples() == TARGET and wait.swarm.is_round_due
    heard(wait.swarm.view, "a", samples=5 * BATCH, promised=5 * BATCH)
    assert wait.swarm.view.samples() == TARGET


def test_nobody_is_held_to_a_promise_when_a_round_has_ended_or_is_in_a_hurry() -> None:
    for news in ({"round": 1, "averaged": 1}, {"hurry": 1}, {"round": 1, "hurry": 1}):
        wait = make_wait(1250.0, EQUAL)
        compute(wait, 4)
        heard(wait.swarm.view, "a", **news)
        assert wait.swarm.is_round_due


def test_samples_that_make_a_round_due_are_told_before_a_share_is_done() -> None:
    """This peer begins the round then, and the others would wait for news of it."""
    wait = make_wait(5000.0, EQUAL)
    assert compute(wait, 6) == (False, 0)
    for name in EQUAL:
        heard(wait.swarm.view, name, samples=5 * BATCH)
    assert compute(wait, 7) == (True, 0) and wait.swarm.is_round_due


def test_samples_beyond_a_promise_are_told_when_they_matter() -> None:
    wait = make_wait(1250.0, EQUAL)
    for done in range(1, 6):
        compute(wait, done)
    for name in EQUAL:
        heard(wait.swarm.view, name, samples=4 * BATCH)
    assert compute(wait, 6) == (True, 5 * BATCH)


def test_a_wait_lasts_as_long_as_news_may_be_under_way() -> None:
    wait = make_wait(1280.0, EQUAL)
    wait.news_s = 0.04
    wait.swarm.view.announce(samples=5 * BATCH)
    assert wait.seconds(BATCH) == pytest.approx(0.04 + BATCHES * BATCH / 1280.0)
