"""Peers that reach a round whose group has begun without them, on a loop with a virtual clock."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Collection
from typing import Any

import pytest
from hivemind.averaging.group_info import GroupInfo
from hivemind.p2p import PeerID
from hivemind.proto import averaging_pb2 as messages

from rayhive.averaging.begun_rounds import ASK_S, BegunRound
from rayhive.averaging.group_formation import RoundIsOver
from rayhive.averaging.quorum import Quorum
from tests.unit.group_formation_fakes import (
    LATENCY,
    PATIENCE,
    WINDOW,
    Swarm,
    names_of,
)

#: Duration of an all-reduce that outlasts every wait for peers [s].
LONG = PATIENCE + 2 * WINDOW
EVERYBODY = "abcde"
NAMES = list(EVERYBODY)


async def average(
    swarm: Swarm, name: str, seconds: float = LONG, window: float = WINDOW
) -> GroupInfo:
    """Take part in round 1 with an all-reduce that lasts for some time."""
    group = await swarm.peers[name].meet(1, name.encode(), window, PATIENCE, 10 * LONG)
    await asyncio.sleep(seconds)
    swarm.peers[name].leave_behind(1)
    return group


async def begin(swarm: Swarm, names: Collection[str]) -> list[asyncio.Future[GroupInfo]]:
    """Let peers begin a group, 1 s before all others are known to have reached the round."""
    swarm.all_see_arrivals(list(names), EVERYBODY)
    running = [asyncio.ensure_future(average(swarm, name)) for name in names]
    await asyncio.sleep(1.0)
    swarm.all_see_arrivals(NAMES, EVERYBODY)
    return running


@pytest.mark.parametrize("late", ["de", "ab", "ae", "abc"])
@pytest.mark.parametrize("quorum", [None, Quorum(3, 1.0)])
@pytest.mark.parametrize("window", [0.5, WINDOW])
def test_late_peers_form_no_second_group(
    run: Any, late: str, quorum: Quorum | None, window: float
) -> None:
    """Also where they are the oldest, and would lead. They wait until the round is over."""

    async def body() -> None:
        swarm = Swarm(NAMES, quorum=quorum)
        on_time = [name for name in NAMES if name not in late]
        running = await begin(swarm, on_time)
        waiting = [asyncio.ensure_future(average(swarm, name, window=window)) for name in late]
        groups = await asyncio.gather(*running)
        assert all(names_of(group) == set(on_time) for group in groups)
        assert asyncio.get_running_loop().time() == pytest.approx(LONG, abs=1.0)
        for peer in swarm.peers.values():
            peer.set_members([swarm.member(n, 1, int(n in on_time), 1) for n in NAMES])
        for result in await asyncio.gather(*waiting, return_exceptions=True):
            assert isinstance(result, RoundIsOver)
        assert asyncio.get_running_loop().time() < LONG + 2.0, "they learned it at once"

    run(body())


def test_late_peers_join_the_second_attempt_of_a_round(run: Any) -> None:
    async def body() -> None:
        swarm = Swarm(NAMES)
        first = await begin(swarm, "bcd")
        late = [asyncio.ensure_future(average(swarm, name)) for name in "ae"]
        await asyncio.sleep(LONG / 2)
        for attempt in first:  # the all-reduce failed
            attempt.cancel()
        second = await asyncio.gather(*(average(swarm, name) for name in "bcd"), *late)
        assert all(names_of(group) == set(NAMES) for group in second)
        assert asyncio.get_running_loop().time() < LONG / 2 + LONG + 5.0

    run(body())


def test_late_peers_go_on_without_a_group_that_died(run: Any) -> None:
    async def body() -> None:
        swarm = Swarm(NAMES)
        first = await begin(swarm, "bcd")
        late = [asyncio.ensure_future(average(swarm, name, 0.0)) for name in "ae"]
        await asyncio.sleep(LONG / 2)
        swarm.dead |= set("bcd")
        for attempt in first:
            attempt.cancel()
        swarm.all_see_arrivals(list("ae"), EVERYBODY)
        groups = await asyncio.gather(*late)
        assert all(names_of(group) == set("ae") for group in groups)
        assert asyncio.get_running_loop().time() < LONG / 2 + 1.0 + 10 * LATENCY

    run(body())


@pytest.mark.parametrize("late", ["ab", "de"])
def test_late_peers_average_a_round_that_the_others_gave_up(run: Any, late: str) -> None:
    async def body() -> None:
        swarm, on_time = Swarm(NAMES), [name for name in NAMES if name not in late]
        for name in on_time:  # their all-reduce has failed, and their announcement is on its way
            swarm.peers[name].leave_behind(1)
        swarm.all_see_arrivals(NAMES, EVERYBODY)
        waiting = [asyncio.ensure_future(average(swarm, name, 0.0)) for name in late]
        await asyncio.sleep(4.0)
        assert not any(task.done() for task in waiting)
        for peer in swarm.peers.values():
            peer.set_members(
                [swarm.member(n, entered=1)._replace(averaged=int(n in on_time)) for n in NAMES]
            )
        groups = await asyncio.gather(*waiting)
        assert all(names_of(group) == set(late) for group in groups)
        assert asyncio.get_running_loop().time() < 4.0 + 10 * LATENCY

    run(body())


def test_a_peer_that_reaches_no_member_of_the_group_hears_of_it_from_others(run: Any) -> None:
    """The late e reaches the late b only, which waits for the group that a leads."""

    async def body() -> None:
        swarm = Swarm(NAMES)
        reach = swarm.peers["e"].ask

        async def cut(leader: PeerID, request: Any) -> Any:
            if leader.to_bytes() != b"b":
                raise ConnectionError("the link is cut")
            return await reach(leader, request)

        swarm.peers["e"].ask = cut
        running = await begin(swarm, "acd")
        late = [asyncio.ensure_future(average(swarm, name)) for name in "be"]
        await asyncio.gather(*running)
        for peer in swarm.peers.values():
            peer.set_members([swarm.member(n, 1, int(n in "acd"), 1) for n in NAMES])
        for result in await asyncio.gather(*late, return_exceptions=True):
            assert isinstance(result, RoundIsOver)

    run(body())


def test_a_question_is_no_request_to_join(run: Any) -> None:
    """A peer that has to repeat a round asks for it before the other one does."""

    async def body() -> None:
        swarm = Swarm(["a", "b"])
        for name, peer in swarm.peers.items():  # each takes itself for the older one
            peer.leave_behind(1)
            other = "b" if name == "a" else "a"
            peer.set_members([swarm.member(name, entered=1), swarm.member(other, entered=1)])
        tasks = [asyncio.ensure_future(average(swarm, name, 0.0)) for name in "ab"]
        await asyncio.sleep(3 * ASK_S)
        assert not any(task.done() for task in tasks)
        swarm.peers["b"].set_members([swarm.member(name, entered=1) for name in "ab"])
        groups = await asyncio.gather(*tasks)
        assert all(names_of(group) == {"a", "b"} for group in groups)

    run(body())


def test_a_late_leader_asks_few_of_many_members(run: Any) -> None:
    async def body() -> None:
        asked: list[PeerID] = []

        async def ask(member: PeerID) -> int:
            asked.append(member)
            return int(messages.ACCEPTED)

        members = [PeerID(bytes([index])) for index in range(64)]
        begun = BegunRound(ask, lambda: begun.ask_about(members), WINDOW)
        begun.ask_about(members)
        await asyncio.sleep(10.5 * ASK_S)
        begun.ask_about(())
        assert len(asked) == len(members) + 9

    run(body())


@pytest.mark.parametrize("steps", range(6))
def test_a_question_ends_although_its_cancellation_crosses_the_answer(run: Any, steps: int) -> None:
    async def body() -> None:
        asked: list[PeerID] = []
        ending: list[asyncio.Future[None]] = []

        async def end() -> None:
            for _ in range(steps):
                await asyncio.sleep(0)
            begun.ask_about(())

        async def ask(member: PeerID) -> int:
            asked.append(member)
            ending.append(asyncio.ensure_future(end()))
            await asyncio.sleep(0)
            return int(messages.ACCEPTED)

        begun = BegunRound(ask, changed=lambda: None, window=WINDOW)
        begun.ask_about([PeerID(b"a")])
        await asyncio.sleep(10 * ASK_S)
        assert (len(asked), begun.begun) == (1, set())

    run(body())


@pytest.mark.parametrize("seed", range(100))
def test_a_round_has_one_group_however_late_peers_are(run: Any, seed: int) -> None:
    """Some come after the window, or while the others average. Announcements take up to 1 s."""

    async def body() -> None:
        rng = random.Random(seed)
        names = [f"peer{index}" for index in range(rng.randint(3, 9))]
        quorum = rng.choice([None, Quorum(rng.randint(1, len(names)), 1.0)])
        swarm, lasts = Swarm(names, seed, quorum), rng.choice([0.2, WINDOW, LONG])
        known: dict[str, dict[str, Any]] = {n: {} for n in names}
        telling: list[asyncio.Future[None]] = []
        begun: list[float] = []
        gave_up: list[float] = []

        def show(observer: str) -> None:
            member = swarm.member
            swarm.peers[observer].set_members(
                [member(n, **known[observer].get(n, {"entered": 1})) for n in names]
            )

        async def tell(about: str, observer: str) -> None:
            await asyncio.sleep(rng.uniform(0, 1.0))
            known[observer][about] = {"round_": 1, "averaged": 1, "entered": 1}
            show(observer)

        async def one(name: str) -> GroupInfo | None:
            await asyncio.sleep(rng.choice([rng.uniform(0, 1), rng.uniform(WINDOW, WINDOW + LONG)]))
            try:
                group = await average(swarm, name, lasts)
                begun.append(asyncio.get_running_loop().time() - lasts)
            except RoundIsOver:
                return None
            except asyncio.TimeoutError:
                gave_up.append(asyncio.get_running_loop().time())
                return None
            telling.extend(asyncio.ensure_future(tell(name, n)) for n in names if n != name)
            return group

        for name in names:
            show(name)
        found = await asyncio.gather(*map(one, names))
        await asyncio.gather(*telling)
        assert len({group.group_id for group in found if group is not None}) <= 1
        assert begun or len(gave_up) == len(names)
        assert not begun or all(moment < min(begun) for moment in gave_up)

    run(body())
