"""Bulk data as a sign of life: late heartbeats beside them, silence, and processes that share."""

from __future__ import annotations

import asyncio
import math
import multiprocessing
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.simulated_swarm import HEARTBEAT_S, SILENCE_S, SimulatedSwarm
from rayhive.membership.known_peer import LEFT_S
from rayhive.membership.protocol import FAILURES, Protocol
from rayhive.membership.signs import SLOTS, SignsOfLife
from rayhive.membership.view import Heartbeat, MembershipView
from tests.unit.clock_fakes import Clock

A, B = b"peer a", b"peer b"


def test_each_peer_has_the_time_of_its_last_sign(clock: Clock) -> None:
    signs = SignsOfLife(clock)
    assert signs.last(A) == signs.newest() == -math.inf
    signs.note(A)
    clock.now += 3.0
    signs.note(B)
    assert (signs.last(A), signs.last(B), signs.newest()) == (100.0, 103.0, 103.0)
    clock.now += 1.0
    signs.note(A)
    assert (signs.last(A), signs.last(B), signs.newest()) == (104.0, 103.0, 104.0)


def test_the_oldest_sign_makes_room_for_another_peer(clock: Clock) -> None:
    signs = SignsOfLife(clock)
    for number in range(SLOTS + 1):
        clock.now += 1.0
        signs.note(b"%d" % number)
    assert signs.last(b"0") == -math.inf
    assert [signs.last(b"%d" % n) for n in (1, SLOTS)] == [102.0, 101.0 + SLOTS]


def test_another_process_sees_the_signs() -> None:
    signs = SignsOfLife()
    process = multiprocessing.get_context("fork").Process(target=signs.note, args=(A,))
    process.start()
    process.join(60)
    assert process.exitcode == 0
    assert 0 < signs.last(A) < math.inf and signs.last(B) == -math.inf


@pytest.fixture
def view(clock: Clock) -> MembershipView:
    made = MembershipView(Heartbeat(b"own", 0.0), SILENCE_S, clock)
    for peer in (A, B):
        made.receive(Heartbeat(peer, 0.0, version=1, takes_part=True))
    return made


def test_a_peer_is_not_silent_while_its_data_come(view: MembershipView, clock: Clock) -> None:
    signs = {A: clock.now + SILENCE_S}
    view.sign_of = lambda peer: signs.get(peer, -math.inf)
    clock.now += SILENCE_S + 0.1
    assert view.lost() == {B}
    clock.now = signs[A] + SILENCE_S
    assert view.lost() == {B} and view.heard_of(A) == signs[A]
    clock.now += 0.1
    assert view.lost() == {A, B}


def test_a_sign_does_not_bring_back_a_peer_that_was_given_up(
    view: MembershipView, clock: Clock
) -> None:
    view.give_up(A)
    view.sign_of = lambda peer: clock.now + 1.0
    clock.now += 2.0
    assert view.lost() == {A}


def test_calls_that_fail_beside_data_do_not_count(view: MembershipView, clock: Clock) -> None:
    signs: dict[bytes, float] = {}
    view.sign_of = lambda peer: signs.get(peer, -math.inf)
    protocol = Protocol(view, clock, HEARTBEAT_S)
    given_up: list[bytes] = []
    for _ in range(2 * FAILURES):
        calls = protocol.due()
        clock.now += protocol.patience
        signs[A] = clock.now
        given_up += [call.peer for call in calls if protocol.failed(call)]
        clock.now += HEARTBEAT_S if given_up else 0.0  # until then, the next calls are due at once
    assert given_up == [B]
    assert view.alive_ids() == {b"own", A}


def test_a_peer_that_left_is_not_called_for_ever(view: MembershipView, clock: Clock) -> None:
    protocol = Protocol(view, clock, HEARTBEAT_S)
    (left,) = (each for each in view.known() if each.peer_id == A)
    view.receive(replace(left, version=left.version + 1, takes_part=False))

    def called(seconds: float) -> set[bytes]:
        peers, end = set(), clock.now + seconds
        while clock.now < end:
            calls = protocol.due()
            for call in calls:
                peers.add(call.peer)
                protocol.failed(call)
            clock.now += HEARTBEAT_S
        return peers

    assert called(LEFT_S) == {A, B}
    called(2.0)
    assert called(LEFT_S) == {B}  # it was lost, and may come back


@pytest.mark.parametrize("size", [3, 9])
def test_bulk_data_beside_late_heartbeats_keep_peers_alive(run: Any, size: int) -> None:
    """Each message takes 6 s, longer than a silence and than the patience of two calls."""

    async def body() -> None:
        swarm = SimulatedSwarm(size, seed=size)
        await swarm.start()
        await swarm.all_known()
        loop, silent = asyncio.get_running_loop(), swarm.network.silent
        for peer in swarm.peers:
            peer.view.sign_of = lambda other: -math.inf if other in silent else loop.time()
        swarm.network.queue_s = 6.0
        live = {peer.peer_id for peer in swarm.peers}
        for _ in range(100):
            await asyncio.sleep(0.3)
            assert all(peer.view.alive_ids() == live for peer in swarm.peers)
        gone = swarm.peers[1]
        silent.add(gone.peer_id)
        await gone.stop()
        swarm.network.queue_s = 0.0
        await swarm.until(lambda peer: not peer.view.is_alive(gone.peer_id), 60.0)
        assert all(peer.view.alive_ids() == live - {gone.peer_id} for peer in swarm.peers)
        await swarm.end()

    run(body())
