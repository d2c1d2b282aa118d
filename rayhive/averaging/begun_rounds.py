"""Questions of a leader to members that do not join its group: have they begun the round?

A group does not name its round to the peers that it was formed without. A peer that comes late and
leads might therefore begin a second group with other late peers, and replicas would differ.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field

from hivemind.p2p import PeerID
from hivemind.proto import averaging_pb2 as messages

#: Pause before each question to one member, and between two words of a round under way [s].
ASK_S = 1.0
#: Questions to one member in the shortest wait for it.
QUESTIONS = 4


@dataclass(eq=False)
class BegunRound:
    """Answers of a round's members to the peer that leads it.

    Attributes:
        ask: Asks a member; returns the code of its answer. ``ACCEPTED`` says that it has begun the
            round, ``BAD_GROUP_KEY`` that it has ended it, which its announcement will say, too.
        changed: Called after each answer.
        window: Shortest wait for a member, and longest for its answer [s].
        begun: Members that have begun the round, as they answered last.
    """

    ask: Callable[[PeerID], Awaitable[int]]
    changed: Callable[[], None]
    window: float
    begun: set[PeerID] = field(default_factory=set)
    _questions: dict[PeerID, asyncio.Task[None]] = field(default_factory=dict)

    def ask_about(self, members: Collection[PeerID]) -> None:
        """Ask these members again and again, and no others; one is enough that has begun."""
        members = sorted(self.begun & set(members))[:1] or members
        for peer in self._questions.keys() - set(members):
            self._questions.pop(peer).cancel()
            self.begun.discard(peer)
        for peer in set(members) - self._questions.keys():
            self._questions[peer] = asyncio.create_task(self._ask_again(peer))

    async def _ask_again(self, peer: PeerID) -> None:
        while True:
            await asyncio.sleep(min(ASK_S, self.window / QUESTIONS))
            code = messages.GROUP_DISBANDED
            with suppress(Exception):  # out of reach: it counts as if it had not begun
                code = await asyncio.wait_for(self.ask(peer), self.window)
            if self._questions.get(peer) is not asyncio.current_task():
                return  # wait_for may swallow a cancellation
            begun = code in (messages.ACCEPTED, messages.BAD_GROUP_KEY)
            (self.begun.add if begun else self.begun.discard)(peer)
            self.changed()
