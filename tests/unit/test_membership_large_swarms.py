"""Swarms of real memberships on a virtual clock and network: losses, returns and news."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from benchmarks.simulated_swarm import HEARTBEAT_S, SILENCE_S, SimulatedPeer, SimulatedSwarm
from rayhive.membership.rings import RINGS, Rings

#: Time in which news reach every peer of these swarms [s].
SPREAD_S = 1.0
SIZES = (4, 8, 9, 20)


async def swarm_of(size: int, **options: Any) -> SimulatedSwarm:
    swarm = SimulatedSwarm(size, **{"seed": size, **options})
    await swarm.start()
    await swarm.all_known()
    await asyncio.sleep(2 * HEARTBEAT_S)
    return swarm


def ids(peers: list[SimulatedPeer]) -> set[bytes]:
    return {peer.peer_id for peer in peers}


async def assert_nobody_is_lost(swarm: SimulatedSwarm, seconds: float, pause: float = 0.2) -> None:
    """Look at the views of all live peers for a while."""
    live = ids(swarm.peers)
    for _ in range(int(seconds / pause)):
        await asyncio.sleep(pause)
        assert all(peer.view.alive_ids() == live for peer in swarm.peers)


def test_a_peer_is_a_successor_of_its_predecessors() -> None:
    rings = Rings(number.to_bytes(4, "big") for number in range(50))
    for peer in rings.peers:
        assert 1 < len(rings.successors(peer)) <= RINGS
        assert all(peer in rings.successors(other) for other in rings.predecessors(peer))
        assert all(peer in rings.predecessors(other) for other in rings.successors(peer))
    assert Rings([b"alone"]).neighbours(b"alone") == frozenset()


@pytest.mark.parametrize("size", SIZES)
def test_peers_that_live_are_not_lost_on_a_lossy_network(run: Any, size: int) -> None:
    async def body() -> None:
        swarm = await swarm_of(size, loss=0.02, latency_s=(0.02, 0.15))
        await assert_nobody_is_lost(swarm, 20.0)

    run(body())


def test_the_cost_of_heartbeats_does_not_depend_on_the_size(run: Any) -> None:
    async def body() -> None:
        for size in (16, 40):
            swarm = await swarm_of(size)
            swarm.network.reset()
            await asyncio.sleep(10 * HEARTBEAT_S)
            # calls to as many peers as there are rings, and from as many, with their answers
            assert max(t.messages for t in swarm.network.traffic.values()) <= 10 * 4 * RINGS
            assert max(t.bytes for t in swarm.network.traffic.values()) <= 10 * 1500
            await swarm.end()

    run(body())


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("how", "limit"), [("dead", 2.0), ("silent", SILENCE_S + 1.5)])
def test_a_death_is_noticed_by_all_and_no_other_peer_is_lost(
    run: Any, size: int, how: str, limit: float
) -> None:
    async def body() -> None:
        swarm = await swarm_of(size, loss=0.01)
        victim = swarm.peers[size // 2]
        getattr(swarm.network, how).add(victim.peer_id)
        await victim.stop()
        await swarm.until(lambda peer: not peer.view.is_alive(victim.peer_id), limit)
        assert all(peer.view.lost() == {victim.peer_id} for peer in swarm.peers)
        await assert_nobody_is_lost(swarm, 15.0)

    run(body())


@pytest.mark.parametrize("size", [4, 9, 20])
def test_many_deaths_at_once_are_noticed(run: Any, size: int) -> None:
    async def body() -> None:
        swarm = await swarm_of(size)
        victims = swarm.peers[:: 2 if size > 4 else 3]
        swarm.network.silent |= ids(victims)
        for victim in victims:
            await victim.stop()
        await swarm.all_known(2.5 * SILENCE_S)
        await assert_nobody_is_lost(swarm, 10.0)

    run(body())


@pytest.mark.parametrize("size", [*SIZES, 40])
def test_news_reach_all_peers_at_once(run: Any, size: int) -> None:
    async def body() -> None:
        swarm = await swarm_of(size)
        for number, peer in enumerate(swarm.peers):
            peer.announce(samples=number + 1)
        total = size * (size + 1) // 2
        await swarm.until(lambda peer: peer.view.samples() == total, 0.4)

    run(body())


@pytest.mark.parametrize("size", [4, 16])
def test_what_a_peer_announces_quietly_is_known_within_seconds(run: Any, size: int) -> None:
    async def body() -> None:
        swarm = await swarm_of(size)
        speaker = swarm.peers[0]
        speaker.view.announce(aloud=False, entered=1)

        def knows(peer: SimulatedPeer) -> bool:
            found = peer.view.find(speaker.peer_id)
            return found is not None and found.entered == 1

        await swarm.until(knows, 3 * HEARTBEAT_S)

    run(body())


@pytest.mark.parametrize("size", SIZES)
def test_a_healed_partition_is_a_reunion_for_all(run: Any, size: int) -> None:
    async def body() -> None:
        swarm = await swarm_of(size)
        halves = [set(ids(swarm.peers[::2])), set(ids(swarm.peers[1::2]))]
        swarm.network.cut = lambda one, other: (one in halves[0]) != (other in halves[0])

        def is_apart(peer: SimulatedPeer) -> bool:
            return peer.view.alive_ids() == halves[peer.peer_id not in halves[0]]

        times = await swarm.until(is_apart, 6 * SILENCE_S)
        await asyncio.sleep(20.0)
        assert all(map(is_apart, swarm.peers)), times
        swarm.network.cut = lambda one, other: False
        await swarm.all_known(5 * HEARTBEAT_S)
        await assert_nobody_is_lost(swarm, 10.0)
        for peer in swarm.peers:
            reunion = peer.view.take_reunion()
            assert reunion is not None
            assert reunion.peers == halves[peer.peer_id in halves[0]]

    run(body())


@pytest.mark.parametrize(
    ("size", "seed", "seconds"),
    [
        (4, 0, 5.0),
        (20, 0, 5.0),
        (20, 3, 0.0),
        pytest.param(20, 1, 5.0, marks=pytest.mark.slow),
        pytest.param(20, 3, 2.0, marks=pytest.mark.slow),
        pytest.param(20, 11, 20.0, marks=pytest.mark.slow),
    ],
)
def test_a_peer_that_is_cut_off_loses_all_others_and_comes_back_for_good(
    run: Any, size: int, seed: int, seconds: float
) -> None:
    async def body() -> None:
        swarm = await swarm_of(size, seed=seed)
        alone = swarm.peers[1].peer_id
        swarm.network.cut = lambda one, other: alone in (one, other)
        others = ids(swarm.peers) - {alone}
        await swarm.until(
            lambda peer: peer.view.alive_ids() == ({alone} if peer.peer_id == alone else others),
            2.5 * SILENCE_S,
        )
        await asyncio.sleep(seconds)
        swarm.network.cut = lambda one, other: False
        await swarm.all_known(5 * HEARTBEAT_S)
        await assert_nobody_is_lost(swarm, 1.5, pause=0.01)
        await assert_nobody_is_lost(swarm, 8.0)

    run(body())


def test_a_single_broken_link_in_a_large_swarm_costs_nobody_its_place(run: Any) -> None:
    async def body() -> None:
        swarm = await swarm_of(24)
        one = swarm.peers[3]
        other = sorted(one.caller.protocol.topology.beats)[0]
        ends = {one.peer_id, other}
        swarm.network.cut = lambda a, b: {a, b} == ends
        for _ in range(100):
            await asyncio.sleep(0.2)
            for peer in swarm.peers:
                assert peer.peer_id in ends or len(peer.view.alive_ids()) == 24

    run(body())


@pytest.mark.parametrize("size", [6, 20])
def test_peers_that_cannot_be_called_are_known_and_their_death_is_noticed(
    run: Any, size: int
) -> None:
    async def body() -> None:
        swarm = await swarm_of(size, clients=size // 3)
        await assert_nobody_is_lost(swarm, 10.0)
        victim = swarm.peers[-1]
        assert victim.client_mode
        victim.announce(samples=5)
        await swarm.until(lambda peer: peer.view.samples() == 5, SPREAD_S)
        swarm.network.silent.add(victim.peer_id)
        await victim.stop()
        await swarm.all_known(SILENCE_S + 2.5)
        await assert_nobody_is_lost(swarm, 10.0)

    run(body())


@pytest.mark.parametrize("size", [4, 16])
def test_all_peers_stop_waiting_for_a_straggler_until_it_goes_on(run: Any, size: int) -> None:
    async def body() -> None:
        swarm = await swarm_of(size)
        for peer in swarm.peers:
            peer.view.straggler_timeout = 20.0
        stuck = swarm.peers[-1]

        async def work() -> None:
            while True:
                await asyncio.sleep(1.0)
                for peer in swarm.peers:
                    if peer is not stuck:
                        peer.view.note_progress()

        working = asyncio.create_task(work())
        here = ids(swarm.peers)

        def sees(peers: set[bytes]) -> Any:
            return lambda peer: (
                {p.peer_id for p in peer.view.participants()} - {peer.peer_id}
                == peers - {peer.peer_id}
            )

        await swarm.until(sees(here - {stuck.peer_id}), 25.0)
        stuck.view.note_progress()
        await swarm.until(sees(here), 3.0)
        working.cancel()

    run(body())


@pytest.mark.parametrize(("size", "seed"), [(10, 10), (12, 106)])
def test_a_check_that_began_before_a_link_healed_loses_no_peer(
    run: Any, size: int, seed: int
) -> None:
    """Random deaths, joins and cuts; after the last cut, all views become right within seconds."""

    async def body() -> None:
        draw = random.Random(seed)
        swarm = SimulatedSwarm(size, seed=seed, loss=0.01)
        await swarm.start()
        await swarm.all_known()
        await asyncio.sleep(2.0)
        for _ in range(4):
            await trouble(swarm, draw)
            await asyncio.sleep(draw.choice([1.0, 3.0, 5.0, 9.0, 15.0]))
            swarm.network.cut = lambda one, other: False
            await asyncio.sleep(draw.choice([0.0, 0.5, 3.0]))
        await swarm.all_known(2 * SILENCE_S)
        await assert_nobody_is_lost(swarm, 20.0)

    run(body())


async def trouble(swarm: SimulatedSwarm, draw: random.Random) -> None:
    """Cut links, kill a peer, or let one join."""
    network, peers = swarm.network, swarm.peers
    kind = draw.choice(["cut", "partition", "kill", "join", "cut and kill"])
    if kind in ("cut", "cut and kill"):
        alone = draw.choice(peers).peer_id
        network.cut = lambda one, other: alone in (one, other)
        if kind == "cut and kill":
            victim = draw.choice([peer for peer in peers if peer.peer_id != alone])
            await asyncio.sleep(draw.uniform(0.0, 2.0))
            network.silent.add(victim.peer_id)
            await victim.stop()
    elif kind == "partition":
        side = {peer.peer_id for peer in peers if draw.random() < 0.5}
        network.cut = lambda one, other: (one in side) != (other in side)
    elif kind == "kill" and len(peers) > 5:
        victim = draw.choice(peers)
        (network.dead if draw.random() < 0.5 else network.silent).add(victim.peer_id)
        await victim.stop()
    elif kind == "join":
        await swarm.join()
