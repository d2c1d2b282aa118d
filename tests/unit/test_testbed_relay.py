"""The relay's queue of frames, over a pair of pipes."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator

import pytest

from rayhive.cluster.testbed import relay


@pytest.fixture
def pipes() -> Iterator[tuple[int, int, relay.Direction]]:
    """Yield the inlet, the outlet and the relay between them."""
    source, inlet = os.pipe2(os.O_NONBLOCK | os.O_DIRECT)
    outlet, sink = os.pipe2(os.O_NONBLOCK | os.O_DIRECT)
    yield inlet, outlet, relay.Direction(source, sink)
    for descriptor in (source, inlet, outlet, sink):
        os.close(descriptor)


def frames(outlet: int) -> list[bytes]:
    found = []
    try:
        while True:
            found.append(os.read(outlet, 100))
    except BlockingIOError:
        return found


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return a list whose last entry is the time."""
    times = [100.0]
    monkeypatch.setattr(relay.time, "monotonic", lambda: times[-1])
    return times


def test_a_frame_is_held_for_the_delay(
    pipes: tuple[int, int, relay.Direction], now: list[float]
) -> None:
    inlet, outlet, direction = pipes
    os.write(inlet, b"a")
    direction.take(0.5, 0.0, random.Random(0))
    assert direction.give() == pytest.approx(0.5)
    now.append(100.4)
    assert direction.give() == pytest.approx(0.1) and frames(outlet) == []
    now.append(100.5)
    assert direction.give() is None and frames(outlet) == [b"a"]


def test_frames_keep_their_order_when_the_delay_shrinks(
    pipes: tuple[int, int, relay.Direction], now: list[float]
) -> None:
    inlet, outlet, direction = pipes
    os.write(inlet, b"late")
    direction.take(0.5, 0.0, random.Random(0))
    os.write(inlet, b"soon")
    direction.take(0.0, 0.0, random.Random(0))
    assert direction.give() == pytest.approx(0.5) and frames(outlet) == []
    now.append(100.6)
    direction.give()
    assert frames(outlet) == [b"late", b"soon"]


def test_a_share_of_the_frames_is_lost(
    pipes: tuple[int, int, relay.Direction], now: list[float]
) -> None:
    inlet, outlet, direction = pipes
    chance, arrived = random.Random(1), 0
    for number in range(1000):
        os.write(inlet, b"%d" % number)
        direction.take(0.0, 0.25, chance)
        direction.give()
        arrived += len(frames(outlet))
    assert 200 < 1000 - arrived < 300


def test_a_full_queue_drops(
    pipes: tuple[int, int, relay.Direction], now: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay, "_MOST", 2)
    inlet, outlet, direction = pipes
    for frame in (b"a", b"b", b"c"):
        os.write(inlet, frame)
    direction.take(0.0, 0.0, random.Random(0))
    direction.give()
    assert frames(outlet) == [b"a", b"b"]
