"""Calls through hivemind's network daemon, with a stream in place of the daemon."""

from __future__ import annotations

import asyncio
from typing import Any
from uuid import UUID

import pytest
from hivemind.p2p import PeerID
from hivemind.p2p.p2p_daemon_bindings.control import ControlClient
from hivemind.proto import p2pd_pb2

from rayhive.membership.daemon_calls import keep_answering


def answer(call: UUID) -> bytes:
    """Return the daemon's message with the answer to a call."""
    said = p2pd_pb2.PersistentConnectionResponse(callId=call.bytes)
    said.callUnaryResponse.response = b"answer"
    message = said.SerializeToString()
    return bytes([len(message)]) + message


def failure(call: UUID) -> bytes:
    """Return the daemon's message that it did not reach the called peer."""
    said = p2pd_pb2.PersistentConnectionResponse(callId=call.bytes)
    said.daemonError.message = "failed to dial"
    message = said.SerializeToString()
    return bytes([len(message)]) + message


class Control(ControlClient):  # type: ignore[misc]
    """hivemind's connection to a daemon, without the daemon."""

    def read(self, said: asyncio.StreamReader) -> Any:
        return self._read_from_persistent_conn(said)

    async def request(self) -> Any:
        return await self._pending_messages.get()


class Client:
    """Connection of a process to its daemon; what the daemon says is written here."""

    def __init__(self) -> None:
        keep_answering()
        self.control = Control(None, _initialized_with_create=True)
        self.said = asyncio.StreamReader()
        self.reading = asyncio.create_task(self.control.read(self.said))

    async def call(self) -> tuple[asyncio.Task[bytes], UUID]:
        """Call a peer; return the call and its number."""
        call = asyncio.create_task(self.control.call_unary_handler(PeerID(b"peer"), "ask", b""))
        while not (request := await self.control.request()).HasField("callUnary"):
            pass  # it tells the daemon that an earlier call was given up
        return call, UUID(bytes=request.callId)


@pytest.mark.parametrize("late", [answer, failure])
def test_a_call_given_up_as_its_answer_comes_is_the_only_one_without(late: Any) -> None:
    async def body() -> None:
        client = Client()
        given_up, number = await client.call()
        client.said.feed_data(late(number))
        given_up.cancel()  # in the same turn of the event loop, before the answer is read
        await asyncio.wait({given_up})
        assert given_up.cancelled()
        call, number = await client.call()
        client.said.feed_data(answer(number))
        assert await asyncio.wait_for(call, 5) == b"answer"
        client.reading.cancel()

    asyncio.run(body())
