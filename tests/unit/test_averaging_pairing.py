"""Random pairs of a round, and groups of them on a loop whose clock jumps to the next event."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from itertools import combinations
from typing import Any

import pytest

from rayhive.averaging.group_formation import NoOtherPeers
from rayhive.averaging.pairing import Pairing
from tests.unit.group_formation_fakes import LATENCY, LONGEST, Swarm, names_of

NAMES = ["a", "b", "c", "d"]


def groups_of(peers: list[bytes], round_: int, seed: str = "run") -> set[frozenset[bytes]]:
    return {Pairing(seed).group(peer, peers, round_) for peer in peers}


@pytest.mark.parametrize("count", range(1, 10))
def test_pairs_are_a_partition_with_at_most_one_group_of_three(count: int) -> None:
    peers = [bytes([number]) for number in range(count)]
    for round_ in range(50):
        groups = groups_of(peers, round_)
        assert sorted(peer for group in groups for peer in group) == peers
        sizes = Counter(map(len, groups))
        even = {2: count // 2}
        odd = {1: 1} if count == 1 else {2: count // 2 - 1, 3: 1}
        assert sizes == Counter(odd if count % 2 else even)


def test_pairs_are_random_over_the_rounds_and_the_same_whoever_asks() -> None:
    peers = [name.encode() for name in NAMES]
    rounds = 600
    found = Counter(pair for n in range(rounds) for pair in groups_of(peers, n))
    assert found.keys() == {frozenset(pair) for pair in combinations(peers, 2)}
    # a pair of four has probability 1/3; 5 standard deviations of a binomial distribution
    deviation = 5 * (rounds * 1 / 3 * 2 / 3) ** 0.5
    assert all(abs(count - rounds / 3) < deviation for count in found.values())
    assert groups_of(peers, 3) == groups_of(peers[::-1], 3)
    assert any(groups_of(peers, n) != groups_of(peers, n, "other") for n in range(20))


def swarm_of(names: list[str], seed: int = 0) -> Swarm:
    swarm = Swarm(names, seed)
    for peer in swarm.peers.values():
        peer.pairing = Pairing("run")
    swarm.all_see(names)
    return swarm


def expected(names: list[str], round_: int) -> dict[str, set[str]]:
    peers = [name.encode() for name in names]
    pairs = {name: Pairing("run").group(name.encode(), peers, round_) for name in names}
    return {name: {peer.decode() for peer in pair} for name, pair in pairs.items()}


@pytest.mark.parametrize("names", [NAMES[:2], NAMES, [*NAMES, "e"], list("abcdefgh")])
def test_every_pair_is_a_group_of_its_own(run: Any, names: list[str]) -> None:
    async def body() -> None:
        swarm = swarm_of(names)
        for round_ in range(1, 8):
            found = await asyncio.gather(*(swarm.meet(name, round_) for name in names))
            wanted = expected(names, round_)
            assert {n: names_of(g) for n, g in zip(names, found, strict=True)} == wanted
            assert len({g.group_id for g in found}) == len({frozenset(w) for w in wanted.values()})
            for peer in swarm.peers.values():
                peer.set_members([swarm.member(name, round_, round_) for name in names])

    run(body())


def test_a_pair_does_not_wait_for_another_one(run: Any) -> None:
    """The others still compute, or have averaged the round already: both is nothing to this one."""

    async def body() -> None:
        swarm = swarm_of(NAMES)
        first = sorted(expected(NAMES, 1)["a"])
        swarm.all_see_arrivals(NAMES, "".join(first))
        await asyncio.gather(*map(swarm.meet, first))
        assert asyncio.get_running_loop().time() < 10 * LATENCY
        rest = [name for name in NAMES if name not in first]
        for peer in swarm.peers.values():
            members = [swarm.member(n, int(n in first), int(n in first), entered=1) for n in NAMES]
            peer.set_members(members)
        found = await asyncio.gather(*map(swarm.meet, rest))
        assert all(names_of(group) == set(rest) for group in found)

    run(body())


def test_a_peer_is_alone_once_its_partner_has_ended_the_round_without_it(run: Any) -> None:
    async def body() -> None:
        swarm = swarm_of(NAMES)
        (partner,) = expected(NAMES, 1)["a"] - {"a"}
        swarm.peers[partner].leave_behind(1)
        task = asyncio.ensure_future(swarm.meet("a"))
        await asyncio.sleep(1.0)
        assert not task.done(), "its announcement is not here yet"
        members = [swarm.member(name, averaged=int(name == partner)) for name in NAMES]
        swarm.peers["a"].set_members(members)
        with pytest.raises(NoOtherPeers):
            await task

    run(body())


@pytest.mark.parametrize("seed", range(20))
def test_every_search_ends_while_views_differ(run: Any, seed: int) -> None:
    """A peer dies while groups form; the others hear of it at different times."""

    async def body() -> None:
        names = list("abcdef")
        swarm, chance = swarm_of(names, seed), random.Random(seed)
        dead = chance.choice(names)
        swarm.dead.add(dead)
        alive = [name for name in names if name != dead]
        tasks = {}

        async def hear_and_meet(name: str) -> Any:
            await asyncio.sleep(chance.uniform(0, 1))
            tasks[name] = asyncio.ensure_future(swarm.meet(name))
            await asyncio.sleep(chance.uniform(0, 2))
            swarm.peers[name].set_members([swarm.member(n, averaged=int(n in done)) for n in alive])
            return await asyncio.gather(tasks[name], return_exceptions=True)

        done: set[str] = set()

        def announce(name: str) -> None:  # a peer that has ended the round tells all others
            done.add(name)
            for other in alive:
                known = swarm.peers[other].known()
                seen = [n for n in names if swarm.ids[n] in known]
                members = [swarm.member(n, averaged=int(n in done)) for n in seen]
                swarm.peers[other].set_members(members)

        async def part(name: str) -> Any:
            (found,) = await hear_and_meet(name)
            announce(name)
            return found

        found = await asyncio.wait_for(asyncio.gather(*map(part, alive)), LONGEST)
        groups: dict[bytes, set[str]] = {}
        for name, result in zip(alive, found, strict=True):
            if isinstance(result, BaseException):
                assert isinstance(result, NoOtherPeers), result
                continue
            assert name in names_of(result) and dead not in names_of(result)
            groups.setdefault(result.group_id, set()).add(name)
        # a member may have left a group before its answer came: the averaging of the rest fails
        assert any(len(members) >= 2 for members in groups.values())

    run(body())
