"""Traffic of a round in a plan: bytes of gradients and parameters, and least time on the links."""

from __future__ import annotations

from typing import Any

import pytest

from rayhive.spec import Configuration, SwarmConfig
from rayhive.sweep.link_time import RoundTraffic, round_traffic

#: 10,000 float32 elements: 40,000 bytes.
SHAPES = ((100, 99), (100,))
DENSE = 40_000


def swarm(*links: tuple[int, float | None, float], **given: Any) -> SwarmConfig:
    """Return a swarm of node classes (peers, rate [Mbit/s], delay [ms])."""
    classes = {
        f"c{at}": {"count": count, "link": {"rate_mbit": rate, "delay_ms": delay}}
        for at, (count, rate, delay) in enumerate(links)
    }
    peers = sum(count for count, _, _ in links)
    return SwarmConfig.model_validate({"peers": peers, "node_classes": classes, **given})


def traffic(swarm: SwarmConfig, extras: tuple[Any, ...] = (), **values: Any) -> RoundTraffic:
    return round_traffic(SHAPES, extras, Configuration(**values), swarm)


def test_parameters_count_as_often_as_they_are_averaged() -> None:
    three = SwarmConfig(peers=3)
    never = traffic(three)
    assert (never.state_every, never.state_bytes, never.seconds) == (None, 0, None)
    assert never.bytes == never.gradient_bytes == pytest.approx(4 / 3 * DENSE)
    fifth = traffic(three, codec="float16", average_state_every=5, state_codec="float16")
    assert fifth.state_every == 5
    assert fifth.gradient_bytes == pytest.approx(4 / 3 * DENSE / 2)
    assert fifth.state_bytes == pytest.approx(4 / 3 * DENSE / 2 / 5)


def test_extra_tensors_travel_with_the_gradients_as_they_are() -> None:
    found = traffic(SwarmConfig(peers=2), extras=((25,),), codec="float16")
    assert (found.state_every, found.state_bytes) == (None, 0)
    assert found.gradient_bytes == DENSE / 2 + 100
    period = traffic(SwarmConfig(peers=2), extras=((25,),), average_state_every=4)
    assert (period.gradient_bytes, period.state_bytes) == (DENSE, (DENSE + 100) / 4)
    coded = traffic(
        SwarmConfig(peers=2), extras=((25,),), average_state_every=4, state_codec="float16"
    )
    assert coded.state_bytes == (DENSE / 2 + 100) / 4


def test_extra_tensors_make_parameters_travel_with_centred_clipping() -> None:
    found = traffic(SwarmConfig(peers=2, aggregation="centered_clipping"), extras=((25,),))
    assert (found.gradient_bytes, found.state_every) == (DENSE, 1)
    assert found.state_bytes == DENSE + 100
    inner = {"local_steps": 4, "outer_momentum": 0.0, "inner_state": "average"}
    clipped = traffic(SwarmConfig(peers=2, aggregation="centered_clipping"), **inner)
    assert (clipped.state_every, clipped.state_bytes) == (1, DENSE)
    assert traffic(SwarmConfig(peers=2), **inner).state_every is None


def test_the_slowest_link_and_the_longest_round_trip_bound_the_time() -> None:
    # two peers send one payload each; a round trip is 2 * (10 + 40) ms
    two = traffic(swarm((1, 100, 10), (1, 20, 40)))
    assert two.seconds == pytest.approx(DENSE * 8 / 20e6 + 0.1)
    # equal links: each of 3 peers reduces a third, and sends 1 + 1/3 payloads
    three = traffic(swarm((3, 20, 0)), average_state_every=2)
    assert three.seconds == pytest.approx(1.5 * 4 / 3 * DENSE * 8 / 20e6)


def test_a_slow_link_reduces_nothing_and_sends_its_own_payload() -> None:
    # 1 + x = t * b for both fast peers, x = 1/2, so t = 1.5/100; the slow one sends 1 payload
    found = traffic(swarm((2, 100, 0), (1, 10, 0)))
    assert found.seconds == pytest.approx(DENSE * 8 / 10e6)
    # one peer reduces everything: no packet goes from one slow link to the other
    found = traffic(swarm((1, 100, 5), (2, 20, 20)))
    assert found.seconds == pytest.approx(DENSE * 8 / 20e6 + 2 * (0.005 + 0.02))


def test_each_phase_of_powersgd_waits_for_a_round_trip() -> None:
    found = traffic(swarm((2, None, 50)), powersgd_rank=1, min_compression_ratio=0.0)
    assert found.seconds == pytest.approx(2 * 0.2)


def test_a_single_peer_and_unlimited_links_take_no_time() -> None:
    assert traffic(swarm((1, 10, 10))).seconds == 0
    assert traffic(SwarmConfig(peers=4)).seconds is None
