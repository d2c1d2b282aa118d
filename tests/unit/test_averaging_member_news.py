"""News of members for an averager's process: peers at once, progress while a step runs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from rayhive.averaging.member_news import MemberNews
from rayhive.membership.view import Member

NONE: frozenset[bytes] = frozenset()


class Averager:
    """Pipe of an averager, which notes its messages."""

    def __init__(self) -> None:
        self.messages = list[Any]()
        self.news = MemberNews(self)

    def send(self, message: Any) -> None:
        self.messages.append(message)

    def told(self) -> list[Any]:
        """Return the rounds of the members in each message since the last call."""
        messages, self.messages = self.messages, []
        return [
            {m.peer_id: m.round for m in args[0]} if name == "_set_members" else name
            for name, args, _ in messages
        ]

    def begin(self) -> SimpleNamespace:
        """Begin a step, which ends when ``ended`` is set."""
        step: Any = SimpleNamespace(ended=False)
        step.done = lambda: step.ended

        def request() -> Any:
            self.send(("_take_step", [], {}))
            return step

        return self.news.begin(request)  # type: ignore[return-value]


def members(**rounds: int) -> tuple[Member, ...]:
    return tuple(Member(name.encode(), False, at, at, at) for name, at in rounds.items())


def test_progress_between_two_steps_waits_for_the_next_one() -> None:
    averager = Averager()
    averager.news.set(members(a=1, b=1), NONE)
    for round_ in (2, 3):
        averager.news.set(members(a=round_, b=1), NONE)
    assert averager.told() == [{b"a": 1, b"b": 1}]
    step = averager.begin()
    assert averager.told() == [{b"a": 3, b"b": 1}, "_take_step"]
    averager.news.set(members(a=3, b=2), NONE)
    assert averager.told() == [{b"a": 3, b"b": 2}]
    step.ended = True
    averager.news.set(members(a=3, b=3), NONE)
    assert averager.told() == []


def test_peers_that_come_leave_or_are_lost_are_told_at_once() -> None:
    averager = Averager()
    for news in (
        (members(a=1), NONE),
        (members(a=1, b=1), NONE),
        (members(a=2), frozenset({b"b"})),
        (members(a=2), NONE),
    ):
        averager.news.set(*news)
        assert [args for _, args, _ in averager.messages] == [list(news)]
        averager.messages.clear()


def test_what_has_not_changed_is_told_once() -> None:
    averager = Averager()
    averager.news.set(members(a=1), NONE)
    averager.begin()
    averager.begin()
    assert averager.told() == [{b"a": 1}, "_take_step", "_take_step"]


def test_an_averager_without_members_looks_for_peers_as_hivemind_does() -> None:
    averager = Averager()
    averager.begin()
    assert averager.told() == ["_take_step"]


def test_the_first_members_are_told_although_there_are_none() -> None:
    averager = Averager()
    averager.news.set((), NONE)
    assert averager.told() == [{}]


def test_news_that_could_not_be_sent_are_told_with_the_next_step() -> None:
    averager = Averager()
    send = averager.send

    def fail(message: Any) -> None:
        raise BrokenPipeError

    averager.send = fail  # type: ignore[method-assign]
    with pytest.raises(BrokenPipeError):
        averager.news.set(members(a=1), NONE)
    averager.send = send  # type: ignore[method-assign]
    averager.begin()
    assert averager.told() == [{b"a": 1}, "_take_step"]
