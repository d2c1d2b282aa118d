"""Links between averagers over loopback: calls, identities, and what happens when one ends."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import pytest
from hivemind.p2p import PeerID

from rayhive.membership.links import links as links_module
from rayhive.membership.links.cipher import TAG, Tampered, cipher
from rayhive.membership.links.handshake import Invitation, NotProven, connect
from rayhive.membership.links.link import WINDOW, Link, LinkLost, Packet
from tests.unit.link_fakes import Network, echo, packets, peer

LIMIT = 20.0


def run(body: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(body, LIMIT))


async def linked(network: Network, caller: int = 0, called: int = 1) -> Link:
    """Return the link of a peer to another one, which must exist."""
    link = await network.links[caller].get(peer(called))
    assert link is not None
    return link


@pytest.mark.parametrize("trusted", [False, True], ids=["encrypted", "plain"])
def test_packets_of_any_size_come_back_as_they_were(trusted: bool) -> None:
    chance = random.Random(0)
    sizes = [0, 1, 8192, 8193, 16384, 100_000, 3_000_000]
    bodies = [chance.randbytes(size) for size in sizes]

    async def body() -> None:
        async with Network([{"echo": echo}] * 2, trusted=[trusted] * 2) as network:
            for caller, called in ((0, 1), (1, 0)):
                link = await linked(network, caller, called)
                got = [answer async for answer in link.call("echo", packets(*bodies))]
                assert [bytes(answer.body) for answer in got] == bodies
                names = [b"peer %d:%d" % (caller, number) for number in range(len(bodies))]
                assert [answer.head for answer in got] == names, "the caller is known"

    run(body())


def test_both_sides_use_the_link_of_the_one_that_can_connect() -> None:
    """A peer behind a router is called over the connection that it began."""

    async def body() -> None:
        handlers = [{"echo": echo}] * 2
        for hidden in (0, 1):
            async with Network(handlers, listening=[1 - hidden]) as network:
                network.links[hidden].set_members([peer(1 - hidden)], [])
                link = await linked(network, 1 - hidden, hidden)
                assert [a.body async for a in link.call("echo", packets(b"here"))] == [b"here"]

    run(body())


def test_peers_that_connect_at_the_same_time_talk_to_each_other() -> None:
    async def body() -> None:
        async with Network([{"echo": echo}] * 4) as network:
            everyone = [peer(index) for index in range(4)]
            for links in network.links:
                links.set_members(everyone, [])
            for caller, called in itertools.permutations(range(4), 2):
                link = await linked(network, caller, called)
                assert [a.body async for a in link.call("echo", packets(b"hello"))] == [b"hello"]

    run(body())


# -- identities ------------------------------------------------------------------------------------


def forged_secret(invitation: Invitation) -> Invitation:
    return replace(invitation, secret=bytes(len(invitation.secret)))


def forged_key(invitation: Invitation) -> Invitation:
    return replace(invitation, key=bytes(len(invitation.key)))


@pytest.mark.parametrize("change", [forged_secret, forged_key])
def test_without_a_true_invitation_there_is_no_link(change: Any) -> None:
    async def body() -> None:
        async with Network([{"echo": echo}] * 2, change=change) as network:
            assert await network.links[0].get(peer(1)) is None
            assert network.links[1].ready(peer(0)) is None

    run(body())


@pytest.mark.parametrize("trusted", [False, True], ids=["encrypted", "plain"])
def test_an_invitation_opens_one_connection(trusted: bool) -> None:
    async def body() -> None:
        async with Network([{"echo": echo}] * 2, trusted=[trusted] * 2) as network:
            invitation = network.links[1].invite(peer(0))
            (address,) = invitation.addresses
            first = await connect(invitation, address, trusted)
            with pytest.raises(OSError):
                await connect(invitation, address, trusted)
            first.connection.close()

    run(body())


def test_a_later_invitation_replaces_an_unused_one() -> None:
    async def body() -> None:
        async with Network([{"echo": echo}] * 2) as network:
            old, new = network.links[1].invite(peer(0)), network.links[1].invite(peer(0))
            with pytest.raises(OSError):
                await connect(old, old.addresses[0], False)
            (await connect(new, new.addresses[0], False)).connection.close()

    run(body())


def test_one_side_that_trusts_no_network_is_enough_for_encryption() -> None:
    async def body() -> None:
        for trusted in ([True, False], [False, True], [True, True]):
            async with Network([{"echo": echo}] * 2, trusted=trusted) as network:
                invitation = network.links[1].invite(peer(0))
                opened = await connect(invitation, invitation.addresses[0], trusted[0])
                assert (opened.seal is None) == all(trusted)
                opened.connection.close()

    run(body())


def test_a_guest_cannot_do_without_the_encryption_that_its_host_wants() -> None:
    async def body() -> None:
        async with Network([{"echo": echo}] * 2) as network:
            invitation = replace(network.links[1].invite(peer(0)), plain=True)
            with pytest.raises(OSError):
                await connect(invitation, invitation.addresses[0], True)

    run(body())


def test_records_are_read_in_order_unchanged_and_once() -> None:
    secret, salt = bytes(range(32)), bytes(64)
    seal, records = cipher(secret, salt, b"one side"), []
    for content in (b"first", b"second", b""):
        record = bytearray(len(content) + TAG)
        seal.seal(memoryview(content), memoryview(record))
        records.append(bytes(record))
    assert b"first" not in records[0]
    opens = cipher(secret, salt, b"one side")
    contents = [bytes(opens.open(memoryview(record))) for record in records]
    assert contents == [b"first", b"second", b""]
    changed = bytes([records[0][0] ^ 1]) + records[0][1:]
    for wrong in ([changed], records[1:], [records[0]] * 2):
        opens = cipher(secret, salt, b"one side")
        with pytest.raises(Tampered):
            for record in wrong:
                opens.open(memoryview(record))
    for other in (cipher(bytes(32), salt, b"one side"), cipher(secret, salt, b"the other side")):
        with pytest.raises(Tampered):
            other.open(memoryview(records[0]))


def test_a_listener_that_does_not_know_the_secret_is_refused() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(81)
        writer.write(bytes(64))

    async def body() -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        address = server.sockets[0].getsockname()
        invitation = Invitation((address,), bytes(16), bytes(32), plain=True)
        with pytest.raises(NotProven):
            await connect(invitation, address, True)
        server.close()

    run(body())


# -- reachability ----------------------------------------------------------------------------------


def test_a_peer_out_of_reach_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links_module, "FIRST_S", 0.2)
    asked = 0

    async def ask(_: PeerID) -> Invitation:
        nonlocal asked
        asked += 1
        await asyncio.Event().wait()
        raise AssertionError

    async def body() -> None:
        links = links_module.Links(peer(0), {}, ask)
        loop = asyncio.get_running_loop()
        assert await links.get(peer(1)) is None
        began = loop.time()
        assert [await links.get(peer(1)) for _ in range(100)] == [None] * 100
        assert loop.time() - began < 0.2, "only the first call waits"
        assert asked == 1
        await links.close()

    run(body())


def test_a_failed_attempt_is_repeated_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links_module, "AGAIN_S", 0.05)
    attempts = itertools.count()

    def at_first_nowhere(invitation: Invitation) -> Invitation:
        return invitation if next(attempts) >= 2 else replace(invitation, addresses=())

    async def body() -> None:
        async with Network([{"echo": echo}] * 2, change=at_first_nowhere) as network:
            assert await network.links[0].get(peer(1)) is None
            while network.links[0].ready(peer(1)) is None:
                await asyncio.sleep(0.01)

    run(body())


def test_links_to_lost_peers_end_and_begin_anew_when_they_are_back() -> None:
    async def body() -> None:
        async with Network([{"echo": echo}] * 2) as network:
            first = await linked(network)
            network.links[0].set_members([], [peer(1)])
            assert network.links[0].ready(peer(1)) is None
            await first.ended.wait()
            network.links[0].set_members([peer(1)], [])
            again = await linked(network)
            assert again is not first
            assert [a.body async for a in again.call("echo", packets(b"back"))] == [b"back"]

    run(body())


# -- calls -----------------------------------------------------------------------------------------


def test_a_slow_reader_holds_up_no_other_call() -> None:
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
