"""Members that are passed on to the averagers: on each change, and before every step."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from rayhive.membership import progress_tracker
from rayhive.membership.averager_members import AveragerMembers
from rayhive.membership.view import Member
from tests.unit.averaging_fakes import OTHER, PEER
from tests.unit.optim_fakes import ROUND, Peer


class LateThread:
    """Event loop thread that never gets its turn."""

    def __init__(self, *_: Any) -> None:
        self.ended = threading.Event()

    def wait_until_ready(self) -> None:
        """Do nothing."""

    def call_soon(self, function: Any) -> None:
        """Drop it."""


def member(name: bytes, round_: int = 0) -> Member:
    return Member(name, False, round_, round_, round_)


@pytest.mark.parametrize("kind", ["averaged", "synchronised"])
def test_a_step_begins_with_all_peers_that_take_part_although_the_thread_is_late(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(progress_tracker, "LoopThread", LateThread)
    peer = Peer(every=1)
    known: dict[str, set[bytes]] = {}
    begun: list[set[bytes]] = []

    def passed_on(kind: str, members: tuple[Member, ...], lost: frozenset[bytes]) -> None:
        known[kind] = {each.peer_id for each in members}

    def begin(**_: Any) -> Any:
        begun.append(known.get(kind, set()))
        raise TimeoutError

    peer.tracker.follow(passed_on)
    peer.accumulate()
    if kind == "averaged":
        peer.grad_averager.schedule_step = begin
        peer.gradient_rounds.run(
            peer.gradient_rounds.open(ROUND + 1, accumulating_s=0.0, background_s=0.0)
        )
    else:
        peer.state_averager.schedule_step = begin  # type: ignore[method-assign]
        peer.parameter_rounds.begin(ROUND + 1)
    assert begun == [{PEER.to_bytes(), OTHER.to_bytes()}]


def test_members_are_passed_on_once_for_each_change() -> None:
    passed: list[tuple[Member, ...]] = []
    averagers = AveragerMembers(lambda kind, members, lost: passed.append(members))

    def pass_on(*members: Member) -> int:
        averagers.pass_on(lambda: {"averaged": (members, frozenset())})
        return len(passed)

    assert pass_on(member(b"a")) == pass_on(member(b"a")) == 1
    assert pass_on(member(b"a", 1)) == 2
    assert pass_on(member(b"a", 1), member(b"b")) == 3
