"""Contract of an invariant, and an index of the event log."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from rayhive import events
from rayhive.events.event import E
from rayhive.events.supervisor import FaultEffect
from rayhive.registry import FAULTS
from rayhive.spec.replicate import ReplicateSpec

#: Events after which a peer is gone.
GONE: tuple[type[events.Event], ...] = (events.Left, events.PeerLost, events.PeerFailed)
#: Time after a fault or a heal in which peers may not have found each other yet [s].
FAULT_S = 10.0


class Invariant(ABC):
    """A property that holds in every replicate, under any faults.

    Attributes:
        about: The property, in one sentence.
        checked: Number of checks so far.
    """

    about: ClassVar[str]
    checked: int = 0

    @abstractmethod
    def check(self, log: RunLog) -> list[str]:
        """Return the violations in a replicate, one text each, and count the checks."""


@dataclass(frozen=True)
class FaultWindow:
    """A fault from its firing to its heal.

    Attributes:
        fault: Its id.
        effect: State of its targets while it lasts.
        joins: Whether it started its targets.
        incarnations: Names of the targeted incarnations.
        fired: Time of the injection [s, Unix time].
        healed: Time of the heal [s, Unix time]; None without one.
    """

    fault: str
    effect: FaultEffect
    joins: bool
    incarnations: frozenset[str]
    fired: float
    healed: float | None

    @property
    def settled(self) -> float:
        """Time from which peers should have found each other [s]; infinite if they cannot."""
        if self.healed is None and self.effect in events.APART:
            return math.inf
        return max(self.fired, self.healed or 0.0) + FAULT_S


class RunLog:
    """The events of a replicate, by peer.

    Args:
        spec: The replicate.
        written: Its events in the order of writing.

    Attributes:
        peers: Name of each incarnation -> its events in order.
    """

    def __init__(self, spec: ReplicateSpec, written: Iterable[events.Event]) -> None:
        self.spec = spec
        self.events = tuple(written)
        self.peers: dict[str, list[events.Event]] = defaultdict(list)
        self._kinds: dict[tuple[str, type[events.Event]], list[Any]] = defaultdict(list)
        for event in self.events:
            if event.peer is not None:
                self.peers[event.peer].append(event)
                self._kinds[event.peer, type(event)].append(event)

    def of(self, peer: str, *records: type[E]) -> list[E]:
        """Return an incarnation's events of some kinds."""
        if len(records) == 1:
            return self._kinds.get((peer, records[0]), [])
        return [event for event in self.peers.get(peer, ()) if isinstance(event, records)]

    def moment(self, peer: str, *records: type[events.Event]) -> float | None:
        """Return the time of an incarnation's first event of some kinds; None without one."""
        return min((event.t for event in self.of(peer, *records)), default=None)

    @cached_property
    def trained(self) -> tuple[str, ...]:
        """Incarnations that began to train."""
        return tuple(name for name in self.peers if self.of(name, events.TrainingStarted))

    @cached_property
    def living(self) -> tuple[str, ...]:
        """Incarnations that trained to the end."""
        return tuple(name for name in self.trained if not self.of(name, *GONE))

    @cached_property
    def end(self) -> float:
        """End of training [s]: the last ``peer_finished``, or else the last event of any peer."""
        finished = [event.t for event in events.of_kind(self.events, events.PeerFinished)]
        heard = [event.t for event in self.events if event.peer is not None]
        return max(finished or heard, default=0.0)

    def ended(self, peer: str) -> float:
        """Return the end of an incarnation, at the latest the end of training [s]."""
        gone = self.moment(peer, events.PeerFinished, *GONE)
        return self.end if gone is None else gone

    def joined(self, peer: str) -> bool:
        """Return whether an incarnation started later than the first peers."""
        replica, _, incarnation = peer.removeprefix("peer-").partition(".")
        return bool(incarnation) or int(replica) >= self.spec.swarm.peers

    @cached_property
    def faults(self) -> tuple[FaultWindow, ...]:
        """Faults that fired."""
        healed = {event.fault: event.t for event in events.of_kind(self.events, events.FaultHealed)}
        return tuple(
            FaultWindow(
                fault=event.fault,
                effect=event.effect,
                joins=event.fault_kind in FAULTS and FAULTS.get(event.fault_kind).joins,
                incarnations=frozenset(event.lives or ()),
                fired=event.t,
                healed=healed.get(event.fault),
            )
            for event in events.of_kind(self.events, events.FaultFired)
        )
