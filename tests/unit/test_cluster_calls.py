"""Actors that are unavailable for a while: calls are repeated, and done once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError

from rayhive.cluster import calls
from rayhive.cluster.calls import Once, repeated
from rayhive.cluster.replicate import swarm
from rayhive.cluster.replicate.peer_actor import EXITED
from rayhive.cluster.replicate.swarm import Swarm
from rayhive.events import Event
from tests.unit.test_cluster_control import SPEC


def unavailable() -> ActorUnavailableError:
    return ActorUnavailableError("a broken link", b"0" * 16)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (calls, swarm):
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
    """A peer's actor: ``next_events`` gives or raises these."""

    def __init__(self, *answers: Any) -> None:
        self.asked: list[int] = []
        call = failing(*answers)

        def next_events(after: int, timeout: float) -> Any:
            self.asked.append(after)
            return call()

        self.next_events = SimpleNamespace(remote=next_events)


def pumped(actor: Actor, patience: float, monkeypatch: pytest.MonkeyPatch) -> list[Event]:
    """Return what a swarm hears of a peer whose actor answers so."""
    heard: list[Event] = []

    async def listen(name: str, event: Event) -> None:
        heard.append(event)

    context = SimpleNamespace(get_node_id=lambda: "node")
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
    peers = Swarm(SPEC, {}, listen, patience)
    peers._actors["peer-0"] = actor
    asyncio.run(peers._pump("peer-0"))
    return heard


def test_a_peer_whose_actor_is_unavailable_for_a_while_lives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, last = {"kind": "round", "round": 1}, {"kind": EXITED, "exit_code": 0}
    actor = Actor([first], unavailable(), unavailable(), [], [last])
    assert pumped(actor, 60.0, monkeypatch) == [first, last]
    assert actor.asked == [0, 1, 1, 1, 1]  # nothing was lost, nothing came twice


@pytest.mark.parametrize(
    ("error", "patience", "text"),
    [(ActorDiedError(), 60.0, "its actor died"), (unavailable(), 0.0, "could not be reached for")],
)
def test_a_peer_whose_actor_died_or_stays_away_is_lost(
    monkeypatch: pytest.MonkeyPatch, error: Exception, patience: float, text: str
) -> None:
    (event,) = pumped(Actor(error), patience, monkeypatch)
    assert event["kind"] == EXITED and text in event["reason"]
