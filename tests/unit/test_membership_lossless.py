"""Lossless coding of what a slow link carries: the same bytes come back, and fewer travel."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from rayhive.membership.links import link as link_module
from rayhive.membership.links.link import WINDOW, LinkLost
from rayhive.membership.links.lossless import LONGEST, SHORTEST, coded, restored
from rayhive.membership.links.pace import SLOW, Pace
from tests.unit.link_fakes import Network, echo, linked, packets, run, set_slow


def gradients(size: int, dtype: str, seed: int = 0) -> bytes:
    """Return the bytes of numbers whose spread differs from row to row."""
    chance = np.random.default_rng(seed)
    spread = np.exp(chance.standard_normal(size // 100 + 1)).repeat(100)[:size]
    return bytes((chance.standard_normal(size) * spread).astype(dtype).tobytes())


@given(
    st.integers(0, 40_000),
    st.integers(0, 9),
    st.sampled_from(["float16", "float32", "float64", "int8", "random", "zeros"]),
    st.integers(0, 1000),
)
def test_a_body_comes_back_bit_for_bit(size: int, start: int, kind: str, seed: int) -> None:
    if kind == "zeros":
        body = bytes(size)
    elif kind == "random":
        body = np.random.default_rng(seed).bytes(size)
    else:
        body = gradients(size, kind, seed)
    body = body[start:]
    coding = coded(body)
    if coding is not None:
        assert len(coding) < len(body)
        again = restored(coding)
        assert bytes(again) == body
        assert not again.readonly, "a tensor may use its memory"


@pytest.mark.parametrize(("dtype", "most"), [("float32", 0.86), ("float16", 0.92)])
@pytest.mark.parametrize("start", range(4))
def test_floats_become_shorter_wherever_they_begin(dtype: str, most: float, start: int) -> None:
    body = bytes(start) + gradients(50_000, dtype)
    coding = coded(memoryview(body))
    assert coding is not None and len(coding) <= most * len(body)


def test_what_does_not_become_shorter_is_left_as_it_is() -> None:
    assert coded(np.random.default_rng(0).bytes(100_000)) is None
    assert coded(bytes(SHORTEST)) is not None


def test_a_damaged_coding_is_an_error() -> None:
    coding = coded(gradients(5000, "float32"))
    assert coding is not None
    for damaged in (b"", coding[:20], coding[:-1], coding + b"\0", b"\1" + coding[1:]):
        with pytest.raises(ValueError, match=r"coding|plane"):
            restored(damaged)
    at = coding.rindex(b"\x28\xb5\x2f\xfd")  # begin of a frame of Zstandard
    with pytest.raises(ValueError, match="plane"):
        restored(coding[:at] + b"\0" + coding[at + 1 :])


def test_a_plane_that_unpacks_to_another_size_is_an_error() -> None:
    coding = coded(bytes(8000))
    assert coding is not None
    with pytest.raises(ValueError, match="another size"):
        restored(struct.pack("!Q", 8004) + coding[8:])
    with pytest.raises(ValueError, match="coding"):
        restored(struct.pack("!Q", LONGEST + 4) + coding[8:])


def test_a_body_that_is_too_long_is_neither_coded_nor_restored() -> None:
    """A few bytes may stand for gigabytes."""
    assert coded(bytes(LONGEST)) is not None and coded(bytes(LONGEST + 1)) is None
    plane = zstandard.ZstdCompressor().compress(bytes(1 << 28))
    assert len(plane) < 1 << 16
    with pytest.raises(ValueError, match="for a body of"):
        restored(struct.pack("!Q4I", 1 << 30, *[len(plane)] * 4) + plane * 4)


def test_a_slow_link_carries_fewer_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    body = gradients(100_000, "float32")
    carried: list[int] = []

    async def echoed() -> None:
        async with Network([{"echo": echo}] * 2) as network:
            link = await linked(network)
            send = link.wire.send

            def counted(kind: int, stream: int, head: bytes = b"", content: bytes = b"") -> None:
                carried.append(len(content))
                send(kind, stream, head, content)

            monkeypatch.setattr(link.wire, "send", counted)
            got = [answer.body async for answer in link.call("echo", packets(body))]
            assert [bytes(each) for each in got] == [body]

    run(echoed())
    assert sum(carried) == len(body), "loopback is not slow"
    carried.clear()
    set_slow(monkeypatch)
    run(echoed())
    assert sum(carried) <= 0.86 * len(body)
    carried.clear()
    body = bytes(SHORTEST - 1)
    run(echoed())
    assert sum(carried) == len(body), "short bodies are not worth it"


def test_credit_for_bodies_in_coding_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    set_slow(monkeypatch)
    bodies = [bytes(WINDOW // 8)] * 40

    async def body() -> None:
        async with Network([{"echo": echo}] * 2) as network:
            link = await linked(network)
            got = [len(answer.body) async for answer in link.call("echo", packets(*bodies))]
            assert got == [WINDOW // 8] * 40

    run(body())


def test_a_damaged_coding_ends_the_link(monkeypatch: pytest.MonkeyPatch) -> None:
    set_slow(monkeypatch)
    monkeypatch.setattr(link_module, "coded", lambda body: b"no coding")

    async def body() -> None:
        async with Network([{"echo": echo}] * 2) as network:
            link = await linked(network)
            with pytest.raises(LinkLost):
                _ = [answer async for answer in link.call("echo", packets(bytes(SHORTEST)))]

    run(body())


class _Connection:
    """Connection to another machine, of which the kernel reports this."""

    def __init__(self, rate: float, own: str, host: str = "192.0.2.1") -> None:
        self.rate, self.own, self.host = rate, own, host

    def getsockname(self) -> tuple[str, int]:
        return self.own, 80

    def getpeername(self) -> tuple[str, int]:
        return self.host, 80

    def getsockopt(self, level: int, option: int, size: int) -> bytes:
        info = bytes(160) + struct.pack("=Q", int(self.rate)) + bytes(80)
        return info[:size]


class _Old(_Connection):
    """Connection of an old kernel."""

    def getsockopt(self, level: int, option: int, size: int) -> bytes:
        return bytes(100)


def pace_of(connection: Any) -> Pace:
    return Pace(connection)


def test_a_connection_is_slow_by_the_delivery_rate_of_the_kernel() -> None:
    """The slower some bodies are, the fewer of them are a sign that the link is slow."""

    def slow_after(connection: _Connection) -> int:
        pace = pace_of(connection)
        return next((number for number in range(1, 100) if pace.is_slow()), 0)

    assert slow_after(_Connection(SLOW / 16, "198.51.100.1")) == 1
    assert slow_after(_Connection(SLOW / 2, "198.51.100.2")) == 3
    assert slow_after(_Connection(SLOW - 1, "198.51.100.3")) == 6
    assert not slow_after(_Connection(SLOW, "198.51.100.4"))
    assert not slow_after(_Connection(0, "198.51.100.5")), "nothing is known yet"
    assert not slow_after(_Connection(1, "127.0.0.1", "127.0.0.1"))
    assert not slow_after(_Old(1, "198.51.100.6"))


def test_a_slow_link_stays_slow_for_bodies_that_a_queue_takes_in() -> None:
    first, second = (_Connection(100 * SLOW, "198.51.100.7") for _ in range(2))
    other = pace_of(_Connection(100 * SLOW, "198.51.100.8"))
    paces = [pace_of(first), pace_of(second)]
    assert not any(pace.is_slow() for pace in paces)
    for _ in range(3):
        first.rate = SLOW / 16
        assert paces[0].is_slow()
        first.rate = 100 * SLOW
        assert all(pace.is_slow() for pace in paces * 3), "both connections share a link"
        assert not other.is_slow()
    assert not all(paces[0].is_slow() for _ in range(100)), "it became faster"


def test_the_kernel_reports_the_pace_of_a_real_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over loopback, which counts as another machine here."""
    rates: list[bool] = []

    async def body() -> None:
        async with Network([{"echo": echo}] * 2) as network:
            link = await linked(network)
            _ = [answer async for answer in link.call("echo", packets(bytes(3_000_000)))]
            link.wire.pace.is_local = False
            for limit in (1.0, float("inf")):
                for name in ("SLOW", "SURELY_SLOW"):
                    monkeypatch.setattr(f"rayhive.membership.links.pace.{name}", limit)
                rates.append(link.wire.pace.is_slow())

    run(body())
    assert rates == [False, True]
