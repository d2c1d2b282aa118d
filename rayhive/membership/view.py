"""Who takes part in a run and how far everybody is, as one peer knows it. No network, no clock."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from rayhive.membership.member import ROUNDS_BEHIND, Member


@dataclass(frozen=True)
class Heartbeat:
    """What a peer says of itself.

    Attributes:
        peer_id: Its identity.
        since: When it came [s on the DHT's clock]; the oldest peer leads.
        version: Of two things that it has said, the one with the larger number counts.
        takes_part: Whether rounds have to wait for it: not while it starts, loads or leaves.
        client_mode: Whether it cannot be called.
        round: The last round that it has finished.
        averaged: The last round whose gradients it has averaged, or given up.
        synchronised: The last round whose parameters it has averaged, or was not to.
        met_averaged: The last round whose gradients it has averaged with others.
        met_synchronised: The last round whose parameters it has averaged with others.
        samples: What it has accumulated for the next round.
        samples_per_second: How fast it has been lately.
        hurry: A round that it asks the others to begin at once, with what there is.
        entered: The last round that it has begun to average; before that it computes.
        away: Whether it does not take part only for a while: it validates, saves or loads data.
        addresses: Where it can be reached.
    """

    peer_id: bytes
    since: float
    version: int = 0
    takes_part: bool = False
    client_mode: bool = False
    round: int = 0
    averaged: int = 0
    synchronised: int = 0
    met_averaged: int = 0
    met_synchronised: int = 0
    samples: int = 0
    samples_per_second: float = 0.0
    hurry: int = 0
    entered: int = 0
    away: bool = False
    addresses: tuple[str, ...] = ()

    def pack(self) -> list[Any]:
        """Return the fields as a list, for the wire."""
        return list(vars(self).values())

    @classmethod
    def unpack(cls, fields: Iterable[Any]) -> Heartbeat:
        """Read what :meth:`pack` made.

        Raises:
            TypeError: There are too few or too many fields.
        """
        heartbeat = cls(*fields)
        return replace(heartbeat, addresses=tuple(heartbeat.addresses))


@dataclass(frozen=True)
class Reunion:
    """Peers are here again that were lost without a word.

    Attributes:
        since: The last round that this peer had finished when it lost the first of them.
        peers: Who they are.
    """

    since: int
    peers: frozenset[bytes]


class MembershipView:
    """Everything that a peer has heard of the peers of its run, and when.

    Threads that share one hold its :attr:`lock`, which is re-entrant.

    Args:
        own: The peer itself.
        silence: A peer that was not heard of for so long counts as dead [s].
        clock: Monotonic time [s].
        straggler_timeout: A peer that computes and made no progress for so long is not waited for
            until it does [s].
    """

    def __init__(
        self,
        own: Heartbeat,
        silence: float,
        clock: Callable[[], float] = time.monotonic,
        straggler_timeout: float = math.inf,
    ) -> None:
        self.own, self.silence, self._clock = own, silence, clock
        self.straggler_timeout = straggler_timeout
        self.lock = threading.Condition()
        self._progressed: dict[bytes, float] = {own.peer_id: clock()}
        self._others: dict[bytes, Heartbeat] = {}
        self._heard: dict[bytes, float] = {}
        self._unreachable: set[bytes] = set()
        self._lost: dict[bytes, int] = {}
        self._reunion: Reunion | None = None

    def say(self, **fields: Any) -> None:
        """Change what this peer says of itself."""
        self.own = replace(self.own, version=self.own.version + 1, **fields)
        self.note_progress()

    def note_progress(self) -> None:
        """Note that this peer has come further just now."""
        self._progressed[self.own.peer_id] = self._clock()

    def hear(self, heartbeat: Heartbeat, age: float = 0.0, idle: float = 0.0) -> bool:
        """Take in what a peer says of itself, or said ``age`` seconds ago to somebody else.

        Args:
            heartbeat: What it says.
            age: How old that is [s]; 0 is first hand.
            idle: How long it has made no progress [s].

        Returns:
            Whether it is news.
        """
        peer = heartbeat.peer_id
        if peer == self.own.peer_id:
            return False
        progressed = self._clock() - idle
        self._progressed[peer] = max(self._progressed.get(peer, progressed), progressed)
        known = self._others.get(peer)
        first_hand = age == 0.0
        if first_hand:
            self._unreachable.discard(peer)
            self._welcome_back(peer)
        # Others' word makes a peer known, and a client, which cannot be called, stay alive. A
        # peer that can be called has to be heard itself, or its death would travel in circles.
        if first_hand or known is None or heartbeat.client_mode:
            heard = self._clock() - age
            self._heard[peer] = max(self._heard.get(peer, heard), heard)
        if known is not None and known.version >= heartbeat.version:
            return False
        self._others[peer] = heartbeat
        self._welcome_back(peer)  # also at others' word: all should know at the same time
        return True

    def _welcome_back(self, peer: bytes) -> None:
        if peer in self._lost:
            before = self._reunion or Reunion(self._lost[peer], frozenset())
            since = min(before.since, self._lost.pop(peer))
            self._reunion = Reunion(since, before.peers | {peer})

    def take_reunion(self) -> Reunion | None:
        """Return who came back since the last call, if anybody did."""
        reunion, self._reunion = self._reunion, None
        return reunion

    def skip(self, rounds: int) -> None:
        """Count so many rounds, which this peer did not do, as if it had done them before."""
        self._lost = {peer: since + rounds for peer, since in self._lost.items()}
        if self._reunion is not None:
            self._reunion = Reunion(self._reunion.since + rounds, self._reunion.peers)

    def note_losses(self) -> None:
        """Remember who is gone without having said that it takes part no more, and since when."""
        for peer in self.lost():
            self._lost.setdefault(peer, self.own.round)

    def lost(self) -> frozenset[bytes]:
        """Return those who are gone without having said that they take part no more."""
        return frozenset(
            heartbeat.peer_id
            for heartbeat in self._others.values()
            if heartbeat.takes_part and not self._here(heartbeat)
        )

    def is_here(self, peer: bytes) -> bool:
        """Return whether a peer is known and alive."""
        return peer in self._others and self._here(self._others[peer])

    def addresses_of(self, peer: bytes) -> tuple[str, ...]:
        """Return where a peer was said to be reached."""
        known = self._others.get(peer)
        return () if known is None else known.addresses

    def give_up(self, peer: bytes) -> None:
        """Count a peer as dead until it is heard of again: it cannot be reached."""
        self._unreachable.add(peer)
        self.note_losses()

    def forget(self, seconds: float) -> None:
        """Drop peers that were not heard of for so long [s]."""
        for peer in [p for p, heard in self._heard.items() if self._clock() - heard > seconds]:
            self._others.pop(peer, None)
            self._heard.pop(peer, None)
            self._unreachable.discard(peer)
            self._lost.pop(peer, None)
            self._progressed.pop(peer, None)

    def told(self) -> list[list[Any]]:
        """Return what is known of everybody that is alive: fields, age and idle time [s]."""
        now = self._clock()
        others = [heartbeat for heartbeat in self._others.values() if self._here(heartbeat)]
        ages = [max(1e-6, now - self._heard[p.peer_id]) for p in others]  # 0 is first hand
        return [
            self.told_of_own(),
            *([p.pack(), age, self._idle(p)] for p, age in zip(others, ages, strict=True)),
        ]

    def told_of_own(self) -> list[Any]:
        """Return what this peer says of itself: fields, age and idle time [s]."""
        return [self.own.pack(), 0.0, self._idle(self.own)]

    def _idle(self, heartbeat: Heartbeat) -> float:
        return self._clock() - self._progressed[heartbeat.peer_id]

    def others(self) -> list[Heartbeat]:
        """Return all other peers that are known, dead ones included."""
        return list(self._others.values())

    def _here(self, heartbeat: Heartbeat) -> bool:
        peer = heartbeat.peer_id
        if peer in self._unreachable:
            return False
        return self._clock() - self._heard[peer] <= self.silence

    def present(self) -> list[Heartbeat]:
        """Return everybody that is alive, the oldest first, this peer included."""
        if not self._others:
            return [self.own]
        others = [heartbeat for heartbeat in self._others.values() if self._here(heartbeat)]
        return sorted([self.own, *others], key=lambda p: (p.since, p.peer_id))

    def taking_part(self) -> list[Heartbeat]:
        """Return everybody that is alive and takes part, the oldest first; no stragglers."""
        present = [heartbeat for heartbeat in self.present() if heartbeat.takes_part]
        return [heartbeat for heartbeat in present if not self.is_straggling(heartbeat)]

    def is_straggling(self, heartbeat: Heartbeat) -> bool:
        """Return whether a peer has computed for too long without progress.

        A peer that averages makes no progress either while it waits for others.
        """
        if heartbeat.peer_id == self.own.peer_id or heartbeat.entered > heartbeat.round:
            return False
        return self._idle(heartbeat) > self.straggler_timeout

    def members(self, kind: str, computes: bool = True) -> tuple[Member, ...]:
        """Return those who take part as matchmaking wants them.

        Args:
            kind: ``averaged`` for gradients, ``synchronised`` for parameters.
            computes: Whether peers come to this averaging from their batches, and not from
                another averaging.
        """
        return tuple(
            Member(
                p.peer_id, p.client_mode, p.round, getattr(p, kind), getattr(p, f"met_{kind}"),
                p.entered if computes else None,
            )
            for p in self.taking_part()
        )  # fmt: skip

    def newest_round(self) -> int:
        """Return the last round that anybody has finished who takes part, or is away."""
        return max([self.own.round, *(p.round for p in self._company() if not p.client_mode)])

    def newest_averaged(self, kind: str) -> int:
        """Return the last round that another peer has averaged, or given up."""
        return max((getattr(p, kind) for p in self._company() if not p.client_mode), default=0)

    def _company(self) -> list[Heartbeat]:
        others = [p for p in self.present() if p.peer_id != self.own.peer_id]
        return [p for p in others if p.takes_part or p.away]

    def samples(self) -> int:
        """Return the samples that are accumulated for the round after :meth:`newest_round`."""
        newest = self.newest_round()
        own = self.own.samples if self.own.round == newest else 0
        return own + sum(
            p.samples
            for p in self.taking_part()
            if p.round == newest and p.peer_id != self.own.peer_id
        )

    def is_in_a_hurry(self) -> bool:
        """Return whether somebody cannot wait until the next round is full."""
        newest = self.newest_round()
        return any(p.hurry > newest for p in self.taking_part())

    def in_step(self) -> int:
        """Return how many peers, this one included, can take part in the next round."""
        newest = self.newest_round()
        peers = [p for p in self.taking_part() if p.peer_id != self.own.peer_id]
        return 1 + sum(p.round >= newest - ROUNDS_BEHIND for p in peers)
