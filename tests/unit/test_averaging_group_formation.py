"""Group formation among peers that come, go and have different views; messages take random time.

The simulation runs the real group_formation of every peer on one event loop whose clock jumps to
the next event, so minutes pass in milliseconds.
"""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from hivemind.averaging.group_info import GroupInfo
from hivemind.proto import averaging_pb2 as messages

from rayhive.averaging.group_formation import DifferentTensors, NoOtherPeers, RoundIsOver
from rayhive.membership.view import Member
from tests.unit.group_formation_fakes import (
    LATENCY,
    LONGEST,
    PATIENCE,
    WINDOW,
    Swarm,
    names_of,
)


@pytest.mark.parametrize("size", range(2, 17))
def test_all_members_form_one_group_at_once(run: Any, size: int) -> None:
    async def body() -> None:
        names = [f"peer{index}" for index in range(size)]
        swarm = Swarm(names, seed=size)
        swarm.all_see(names)

        async def late(name: str) -> GroupInfo:
            await asyncio.sleep(swarm.random.uniform(0, 1.0))
            return await swarm.meet(name)

        groups = await asyncio.gather(*map(late, names))
        assert len({group.group_id for group in groups}) == 1
        assert all(names_of(group) == set(names) for group in groups)
        for group in groups:
            gathered = zip(group.peer_ids, group.gathered, strict=True)
            assert all(peer.to_bytes() == data for peer, data in gathered)
        assert asyncio.get_running_loop().time() < 1.0 + 4 * LATENCY

    run(body())


@pytest.mark.parametrize("seed", range(200))
def test_a_swarm_never_splits_however_peers_come_and_go(run: Any, seed: int) -> None:
    """Views change at random while peers search, and differ until a moment after the last change.

    Whatever happens, a round has one group; all live peers that all other peers see are in it.
    """

    async def body() -> None:
        draw = random.Random(seed)
        names = [f"peer{index:02}" for index in range(draw.randint(2, 16))]
        swarm = Swarm(names, seed)
        ages = draw.sample(names, draw.randint(1, len(names)))  # the oldest first
        here = set(ages)
        tasks: dict[str, asyncio.Future[GroupInfo]] = {}

        def see(observer: str, seen: set[str]) -> None:
            done = {name for name, task in tasks.items() if task.done()}
            ended = {name: int(name in done) for name in seen}
            members = [swarm.member(n, ended[n], ended[n]) for n in ages if n in seen]
            swarm.peers[observer].set_members(members)

        async def tell(observer: str, seen: set[str]) -> None:
            await asyncio.sleep(draw.uniform(0, 0.5))
            see(observer, seen)

        for name in names:
            see(name, here)
        tasks |= {name: asyncio.ensure_future(swarm.meet(name)) for name in here}

        telling: list[Any] = []
        # one keeps away, so that the group stays open while views change
        absent = draw.choice(sorted(here)) if len(here) > 2 else None
        if absent is not None:
            tasks.pop(absent).cancel()
        for _ in range(draw.randint(0, 6)):
            await asyncio.sleep(draw.uniform(0, 0.3))
            running = [name for name in tasks if not tasks[name].done()]
            outside = sorted(set(names) - here)
            if outside and draw.random() < 0.5:
                here.add(name := draw.choice(outside))
                ages = [*(other for other in ages if other != name), name]
                swarm.dead.discard(name)
                see(name, here)
                tasks[name] = asyncio.ensure_future(swarm.meet(name))
            elif len(running) > 2:
                here.discard(name := draw.choice(running))
                swarm.dead.add(name)
                tasks.pop(name).cancel()
            telling += [
                tell(observer, set(here)) for observer in names if observer not in swarm.dead
            ]
            telling = [asyncio.ensure_future(item) for item in telling]
        await asyncio.gather(*telling)
        if absent is not None:
            here.discard(absent)
        for name in here:  # the final view of every peer
            see(name, here)
        results = await asyncio.gather(*tasks.values(), return_exceptions=True)
        groups = [result for result in results if isinstance(result, GroupInfo)]
        others = [result for result in results if not isinstance(result, GroupInfo)]
        assert len({group.group_id for group in groups}) <= 1
        assert all(isinstance(other, (NoOtherPeers, RoundIsOver)) for other in others), others
        if absent is not None and len(here) > 1:
            assert {name for group in groups for name in names_of(group)} >= here
        assert asyncio.get_running_loop().time() < WINDOW, "no peer waited for the whole window"

    run(body())


def test_a_group_begins_when_the_death_of_a_member_is_noticed(run: Any) -> None:
    async def body() -> None:
        swarm = Swarm(["a", "b", "c", "d"])
        swarm.all_see(["a", "b", "c", "d"])
        tasks = [asyncio.ensure_future(swarm.meet(name)) for name in "bcd"]
        await asyncio.sleep(2.0)
        assert not any(task.done() for task in tasks)
        swarm.dead.add("a")  # the leader
        swarm.all_see(["b", "c", "d"])
        groups = await asyncio.gather(*tasks)
        assert all(names_of(group) == {"b", "c", "d"} for group in groups)
        assert len({group.group_id for group in groups}) == 1
        assert asyncio.get_running_loop().time() < 2.0 + 10 * LATENCY

    run(body())


def test_an_absent_member_is_awaited_for_its_window_and_misses_the_round(run: Any) -> None:
    async def body() -> None:
        swarm = Swarm(["a", "b", "c"])
        swarm.all_see(["a", "b", "c"])
        groups = await asyncio.gather(swarm.meet("a"), swarm.meet("b"))
        assert all(names_of(group) == {"a", "b"} for group in groups)
        assert WINDOW <= asyncio.get_running_loop().time() < WINDOW + 10 * LATENCY
        late = asyncio.ensure_future(swarm.meet("c"))
        await asyncio.sleep(1.0)
        assert not late.done(), "the group may have failed"
        members = [swarm.member("a", 1, 1), swarm.member("b", 1, 1), swarm.member("c")]
        swarm.peers["c"].set_members(members)
        with pytest.raises(RoundIsOver):
            await late
        assert asyncio.get_running_loop().time() < WINDOW + 1.0 + 10 * LATENCY

    run(body())


@pytest.mark.parametrize("names", ["bc", "bcd"])
def test_an_absent_leader_is_awaited_no_longer_than_a_follower(run: Any, names: str) -> None:
    """It lives and takes part, but its trainer does something else."""

    async def body() -> None:
        swarm = Swarm(["a", *names])
        swarm.all_see(["a", *names])
        groups = await asyncio.gather(*map(swarm.meet, names))
        assert all(names_of(group) == set(names) for group in groups)
        assert len({group.group_id for group in groups}) == 1
        assert WINDOW <= asyncio.get_running_loop().time() < WINDOW + 10 * LATENCY

    run(body())


def test_a_late_leader_leads(run: Any) -> None:
    async def body() -> None:
        swarm = Swarm(["a", "b", "c"])
        swarm.all_see(["a", "b", "c"])
        tasks = [asyncio.ensure_future(swarm.meet(name)) for name in "bc"]
        await asyncio.sleep(WINDOW - 1)
        groups = await asyncio.gather(swarm.meet("a"), *tasks)
        assert all(names_of(group) == {"a", "b", "c"} for group in groups)
        assert asyncio.get_running_loop().time() < WINDOW

    run(body())


@pytest.mark.parametrize("late", ["a", "b", "c"])
def test_a_computing_peer_is_awaited_beyond_the_window(run: Any, late: str) -> None:
    """Whether it leads or follows; a second one comes even later."""

    async def body() -> None:
        swarm, names = Swarm(["a", "b", "c", "d"]), ["a", "b", "c", "d"]
        early = [name for name in names if name not in (late, "d")]
        swarm.all_see_arrivals(names, "".join(early))
        tasks = [asyncio.ensure_future(swarm.meet(name)) for name in early]
        await asyncio.sleep(3 * WINDOW)
        tasks.append(asyncio.ensure_future(swarm.meet(late)))
        swarm.all_see_arrivals(names, "abc")
        await asyncio.sleep(3 * WINDOW)
        swarm.all_see_arrivals(names, "abcd")
        groups = await asyncio.gather(*tasks, swarm.meet("d"))
        assert len({group.group_id for group in groups}) == 1
        assert names_of(groups[0]) == set(names)
        assert asyncio.get_running_loop().time() < 6 * WINDOW + 10 * LATENCY

    run(body())


@pytest.mark.parametrize("stuck", ["a", "c"])
def test_a_former_member_is_not_awaited(run: Any, stuck: str) -> None:
    """It computed for too long."""

    async def body() -> None:
        names = ["a", "b", "c", "d"]
        swarm, others = Swarm(names), [name for name in names if name != stuck]
        swarm.all_see_arrivals(names, "".join(others))
        tasks = [asyncio.ensure_future(swarm.meet(name)) for name in others]
        await asyncio.sleep(2 * WINDOW)
        swarm.all_see_arrivals(others, "".join(others))
        groups = await asyncio.gather(*tasks)
        assert all(names_of(group) == set(others) for group in groups)
        assert asyncio.get_running_loop().time() < 2 * WINDOW + 10 * LATENCY

    run(body())


def test_a_missing_leader_is_asked_again_after_news_of_it(run: Any) -> None:
    """It had reached the round and answered no peer; another peer computes all the time."""

    async def body() -> None:
        names = ["a", "b", "c", "d"]
        swarm = Swarm(names)
        swarm.all_see_arrivals(names, "abc")
        tasks = [asyncio.ensure_future(swarm.meet(name)) for name in "bc"]
        await asyncio.sleep(WINDOW + 1)
        assert not any(task.done() for task in tasks)
        tasks.append(asyncio.ensure_future(swarm.meet("a")))
        for peer in swarm.peers.values():  # it began anew
            a = swarm.member("a", round_=-1, entered=1)
            peer.set_members([a, *(swarm.member(n, entered=int(n != "d")) for n in "bcd")])
        await asyncio.sleep(1)
        swarm.all_see_arrivals(names, "abcd")
        groups = await asyncio.gather(*tasks, swarm.meet("d"))
        assert all(names_of(group) == set(names) for group in groups)

    run(body())


def test_a_search_for_a_peer_that_computes_for_ever_ends_at_its_limit(run: Any) -> None:
    async def body() -> None:
        swarm = Swarm(["a", "b"])
        swarm.all_see_arrivals(["a", "b"], "a")
        with pytest.raises(asyncio.TimeoutError):
            await swarm.meet("a")
        assert LONGEST <= asyncio.get_running_loop().time() < LONGEST + 1

    run(body())


def test_a_search_without_other_peers_ends_with_the_window(run: Any) -> None:
    async def body() -> None:
        swarm = Swarm(["a", "b"])
        swarm.all_see(["a", "b"])
        with pytest.raises(asyncio.TimeoutError, match="did not reach round 1"):
            await swarm.meet("b")
        assert WINDOW <= asyncio.get_running_loop().time() < WINDOW + 10 * LATENCY

    run(body())


def test_a_peer_whose_round_is_over_learns_of_it_at_once(run: Any) -> None:
    async def body() -> None:
        swarm = Swarm(["a", "b"])
        swarm.peers["b"].set_members([swarm.member("a", 5, 5), swarm.member("b", 4, 4)])
        with pytest.raises(RoundIsOver):
            await swarm.meet("b", 5)
        assert asyncio.get_running_loop().time() == 0.0

    run(body())


def test_a_peer_far_behind_is_not_awaited(run: Any) -> None:
    async def body() -> None:
        swarm = Swarm(["a", "b", "c"])
        for peer in swarm.peers.values():
            peer.set_members(
                [swarm.member("a", 9, 9), swarm.member("b", 8, 8), swarm.member("c", 7, 7)]
            )
        groups = await asyncio.gather(swarm.meet("a", 10), swarm.meet("b", 10))
        assert all(names_of(group) == {"a", "b"} for group in groups)

    run(body())


def test_a_client_follows_and_never_leads(run: Any) -> None:
    async def body() -> None:
        swarm = Swarm(["a", "b"])
        client = Member(swarm.ids["a"].to_bytes(), True, 0, 0, 0)
        for peer in swarm.peers.values():
            peer.set_members([client, swarm.member("b")])
        assert swarm.peers["a"].roster(1)[0] == swarm.ids["b"]
        groups = await asyncio.gather(swarm.meet("a"), swarm.meet("b"))
        assert all(names_of(group) == {"a", "b"} for group in groups)

    run(body())


def test_a_leader_with_other_tensors_is_reported(run: Any) -> None:
    async def body() -> None:
        swarm = Swarm(["a", "b"])
        swarm.all_see(["a", "b"])
        swarm.peers["a"].schema_hash = b"other"
        leading = asyncio.ensure_future(swarm.meet("a"))
        with pytest.raises(DifferentTensors, match="other shapes or types"):
            await swarm.meet("b")
        leading.cancel()

    run(body())


def test_an_early_request_is_held_until_its_round(run: Any) -> None:
    async def body() -> None:
        swarm = Swarm(["a", "b"])
        swarm.all_see(["a", "b"])
        early = asyncio.ensure_future(swarm.meet("b", 1))
        await asyncio.sleep(3.0)
        asked = asyncio.get_running_loop().time()
        assert names_of(await swarm.meet("a", 1)) == names_of(await early) == {"a", "b"}
        assert asyncio.get_running_loop().time() - asked < 4 * LATENCY

    run(body())


def test_a_request_for_a_past_round_is_refused(run: Any) -> None:
    async def body() -> None:
        swarm = Swarm(["a", "b"])
        swarm.peers["a"].leave_behind(3)
        request = messages.JoinRequest(
            schema_hash=b"s", expiration=PATIENCE, gather=b"", group_key="k.0b11"
        )
        answers = swarm.peers["a"].rpc_join_group(request, swarm.ids["b"])
        assert [answer.code async for answer in answers] == [messages.BAD_GROUP_KEY]

    run(body())


def test_rounds_that_are_faster_than_announcements_keep_their_members(run: Any) -> None:
    """The views of all peers stay those of the first round."""

    async def body() -> None:
        swarm = Swarm(["a", "b", "c"])
        swarm.all_see(["a", "b", "c"])
        for round_ in range(1, 9):
            groups = await asyncio.gather(*(swarm.meet(name, round_) for name in swarm.peers))
            assert [names_of(group) for group in groups] == [{"a", "b", "c"}] * 3, round_
        with pytest.raises(NoOtherPeers):  # no group has shown where the others are
            await swarm.meet("a", 12)

    run(body())
