"""The contract of an invariant, and a reading of the log that they share."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from rayhive.events import APART, Event
from rayhive.spec.replicate import ReplicateSpec

#: With these a peer is gone: it could not have gone on.
GONE = frozenset({"left", "peer_lost", "peer_failed"})
#: Time after a fault or a heal in which peers may still be finding each other [s].
FAULT_S = 10.0


@dataclass(frozen=True)
class InvariantResult:
    """What became of one invariant.

    Attributes:
        name: Its registered name.
        ok: Whether it holds.
        checked: How many things were looked at; 0 if the events had nothing to look at.
        violations: What is wrong, one text each.
    """

    name: str
    ok: bool
    checked: int
    violations: tuple[str, ...]


class Invariant(ABC):
    """Something that holds in every replicate, whatever was broken in it.

    Attributes:
        about: What holds, in one sentence.
        checked: Things looked at so far.
    """

    about: ClassVar[str]

    def __init__(self) -> None:
        self.checked = 0

    @abstractmethod
    def check(self, spec: ReplicateSpec, events: Sequence[Event]) -> list[str]:
        """Return what is wrong, one text a violation, and count what was looked at.

        Args:
            spec: What was run.
            events: What happened, in the order of writing.
        """


@dataclass(frozen=True)
class FaultWindow:
    """A fault from its firing to its heal.

    Attributes:
        fault: Its id.
        kind: Its kind.
        effect: What it does to its targets while it lasts.
        lives: Names of the peers that it was about.
        fired: When [s, Unix time].
        healed: When; None if it was not.
    """

    fault: str
    kind: str
    effect: str
    lives: frozenset[str]
    fired: float
    healed: float | None

    @property
    def settled(self) -> float:
        """When peers should have found each other again [s]: never, if they can't."""
        if self.healed is None and self.effect in APART:
            return math.inf
        return max(self.fired, self.healed or 0.0) + FAULT_S


class RunLog:
    """The events of a replicate, by peer.

    Args:
        spec: What was run.
        events: What happened, in the order of writing.

    Attributes:
        peers: Name of each life -> its events in their order.
    """

    def __init__(self, spec: ReplicateSpec, events: Iterable[Event]) -> None:
        self.spec = spec
        self.events = tuple(events)
        self.peers: dict[str, list[Event]] = defaultdict(list)
        self._kinds: dict[tuple[str, str], list[Event]] = defaultdict(list)
        for event in self.events:
            if event["peer"] is not None:
                self.peers[event["peer"]].append(event)
                self._kinds[event["peer"], event["kind"]].append(event)

    def of(self, peer: str, *kinds: str) -> list[Event]:
        """Return a life's events of some kinds."""
        if len(kinds) == 1:
            return self._kinds.get((peer, kinds[0]), [])
        return [event for event in self.peers.get(peer, ()) if event["kind"] in kinds]

    def moment(self, peer: str, *kinds: str) -> float | None:
        """Return when a life first sent an event of some kinds, or None."""
        return min((event["t"] for event in self.of(peer, *kinds)), default=None)

    @cached_property
    def trained(self) -> tuple[str, ...]:
        """The lives that began to train."""
        return tuple(name for name in self.peers if self.of(name, "training_started"))

    @cached_property
    def living(self) -> tuple[str, ...]:
        """The lives that trained and were there to the end."""
        return tuple(name for name in self.trained if not self.of(name, *GONE))

    @cached_property
    def end(self) -> float:
        """When training ended [s]: the last peer's end, or what was heard last of one."""
        finished = [e["t"] for e in self.events if e["kind"] == "peer_finished"]
        heard = [e["t"] for e in self.events if e["peer"] is not None]
        return max(finished or heard, default=0.0)

    def ended(self, peer: str) -> float:
        """Return when a life was over; the end of training if it was not before."""
        gone = self.moment(peer, "peer_finished", *GONE)
        return self.end if gone is None else gone

    def joined(self, peer: str) -> bool:
        """Return whether a life came later than the peers that started together."""
        slot, _, life = peer.removeprefix("peer-").partition(".")
        return bool(life) or int(slot) >= self.spec.swarm.peers

    @cached_property
    def faults(self) -> tuple[FaultWindow, ...]:
        """The faults that fired."""
        healed = {e["fault"]: e["t"] for e in self.events if e["kind"] == "fault_healed"}
        return tuple(
            FaultWindow(
                e["fault"],
                e["fault_kind"],
                e["effect"],
                frozenset(e.get("lives") or ()),
                e["t"],
                healed.get(e["fault"]),
            )
            for e in self.events
            if e["kind"] == "fault_fired"
        )
