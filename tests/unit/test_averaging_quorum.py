"""Groups that begin with a quorum, on a loop whose clock jumps to the next event."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from hivemind.averaging.group_info import GroupInfo

from rayhive.averaging.group_formation import RoundIsOver
from rayhive.averaging.quorum import Quorum
from tests.unit.group_formation_fakes import LATENCY, LONGEST, Swarm, names_of

GRACE = 3.0
NAMES = ["a", "b", "c", "d"]


@pytest.mark.parametrize(
    ("min_peers", "live", "size"),
    [(1, 4, 3), (2, 3, 2), (3, 4, 3), (3, 8, 5), (6, 8, 6), (9, 4, 4), (1, 2, 2), (1, 1, 1)],
)
def test_a_quorum_is_more_than_half_and_at_most_all(min_peers: int, live: int, size: int) -> None:
    assert Quorum(min_peers).size(live) == size


@pytest.mark.parametrize("slow", NAMES)
def test_a_slow_peer_holds_the_others_for_the_grace_period_only(run: Any, slow: str) -> None:
    """Also the one that would lead. It learns that the round is over when it comes."""

    async def body() -> None:
        swarm = Swarm(NAMES, quorum=Quorum(3, GRACE))
        on_time = [name for name in NAMES if name != slow]
        swarm.all_see_arrivals(NAMES, "".join(on_time))
        groups = await asyncio.gather(*map(swarm.meet, on_time))
        assert all(names_of(group) == set(on_time) for group in groups)
        assert len({group.group_id for group in groups}) == 1
        assert GRACE - 0.01 <= asyncio.get_running_loop().time() < GRACE + 10 * LATENCY
        for peer in swarm.peers.values():  # the others announce that they have averaged it
            peer.set_members([swarm.member(n, 1, int(n != slow)) for n in NAMES])
        with pytest.raises(RoundIsOver):
            await swarm.meet(slow)

    run(body())


def test_a_peer_that_comes_within_the_grace_period_is_in_the_group(run: Any) -> None:
    async def body() -> None:
        swarm = Swarm(NAMES, quorum=Quorum(3, GRACE))
        swarm.all_see_arrivals(NAMES, "bcd")
        tasks = [asyncio.ensure_future(swarm.meet(name)) for name in "bcd"]
        await asyncio.sleep(GRACE / 2)
        swarm.all_see_arrivals(NAMES, "abcd")
        groups = await asyncio.gather(*tasks, swarm.meet("a"))
        assert all(names_of(group) == set(NAMES) for group in groups)
        assert asyncio.get_running_loop().time() < GRACE

    run(body())


def test_without_a_quorum_there_is_no_grace_period(run: Any) -> None:
    """Two of four are no quorum, whatever was asked for: two groups could begin."""

    async def body() -> None:
        swarm = Swarm(NAMES, quorum=Quorum(1, GRACE))
        swarm.all_see_arrivals(NAMES, "ab")
        tasks = [asyncio.ensure_future(swarm.meet(name)) for name in "ab"]
        await asyncio.sleep(10 * GRACE)
        assert not any(task.done() for task in tasks)
        swarm.all_see_arrivals(NAMES, "abd")
        groups = await asyncio.gather(*tasks, swarm.meet("d"))
        assert all(names_of(group) == {"a", "b", "d"} for group in groups)
        assert 11 * GRACE - 0.01 <= asyncio.get_running_loop().time() < 11 * GRACE + 10 * LATENCY

    run(body())


def test_a_peer_that_was_left_out_is_awaited_only_where_the_quorum_needs_it(run: Any) -> None:
    async def body() -> None:
        swarm = Swarm(NAMES, quorum=Quorum(3, GRACE))

        def see(entered: str, left_out: str) -> None:
            for peer in swarm.peers.values():
                peer.set_members(
                    [
                        swarm.member(n, entered=int(n in entered))._replace(left_out=n in left_out)
                        for n in NAMES
                    ]
                )

        see("abc", "d")
        groups = await asyncio.gather(*map(swarm.meet, "abc"))
        assert all(names_of(group) == set("abc") for group in groups)
        assert asyncio.get_running_loop().time() < 10 * LATENCY, "no grace period for it"

        swarm = Swarm(NAMES, quorum=Quorum(3, GRACE))
        see("ab", "cd")
        begin = asyncio.get_running_loop().time()
        tasks = [asyncio.ensure_future(swarm.meet(name)) for name in "ab"]
        await asyncio.sleep(LONGEST / 2)
        assert not any(task.done() for task in tasks)
        see("abc", "d")  # it has caught up, and waits for the round
        groups = await asyncio.gather(*tasks, swarm.meet("c"))
        assert all(names_of(group) == set("abc") for group in groups)
        assert asyncio.get_running_loop().time() < begin + LONGEST / 2 + 10 * LATENCY

    run(body())


def test_a_peer_is_not_alone_while_peers_of_its_quorum_catch_up(run: Any) -> None:
    """The peers of its last group have died; the one that was left out is half of the swarm."""

    async def body() -> None:
        swarm = Swarm(["a", "d"], quorum=Quorum(3, GRACE))

        def see(left_out: bool) -> None:
            for peer in swarm.peers.values():
                late = swarm.member("d", entered=int(not left_out))._replace(left_out=left_out)
                peer.set_members([swarm.member("a", entered=1), late])

        see(left_out=True)
        waiting = asyncio.ensure_future(swarm.meet("a"))
        await asyncio.sleep(2.0)
        assert not waiting.done()
        see(left_out=False)
        groups = await asyncio.gather(waiting, swarm.meet("d"))
        assert all(names_of(group) == {"a", "d"} for group in groups)
        assert asyncio.get_running_loop().time() < 2.0 + 10 * LATENCY

    run(body())


def test_a_leader_that_hangs_does_not_end_the_wait_for_a_quorum(run: Any) -> None:
    async def body() -> None:
        swarm = Swarm(["a", "b", "c"], quorum=Quorum(2, GRACE))
        swarm.dead.add("a")

        def see(left_out: bool) -> None:
            for peer in swarm.peers.values():
                late = swarm.member("c", entered=int(not left_out))._replace(left_out=left_out)
                peer.set_members([*(swarm.member(n, entered=1) for n in "ab"), late])

        see(left_out=True)
        waiting = asyncio.ensure_future(swarm.meet("b"))
        await asyncio.sleep(LONGEST / 2)
        assert not waiting.done()
        see(left_out=False)
        groups = await asyncio.gather(waiting, swarm.meet("c"))
        assert all(names_of(group) == {"b", "c"} for group in groups)

    run(body())


@pytest.mark.parametrize("seed", range(200))
def test_a_round_has_one_group_however_peers_arrive(run: Any, seed: int) -> None:
    """Announcements of arrivals take up to a heartbeat, and reach each peer at another time."""

    async def body() -> None:
        rng = random.Random(seed)
        names = [f"peer{index}" for index in range(rng.randint(3, 9))]
        quorum = Quorum(rng.randint(1, len(names)), rng.choice([0.0, 0.1, GRACE]))
        swarm = Swarm(names, seed, quorum)
        entered: dict[str, set[str]] = {name: {name} for name in names}
        ended: dict[str, set[str]] = {name: set() for name in names}

        def show(observer: str) -> None:
            swarm.peers[observer].set_members(
                [
                    swarm.member(n, int(n in ended[observer]), int(n in ended[observer]), 1)
                    if n in ended[observer]
                    else swarm.member(n, entered=int(n in entered[observer]))
                    for n in names
                ]
            )

        async def tell(news: dict[str, set[str]], about: str) -> None:
            async def later(observer: str) -> None:
                await asyncio.sleep(rng.uniform(0, 1.0))
                news[observer].add(about)
                show(observer)

            await asyncio.gather(*(later(n) for n in names if n != about))

        telling: list[asyncio.Future[None]] = []

        async def one(name: str) -> GroupInfo | None:
            await asyncio.sleep(rng.choice([rng.uniform(0, 1), rng.uniform(0, 10)]))
            telling.append(asyncio.ensure_future(tell(entered, name)))
            try:
                group = await swarm.meet(name)
            except RoundIsOver:
                return None
            await asyncio.sleep(4 * LATENCY)  # an all-reduce, which needs every member
            telling.append(asyncio.ensure_future(tell(ended, name)))
            return group

        for name in names:
            show(name)
        found = await asyncio.gather(*map(one, names))
        await asyncio.gather(*telling)
        groups = {group.group_id: group for group in found if group is not None}
        assert len(groups) == 1
        (group,) = groups.values()
        assert len(group.peer_ids) >= quorum.size(len(names))
        # An answer may cross the grace period of its receiver, which misses the round then.
        assert names_of(group) >= {n for n, f in zip(names, found, strict=True) if f is not None}
        assert asyncio.get_running_loop().time() < 11 + GRACE + 2

    run(body())
