"""Calls and questions over links between peers over loopback."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing

import pytest
from hivemind.p2p import PeerID

from rayhive.membership.links.link import WINDOW, LinkLost, Packet
from tests.unit.link_fakes import (
    LIMIT,
    Network,
    at_once,
    count_writes,
    echo,
    linked,
    packets,
    peer,
    run,
    set_slow,
)


@pytest.mark.parametrize("slow", [False, True], ids=["plain", "coded"])
def test_a_slow_reader_holds_up_no_other_call(slow: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    set_slow(monkeypatch, slow)
    taken: list[int] = []

    async def sleeper(requests: AsyncIterator[Packet], _: PeerID) -> AsyncGenerator[Packet, None]:
        await asyncio.Event().wait()
        yield Packet(b"never")

    async def many() -> AsyncGenerator[Packet, None]:
        for number in range(100):
            taken.append(number)
            yield Packet(b"", bytes(WINDOW // 8))

    async def body() -> None:
        async with Network([{"echo": echo, "sleep": sleeper}] * 2) as network:
            link = await linked(network)
            async with aclosing(link.call("sleep", many())):
                bodies = [bytes(100_000)] * 20
                got = [a.body async for a in link.call("echo", packets(*bodies))]
                assert got == bodies
                assert len(taken) <= 8 + 2, "the sender waits for credit"

    run(body())


def test_closing_a_call_ends_its_answers_and_no_other_call() -> None:
    ended = asyncio.Event()

    async def endless(requests: AsyncIterator[Packet], _: PeerID) -> AsyncGenerator[Packet, None]:
        try:
            for number in itertools.count():
                yield Packet(str(number).encode())
                await asyncio.sleep(0)
        finally:
            ended.set()

    async def body() -> None:
        async with Network([{"echo": echo, "endless": endless}] * 2) as network:
            link = await linked(network)
            async with aclosing(link.call("endless", packets())) as answers:
                async for answer in answers:
                    if answer.head == b"10":
                        break
            await ended.wait()
            assert [a.body async for a in link.call("echo", packets(b"on"))] == [b"on"]

    run(body())


def test_a_handler_that_fails_ends_the_call_for_its_caller() -> None:
    async def broken(requests: AsyncIterator[Packet], _: PeerID) -> AsyncGenerator[Packet, None]:
        async for request in requests:
            yield request
            raise ValueError("broken")

    async def body() -> None:
        async with Network([{"broken": broken, "echo": echo}] * 2) as network:
            link = await linked(network)
            for method in ("broken", "unknown"):
                with pytest.raises(LinkLost):
                    _ = [a async for a in link.call(method, packets(b"1", b"2"))]
            assert [a.body async for a in link.call("echo", packets(b"on"))] == [b"on"]

    run(body())


def test_the_end_of_a_link_ends_its_calls_on_both_sides() -> None:
    cancelled = asyncio.Event()

    async def waiter(requests: AsyncIterator[Packet], _: PeerID) -> AsyncGenerator[Packet, None]:
        yield Packet(b"ready")
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    async def body() -> None:
        async with Network([{"wait": waiter}] * 2) as network:
            link = await linked(network)
            call = link.call("wait", packets())
            assert (await anext(call)).head == b"ready"
            network.links[0].set_members([], [peer(1)])
            with pytest.raises(LinkLost):
                await anext(call)
            await cancelled.wait()

    run(body())


def test_memory_may_change_once_a_call_is_closed() -> None:
    """Nothing of it leaves afterwards: the reader gets whole packets or none."""
    size = 4 << 20
    seen: list[set[int]] = []

    async def note(requests: AsyncIterator[Packet], _: PeerID) -> AsyncGenerator[Packet, None]:
        await asyncio.sleep(0)
        yield Packet(b"begun")
        async for _head, received in requests:
            seen.append(set(bytes(received)))

    async def body() -> None:
        async with Network([{"note": note, "echo": echo}] * 2) as network:
            link = await linked(network)
            memory = bytearray(b"\1" * size)
            call = link.call("note", packets(memoryview(memory), memoryview(memory)))
            await anext(call)
            await call.aclose()
            memory[:] = b"\2" * size
            bodies = [bytes([3]) * 100_000] * 5
            assert [a.body async for a in link.call("echo", packets(*bodies))] == bodies
            assert all(values == {1} for values in seen)

    run(body())


def test_data_show_both_sides_that_the_other_one_lives() -> None:
    """The answer to a large request has not come yet, but the room for the request has."""
    received = asyncio.Event()

    async def swallow(
        requests: AsyncIterator[Packet], caller: PeerID
    ) -> AsyncGenerator[Packet, None]:
        async for _ in requests:
            pass
        received.set()
        await asyncio.sleep(LIMIT)
        yield Packet(b"")

    async def body() -> None:
        async with Network([{"swallow": swallow}] * 2) as network:
            link = await linked(network)
            for heard in network.heard:
                heard.clear()
            call = link.call("swallow", packets(*[bytes(1_000_000)] * 30))
            await received.wait()
            assert set(network.heard[0]) == {peer(1)}
            assert set(network.heard[1]) == {peer(0)}
            await call.aclose()

    run(body())


def test_streams_of_one_link_take_turns() -> None:
    """Else the averages of a reducer wait until it has sent its own parts."""
    size, count = 700_000, 40
    arrived: list[bytes] = []

    async def note(requests: AsyncIterator[Packet], caller: PeerID) -> AsyncGenerator[Packet, None]:
        async for head, _ in requests:
            arrived.append(head)
        yield Packet(b"end")

    async def numbered(name: bytes) -> AsyncGenerator[Packet, None]:
        for _ in range(count):
            yield Packet(name, bytes(size))

    async def body() -> None:
        async with Network([{"note": note}] * 2) as network:
            link = await linked(network)
            calls = [link.call("note", numbered(name)) for name in (b"a", b"b", b"c")]
            assert [await call.__anext__() for call in calls] == [Packet(b"end", b"")] * 3

    run(body())
    both = [name for name in arrived if name != b"c"]
    lead = max(abs(both[:n].count(b"a") - both[:n].count(b"b")) for n in range(len(both)))
    assert lead <= WINDOW // size


def test_a_peer_that_ends_sends_the_answers_that_are_on_their_way() -> None:
    """Calls to other methods end at once."""
    began = asyncio.Event()

    async def answers(
        requests: AsyncIterator[Packet], caller: PeerID
    ) -> AsyncGenerator[Packet, None]:
        for number in range(20):
            yield Packet(b"%d" % number, bytes(500_000))
        await asyncio.sleep(LIMIT)  # until the caller hangs up

    async def waits(
        requests: AsyncIterator[Packet], caller: PeerID
    ) -> AsyncGenerator[Packet, None]:
        began.set()
        await asyncio.sleep(LIMIT)
        yield Packet(b"never")

    async def body() -> None:
        async with Network([{"answers": answers, "waits": waits}] * 2) as network:
            link = await linked(network)
            waiting, call = link.call("waits", packets(b"")), link.call("answers", packets(b""))
            await began.wait()
            first = await call.__anext__()
            closing = asyncio.create_task(network.links[1].close(["answers"]))
            heads = [first.head, *[(await call.__anext__()).head for _ in range(19)]]
            assert heads == [b"%d" % number for number in range(20)]
            await call.aclose()
            with pytest.raises(LinkLost):
                await waiting.__anext__()
            await closing

    run(body())


@pytest.mark.parametrize("older", [False, True], ids=["one link", "older of two"])
def test_a_peer_that_ends_sends_the_answers_of_calls_that_have_ended(older: bool) -> None:
    """Where both sides connect at the same time, the newest link of each is its own."""
    asking, answered = [asyncio.Event(), asyncio.Event()], asyncio.Event()

    async def pause() -> None:
        next(event for event in asking if not event.is_set()).set()
        await asking[1].wait()

    async def answers(
        requests: AsyncIterator[Packet], caller: PeerID
    ) -> AsyncGenerator[Packet, None]:
        yield Packet(b"", bytes(30_000_000))
        answered.set()

    async def body() -> None:
        async with Network(
            [{"answers": answers}] * 2, pause=pause if older else at_once
        ) as network:
            sides = [linked(network, 0, 1), *([linked(network, 1, 0)] if older else [])]
            link = (await asyncio.gather(*sides))[0]
            call = link.call("answers", packets(b""))
            await answered.wait()
            closing = asyncio.create_task(network.links[1].close(["answers"]))
            assert len((await anext(call)).body) == 30_000_000
            await closing

    run(body())


@pytest.mark.parametrize("trusted", [False, True])
def test_questions_of_both_sides_are_answered_beside_their_calls(trusted: bool) -> None:
    def reply(question: bytes, caller: PeerID) -> bytes:
        return caller.to_bytes() + b" asks " + question

    async def body() -> None:
        async with Network([{"echo": echo}] * 2, trusted=[trusted] * 2, reply=reply) as network:
            for own in (0, 1):
                link = await linked(network, own, 1 - own)
                call = link.call("echo", packets(b"x" * 100_000))
                questions = [f"{number}".encode() * number for number in range(1, 40)]
                answers = await asyncio.gather(*map(link.ask, questions))
                caller = peer(own).to_bytes()
                assert answers == [caller + b" asks " + question for question in questions]
                assert [bytes(packet.body) async for packet in call] == [b"x" * 100_000]

    run(body())


def test_a_question_that_is_not_answered_is_an_error_and_the_link_stays() -> None:
    async def body() -> None:
        async with Network([{"echo": echo}] * 2) as network:
            link = await linked(network)
            with pytest.raises(LinkLost, match="did not answer"):
                await link.ask(b"?")
            call = link.call("echo", packets(b"x"))
            assert [bytes(packet.body) async for packet in call] == [b"x"]

    run(body())


def test_the_end_of_a_link_ends_its_questions() -> None:
    async def body() -> None:
        async with Network([{}] * 2, reply=lambda question, caller: question) as network:
            link = await linked(network)
            asked = asyncio.ensure_future(link.ask(b"?"))
            await asyncio.sleep(0)
            link.close()
            with pytest.raises(LinkLost):
                await asked
            with pytest.raises(LinkLost):
                await link.ask(b"?")

    run(body())


def test_a_call_and_its_answer_are_one_write_each(monkeypatch: pytest.MonkeyPatch) -> None:
    async def late(requests: AsyncIterator[Packet], _: PeerID) -> AsyncGenerator[Packet, None]:
        async for request in requests:
            await asyncio.sleep(0.01)  # as an average that awaits other senders
            yield request

    async def slow(packet: Packet) -> AsyncGenerator[Packet, None]:
        for _ in range(10):  # as a part that is encoded first
            await asyncio.sleep(0)
        yield packet

    async def body() -> None:
        async with Network([{"late": late}] * 2) as network:
            link = await linked(network)
            writes = count_writes(monkeypatch)
            for number in range(1, 4):
                packet = Packet(b"", bytes([number]) * 5_000)
                async with aclosing(link.call("late", slow(packet))) as answers:
                    assert (await anext(answers)).body == packet.body
                await asyncio.sleep(0.01)
                assert len(writes) == 2 * number

    run(body())


def test_a_call_that_is_closed_before_its_first_packet_is_never_told() -> None:
    begun: list[PeerID] = []

    async def note(requests: AsyncIterator[Packet], by: PeerID) -> AsyncGenerator[Packet, None]:
        begun.append(by)
        async for request in requests:
            yield request

    async def never() -> AsyncGenerator[Packet, None]:
        await asyncio.Event().wait()
        yield Packet(b"never")

    async def body() -> None:
        async with Network([{"note": note}] * 2) as network:
            link = await linked(network)
            async with aclosing(link.call("note", never())):
                await asyncio.sleep(0.01)
            assert [a.body async for a in link.call("note", packets(b"told"))] == [b"told"]
            assert begun == [peer(0)]

    run(body())
