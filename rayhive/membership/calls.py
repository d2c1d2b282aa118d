"""Calls of the membership protocol, made over a transport."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol as Interface

from rayhive.membership.event_loop import Notifier, wait_at_most
from rayhive.membership.lanes import Call
from rayhive.membership.letters import Letter
from rayhive.membership.protocol import Protocol

#: Shortest pause between two looks for calls that are due [s].
SHORTEST_S = 0.001


class Transport(Interface):
    """Sends messages to peers."""

    async def call(self, peer: bytes, message: bytes) -> bytes:
        """Send a message to a peer and return the answer."""

    async def bring_back(self, peer: bytes, patience: float) -> None:
        """Make sure that there is a connection to a peer that was given up.

        Args:
            peer: Its id.
            patience: Longest time of each attempt [s].
        """


@dataclass(eq=False)
class Caller:
    """Makes the calls of a protocol when they are due, on one event loop.

    Attributes:
        protocol: The protocol.
        transport: Sends the messages.
        on_change: Called when the view has changed, and once in a while.
        on_loss: Called with a peer that was given up, and the error of the last call.
        arrivals: Notified when a peer has come or is back.
    """

    protocol: Protocol
    transport: Transport
    on_change: Callable[[], None]
    on_loss: Callable[[bytes, Exception], None] = lambda peer, error: None
    arrivals: Notifier = field(default_factory=Notifier)
    _wake: Notifier = field(default_factory=Notifier)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)
    _error: Exception | None = None
    _arrived: int = 0
    _changed: int = 0

    async def run(self) -> None:
        """Make the calls until cancelled.

        Raises:
            Exception: An error of ``on_change``.
        """
        while True:
            change = self._wake.next_change()
            if self._error is not None:
                raise self._error
            for call in self.protocol.due():
                task = asyncio.create_task(self._make(call))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            self._note()
            left = self.protocol.next_time() - self.protocol.clock()
            await wait_at_most(change, max(SHORTEST_S, left))

    def announce(self) -> None:
        """Send this peer's state to all, because it has changed."""
        self.protocol.announce()
        self._wake.notify()

    def receive(self, message: bytes) -> bytes:
        """Take in a call of another peer, and return the answer."""
        answer = self.protocol.receive(Letter.unpack(message))
        self._note()
        self._wake.notify()
        return answer.pack()

    async def call(self, peer: bytes) -> None:
        """Call a peer that need not be known, and take in its answer."""
        self.protocol.take(await self._send(peer))
        self._note()
        self._wake.notify()

    async def say_goodbye(self) -> None:
        """Send this peer's state to its live neighbours, the last time."""
        calls = [self._send(call.peer, call) for call in self.protocol.farewell()]
        await asyncio.gather(*calls, return_exceptions=True)

    async def close(self) -> None:
        """Cancel the calls under way."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _make(self, call: Call) -> None:
        patience = self.protocol.patience
        try:
            if call.lost:
                await self.transport.bring_back(call.peer, patience)
            answer = await asyncio.wait_for(self._send(call.peer, call), patience)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            if self.protocol.failed(call):
                self.on_loss(call.peer, error)
        else:
            self.protocol.answered(call, answer)
        self._note()
        self._wake.notify()

    async def _send(self, peer: bytes, call: Call | None = None) -> Letter:
        message = self.protocol.letter(peer, call).pack()
        return Letter.unpack(await self.transport.call(peer, message))

    def _note(self) -> None:
        if self.protocol.arrivals != self._arrived:
            self._arrived = self.protocol.arrivals
            self.arrivals.notify()
        if self.protocol.changes != self._changed:
            self._changed = self.protocol.changes
            try:
                self.on_change()
            except Exception as error:  # of a call that nobody awaits
                self._error = error
                self._wake.notify()
