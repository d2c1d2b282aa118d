"""Actors that are unavailable for a while: calls are repeated, and done once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError

from rayhive.cluster import actors
from rayhive.cluster.actors import Once, repeated
from rayhive.cluster.replicate import swarm
from rayhive.cluster.replicate.peer_actor import Exited, StreamItem
from rayhive.cluster.replicate.swarm import relay
from rayhive.events import Progress


def unavailable() -> ActorUnavailableError:
    return ActorUnavailableError("a broken link", b"0" * 16)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (actors, swarm):
        monkeypatch.setattr(module, "RETRY_EVERY", 0.001)


def failing(*results: Any) -> Callable[[], Coroutine[Any, Any, Any]]:
    """Return a call that raises or returns these, one after the other."""
    left = list(results)

    async def call(*arguments: Any) -> Any:
        result = left.pop(0)
        if isinstance(result, Exception):
            raise result
        return result

    return call


def test_a_call_is_repeated_while_its_actor_is_unavailable() -> None:
    assert asyncio.run(repeated(failing(unavailable(), unavailable(), 7), 60.0)) == 7


def test_a_dead_actor_is_not_asked_again() -> None:
    with pytest.raises(ActorDiedError):
        asyncio.run(repeated(failing(unavailable(), ActorDiedError(), 7), 60.0))


def test_an_actor_that_stays_unavailable_is_given_up() -> None:
    with pytest.raises(ActorUnavailableError):
        asyncio.run(repeated(failing(unavailable(), 7), 0.0))


def test_a_repeated_call_is_done_once() -> None:
    async def run() -> tuple[list[int], int]:
        once, done = Once(), 0

        async def step() -> int:
            nonlocal done
            done += 1
            await asyncio.sleep(0)
            return done

        same = await asyncio.gather(*(once.do("a", step) for _ in range(3)))
        return [*same, await once.do("a", step), await once.do("b", step)], done

    assert asyncio.run(run()) == ([1, 1, 1, 1, 2], 2)


class Actor:
    """A peer's actor: asked for items, it gives or raises these."""

    def __init__(self, *answers: Any) -> None:
        self.asked: list[int] = []
        self._call = failing(*answers)

    def next_items(self, after: int, timeout: float) -> Any:
        self.asked.append(after)
        return self._call()


def relayed(actor: Actor, patience: float) -> list[StreamItem]:
    """Return the items that a supervisor receives from a peer's actor."""
    received: list[StreamItem] = []

    async def listen(name: str, item: StreamItem) -> None:
        received.append(item)

    asyncio.run(relay("peer-0", actor.next_items, listen, patience))
    return received


def test_a_peer_whose_actor_is_unavailable_for_a_while_lives() -> None:
    first, last = Progress(computed=1), Exited(0)
    actor = Actor([first], unavailable(), unavailable(), [], [last])
    assert relayed(actor, 60.0) == [first, last]
    assert actor.asked == [0, 1, 1, 1, 1]  # nothing was lost, nothing came twice


@pytest.mark.parametrize(
    ("error", "patience", "text"),
    [(ActorDiedError(), 60.0, "its actor died"), (unavailable(), 0.0, "could not be reached for")],
)
def test_a_peer_whose_actor_died_or_stays_away_is_lost(
    error: Exception, patience: float, text: str
) -> None:
    (end,) = relayed(Actor(error), patience)
    assert isinstance(end, Exited) and end.reason is not None and text in end.reason
