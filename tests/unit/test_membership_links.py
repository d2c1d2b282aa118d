"""Links between peers over loopback: who may connect, and when links begin and end."""

from __future__ import annotations

import asyncio
import errno
import gc
import itertools
import random
import socket
import warnings
from dataclasses import replace
from typing import Any

import pytest
from hivemind.p2p import PeerID

from rayhive.membership.links import links as links_module
from rayhive.membership.links.cipher import TAG, Tampered, cipher
from rayhive.membership.links.handshake import Invitation, NotProven, connect
from rayhive.membership.links.links import Unreachable
from tests.unit.link_fakes import LIMIT, Network, echo, linked, packets, peer, run, set_slow


@pytest.mark.parametrize("slow", [False, True], ids=["fast", "slow"])
@pytest.mark.parametrize("trusted", [False, True], ids=["encrypted", "plain"])
def test_packets_of_any_size_come_back_as_they_were(
    trusted: bool, slow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_slow(monkeypatch, slow)
    chance = random.Random(0)
    sizes = [0, 1, 8192, 8193, 16384, 100_000, 3_000_000]
    bodies = [chance.randbytes(size) for size in sizes]
    bodies += [bytes(size) for size in sizes]

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


@pytest.mark.parametrize("first", ["the link ends", "the peer leaves"])
def test_a_peer_has_parted_when_it_has_left_and_its_link_has_ended(first: str) -> None:
    told: asyncio.Queue[frozenset[PeerID]] = asyncio.Queue()

    async def body() -> None:
        async with Network([{"echo": echo}] * 2, on_parted=told.put) as network:
            links = network.links[0]
            link = await linked(network)
            if first == "the peer leaves":
                links.set_members([], [])
                assert not links.parted
                await network.links[1].close()
                assert await told.get() == links.parted == {peer(1)}
            else:
                links.set_members([peer(1)], [])
                await network.links[1].close()
                await link.ended.wait()
                await asyncio.sleep(0)
                assert not links.parted
                links.set_members([], [])
                assert links.parted == {peer(1)}
            links.set_members([peer(1)], [])
            assert not links.parted

    run(body())


def test_a_peer_that_was_never_linked_has_not_parted() -> None:
    async def body() -> None:
        async with Network([{}] * 2, listening=[]) as network:
            network.links[0].set_members([peer(1)], [])
            assert await network.links[0].get(peer(1)) is None
            network.links[0].set_members([], [])
            assert not network.links[0].parted

    run(body())


@pytest.mark.parametrize("first", ["it leaves", "a round needs it"])
def test_a_peer_that_has_left_and_cannot_be_dialled_has_parted(first: str) -> None:
    told: asyncio.Queue[frozenset[PeerID]] = asyncio.Queue()

    async def unreachable() -> None:
        raise Unreachable("failed to dial")

    async def body() -> None:
        async with Network([{}] * 2, pause=unreachable, on_parted=told.put) as network:
            links = network.links[0]
            if first == "a round needs it":
                links.set_members([peer(1)], [])
            assert await links.get(peer(1)) is None
            if first == "a round needs it":
                assert not links.parted, "others may be able to dial it"
                links.set_members([], [])
            else:
                assert await told.get() == {peer(1)}
            assert links.parted == {peer(1)}

    run(body())


def test_a_peer_that_needs_a_link_does_not_wait_for_the_other_one_to_connect(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Peers that train do not know one that downloads its first state, and connect to it later."""
    monkeypatch.setattr(links_module, "LEAVE_S", 10 * LIMIT)
    monkeypatch.setattr(links_module, "FIRST_S", 10 * LIMIT)

    async def body() -> None:
        async with Network([{"echo": echo}] * 2) as network:
            link = await linked(network, 1, 0)
            assert [a.body async for a in link.call("echo", packets(b"me"))] == [b"me"]

    run(body())


def test_a_connection_that_ends_after_its_handshake_is_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def gone(opened: Any, guest: PeerID, dialled: bool, *args: Any, **kwargs: Any) -> Any:
        if dialled:
            return plain(opened, guest, dialled, *args, **kwargs)
        refused.append(guest)
        raise OSError(errno.ENOTCONN, "Transport endpoint is not connected")

    plain, refused, unheard = links_module.Link, list[PeerID](), list[Any]()
    monkeypatch.setattr(links_module, "Link", gone)

    async def body() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, said: unheard.append(said))
        async with Network([{"echo": echo}] * 2) as network:
            await network.links[0].get(peer(1))
            assert network.links[1].ready(peer(0)) is None
        gc.collect()
        assert (refused, unheard) == ([peer(0)], [])

    run(body())


def test_a_peer_that_is_lost_as_its_connection_comes_about_has_no_link(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def body() -> None:
        async with Network([{"echo": echo}] * 2) as network:

            async def connect_late(*args: Any) -> Any:
                opened = await connect(*args)
                network.links[0].set_members([], [peer(1)])
                return opened

            monkeypatch.setattr(links_module, "connect", connect_late)
            network.links[0].set_members([peer(1)], [])
            while (link := network.links[1].ready(peer(0))) is None:
                await asyncio.sleep(0)  # in each turn of the loop: it ends soon
            await link.ended.wait()
            assert network.links[0].ready(peer(1)) is None

    run(body())


def test_a_connection_that_arrives_at_the_end_is_closed() -> None:
    async def body() -> None:
        async with Network([{}]) as network:
            (address,) = network.links[0].invite(peer(1)).addresses
            loop, before = asyncio.get_running_loop(), asyncio.all_tasks()

            def end() -> None:
                for task in asyncio.all_tasks() - before:
                    task.cancel()

            with socket.create_connection(address) as connection:
                loop.call_later(0.0, end)  # in the turn in which the connection is accepted
                connection.setblocking(False)
                assert await loop.sock_recv(connection, 1) == b""

    gc.collect()  # what earlier tests of this process left would warn below
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        run(body())
        gc.collect()
    assert [str(each.message) for each in seen] == []
