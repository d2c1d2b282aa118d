"""Idle peer actors: who gets them, and what becomes of those that do not answer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.exceptions import ActorDiedError

from rayhive.cluster.replicate.peer_actor import HostedPeer, PeerActor
from rayhive.cluster.replicate.peer_pool import PeerPool
from rayhive.errors import PeerError
from rayhive.spec.commands import Train


class Actor:
    """An actor that answers, or does not."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.leave = SimpleNamespace(remote=self.answer)

    async def answer(self) -> None:
        if self.error is not None:
            raise self.error


@pytest.fixture
def killed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    found: list[Any] = []
    monkeypatch.setattr(ray, "kill", found.append)
    yield found


def opened(actor: Any) -> Awaitable[None]:
    answer: Awaitable[None] = actor.answer()
    return answer


def test_an_idle_actor_is_taken_once_and_only_on_its_node(killed: list[Any]) -> None:
    async def body() -> None:
        pool, here, there = PeerPool(), Actor(), Actor()
        pool.give("a", here)
        pool.give("b", there)
        taken = await asyncio.gather(*(pool.take("a", opened) for _ in range(2)))
        assert taken == [here, None]
        assert await pool.take("c", opened) is None
        await pool.close()
        assert killed == [there] and await pool.take("b", opened) is None

    asyncio.run(body())


def test_actors_that_do_not_answer_are_ended(killed: list[Any]) -> None:
    async def body() -> None:
        pool, dead, silent, last = (
            PeerPool(),
            Actor(ActorDiedError()),
            Actor(TimeoutError()),
            Actor(),
        )
        for actor in (dead, silent, last):
            pool.give("a", actor)
        assert await pool.take("a", opened) is last
        assert killed == [dead, silent]

    asyncio.run(body())


def test_a_late_call_for_an_earlier_peer_does_not_reach_the_next_one() -> None:
    async def body() -> None:
        actor = PeerActor("run-a0/peer-0", "peer-0")
        command = HostedPeer.command.__name__
        assert await actor.call("run-a0/peer-0", command, Train(), "1") is False
        await actor.open("run-a1/peer-0", "peer-0")
        with pytest.raises(PeerError, match="run-a0/peer-0 is not here"):
            await actor.call("run-a0/peer-0", command, Train(), "2")
        # calls are remembered for each peer: the key of an earlier one says nothing
        assert await actor.call("run-a1/peer-0", command, Train(), "1") is False

    asyncio.run(body())
