"""State of the peers from their events, and the outcome of the replicate."""

from __future__ import annotations

from typing import Any

import pytest

from rayhive.cluster.replicate.peer_table import Outcome, PeerTable
from rayhive.events import make_event
from rayhive.spec import Budget

SAMPLES = Budget(samples_per_replicate=100)
TARGET = Budget(stop_at_target=True)
SECONDS = Budget()


def peer_table() -> PeerTable:
    found = PeerTable(["peer-0", "peer-1"])
    for index, name in enumerate(found.peers):
        found.spawned(name, 100 + index, "host")
    return found


def say(book: PeerTable, name: str, kind: str, **fields: Any) -> None:
    book.take(name, make_event(kind, name, **fields))


def finish(book: PeerTable, *reasons: str) -> None:
    for name, reason in zip(book.peers, reasons, strict=True):
        say(book, name, "peer_finished", reason=reason, round=7, samples=50, clock_s=1.0)


def test_it_follows_the_peers_to_the_barrier_and_beyond() -> None:
    book = peer_table()
    assert not book.all_ready() and book.missing("ready") == ["peer-0", "peer-1"]
    say(book, "peer-0", "dht_ready", peer_id="x", addresses=["/ip4/1"])
    assert book.peers["peer-0"].addresses == ["/ip4/1"]
    for name in book.peers:
        say(book, name, "peer_ready")
    assert book.all_ready()
    say(book, "peer-1", "training_started")
    say(book, "peer-1", "round", round=1, samples=30, loss=0.5, clock_s=1.0, outcome="averaged")
    say(book, "peer-1", "round", round=2, samples=34, loss=None, clock_s=4.0, outcome="averaged")
    status = book.peers["peer-1"].status()
    assert status.state == "training" and status.pid == 101
    assert (status.round, status.samples, status.loss) == (2, 64, 0.5)
    assert status.samples_per_s == 16.0 and 0 <= status.last_event_age < 60
    assert book.all_ready() and not book.all_finished()


@pytest.mark.parametrize(
    ("reasons", "budget", "out_of_time", "stopped", "outcome"),
    [
        (("rounds", "rounds"), SAMPLES, False, None, Outcome("completed", "rounds")),
        (("rounds", "stop"), SAMPLES, True, None, Outcome("completed", "rounds")),
        (("stop", "target"), TARGET, False, None, Outcome("completed", "target")),
        (("stop", "stop"), SECONDS, True, None, Outcome("completed", "seconds")),
        (("stop", "stop"), SAMPLES, True, None, Outcome("timed_out", "seconds")),
        (("stop", "stop"), TARGET, True, None, Outcome("timed_out", "seconds")),
        (("seconds", "stop"), SAMPLES, False, None, Outcome("timed_out", "seconds")),
        (("stop", "stop"), SAMPLES, True, "by hand", Outcome("stopped", "by hand")),
        (("rounds", "rounds"), SAMPLES, False, "late", Outcome("completed", "rounds")),
        (
            ("stop", "diverged"),
            SAMPLES,
            False,
            None,
            Outcome("diverged", "peer-1 diverged in round 7"),
        ),
    ],
)
def test_the_outcome(
    reasons: tuple[str, str],
    budget: Budget,
    out_of_time: bool,
    stopped: str | None,
    outcome: Outcome,
) -> None:
    book = peer_table()
    finish(book, *reasons)
    assert book.all_finished()
    assert book.outcome(budget, out_of_time, stopped) == outcome


def test_peers_that_stop_without_a_command_do_not_complete_a_replicate() -> None:
    book = peer_table()
    finish(book, "stop", "stop")
    assert book.outcome(SAMPLES, False, None).state == "stopped"


def test_trouble_names_the_peer_and_keeps_the_first_cause() -> None:
    book = peer_table()
    assert book.trouble() is None
    say(book, "peer-1", "peer_failed", error="ValueError('x')", traceback="...")
    book.lost("peer-1", "its process ended with exit code 1")
    assert book.trouble() == "peer-1: ValueError('x')"
    book.lost("peer-0", "killed")
    assert book.trouble() == "peer-0: killed"


def test_a_peer_that_goes_home_is_no_trouble() -> None:
    book = peer_table()
    finish(book, "rounds", "rounds")
    book.left("peer-0")
    assert book.trouble() is None
    assert book.peers["peer-0"].state == "gone"


def late_peer(**options: Any) -> PeerTable:
    """Return a table of two peers in round 6, which are killed, and of one that came later."""
    book = PeerTable(["peer-0", "peer-1"], **options)
    book.add("peer-0.1")
    for index, name in enumerate(book.peers):
        book.spawned(name, 100 + index, "host")
    for name in ("peer-0", "peer-1"):
        say(book, name, "round", round=6, samples=30, loss=0.5, clock_s=1.0, outcome="averaged")
        book.peers[name].loss_expected = True
    return book


LOADED = {"round_before": 0, "round": 6, "seconds": 0.1, "received_bytes": 9, "kept": 0}


@pytest.mark.parametrize(
    ("kind", "fields", "trained"),
    [
        ("peer_ready", {}, False),
        ("state_loaded", {**LOADED, "round_of_state": 0}, False),
        ("state_loaded", {**LOADED, "round_of_state": 6}, True),
        ("round", {"round": 7, "samples": 0, "clock_s": 1.0, "outcome": "alone"}, False),
        ("round", {"round": 7, "samples": 9, "clock_s": 1.0, "outcome": "averaged"}, True),
    ],
)
def test_a_replicate_fails_when_no_peer_with_the_trained_state_is_left(
    kind: str, fields: dict[str, Any], trained: bool
) -> None:
    book = late_peer()
    say(book, "peer-0.1", kind, **fields)
    book.lost("peer-0", "killed")
    assert book.trouble() is None
    book.lost("peer-1", "killed")
    newest = max(6, fields.get("round", 0) if kind == "round" else 0)
    lost = f"no peer is left that has the state of round {newest}"
    assert book.trouble() == (None if trained else lost)


@pytest.mark.parametrize("rounds", [0, 5])
def test_a_replicate_fails_when_the_only_peer_that_trains_is_gone(rounds: int) -> None:
    """The others hold their nodes, and so does a replacement (baseline ``single``)."""
    book = peer_table()
    book.add("peer-1.1")
    for name in book.peers:
        say(book, name, "peer_ready", trains=name == "peer-1")
    if rounds:
        say(book, "peer-1", "round", round=rounds, samples=30, clock_s=1.0, outcome="alone")
    book.peers["peer-0"].loss_expected = book.peers["peer-1"].loss_expected = True
    book.lost("peer-0", "killed")
    assert book.trouble() is None
    book.lost("peer-1", "killed")
    assert book.trouble() == "no peer is left that trains"


def test_a_peer_that_goes_on_from_a_checkpoint_has_the_state() -> None:
    book = late_peer(checkpoints=True)
    for name in ("peer-0", "peer-1"):
        book.lost(name, "killed")
    assert book.trouble() is None
