"""Incarnations of the peers: when each was spawned, trained and ended."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rayhive.events import Event

#: Kinds of events that end an incarnation; the earliest counts.
ENDS = ("peer_finished", "left", "peer_failed", "peer_lost")


@dataclass(frozen=True)
class Incarnation:
    """One process of a replica; all times are Unix times [s].

    Attributes:
        name: Name in events, for example ``peer-1.1``.
        replica: The replica, ``peer-1``.
        number: Number of earlier incarnations of the replica.
        cause: Id of the fault that asked for it; None if no fault did.
        spawned: Start of the process; None if it is not recorded.
        started: Start of training; None if it never trained.
        ended: End; None if it is not recorded.
        end: Kind of the event that ended it.
    """

    name: str
    replica: str
    number: int
    cause: str | None
    spawned: float | None
    started: float | None
    ended: float | None
    end: str | None

    def joined(self, peers: int) -> bool:
        """Return whether it is not one of the ``peers`` that started together."""
        return self.number > 0 or int(self.replica.removeprefix("peer-")) >= peers


def split_name(name: str) -> tuple[str, int]:
    """Return the replica and the number: ``peer-1.2`` is incarnation 2 of ``peer-1``."""
    replica, _, number = name.partition(".")
    return replica, int(number or 0)


def read_incarnations(events: Iterable[Event]) -> dict[str, Incarnation]:
    """Return the incarnations by name, in the order of replicas and numbers."""
    firsts: dict[str, dict[str, Event]] = {}
    for event in events:
        if event["peer"] is not None:
            of_peer = firsts.setdefault(event["peer"], {})
            if event["kind"] not in of_peer or event["t"] < of_peer[event["kind"]]["t"]:
                of_peer[event["kind"]] = event
    found = [_incarnation(name, of_peer) for name, of_peer in firsts.items()]
    return {item.name: item for item in sorted(found, key=_place)}


def _place(item: Incarnation) -> tuple[int, int]:
    return int(item.replica.removeprefix("peer-")), item.number


def _incarnation(name: str, firsts: Mapping[str, Event]) -> Incarnation:
    """Return an incarnation from the first event of each kind."""
    replica, number = split_name(name)
    end = min((firsts[kind] for kind in ENDS if kind in firsts), key=lambda e: e["t"], default=None)
    spawned, started = firsts.get("peer_spawned"), firsts.get("training_started")
    return Incarnation(
        name=name,
        replica=replica,
        number=number,
        cause=None if spawned is None else spawned.get("cause"),
        spawned=None if spawned is None else spawned["t"],
        started=None if started is None else started["t"],
        ended=None if end is None else end["t"],
        end=None if end is None else end["kind"],
    )
