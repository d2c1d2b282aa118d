"""When each peer lived: its slot, when it began to train, when and how it ended."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rayhive.events import Event

#: Kinds of events with which a life is over, whichever comes first.
ENDS = ("peer_finished", "left", "peer_failed", "peer_lost")


@dataclass(frozen=True)
class Incarnation:
    """One life of a logical peer; all times are Unix times [s].

    Attributes:
        name: Its name in events, for example ``peer-1.1``.
        slot: The logical peer, ``peer-1``.
        number: 0, and one more each time that the slot was started again.
        cause: Fault that asked for it, if one did.
        spawned: When its process ran; None if nobody said so.
        started: When it began to train; None if it never did.
        ended: When it was over; None if nothing says that it was.
        end: The kind of event that said so.
    """

    name: str
    slot: str
    number: int
    cause: str | None
    spawned: float | None
    started: float | None
    ended: float | None
    end: str | None

    def joined(self, peers: int) -> bool:
        """Return whether it came later than the ``peers`` that started together."""
        return self.number > 0 or int(self.slot.removeprefix("peer-")) >= peers


def split_name(name: str) -> tuple[str, int]:
    """Return slot and number of a life: ``peer-1.2`` is life 2 of ``peer-1``."""
    slot, _, number = name.partition(".")
    return slot, int(number or 0)


def read_lives(events: Iterable[Event]) -> dict[str, Incarnation]:
    """Return every life that the events tell of, by name, in the order of slots and numbers."""
    firsts: dict[str, dict[str, Event]] = {}
    for event in events:
        if event["peer"] is not None:
            of_life = firsts.setdefault(event["peer"], {})
            if event["kind"] not in of_life or event["t"] < of_life[event["kind"]]["t"]:
                of_life[event["kind"]] = event
    lives = [_life(name, found) for name, found in firsts.items()]
    return {life.name: life for life in sorted(lives, key=_place)}


def _place(life: Incarnation) -> tuple[int, int]:
    return int(life.slot.removeprefix("peer-")), life.number


def _life(name: str, firsts: Mapping[str, Event]) -> Incarnation:
    slot, number = split_name(name)
    end = min((firsts[kind] for kind in ENDS if kind in firsts), key=lambda e: e["t"], default=None)
    spawned, started = firsts.get("peer_spawned"), firsts.get("training_started")
    return Incarnation(
        name=name,
        slot=slot,
        number=number,
        cause=None if spawned is None else spawned.get("cause"),
        spawned=None if spawned is None else spawned["t"],
        started=None if started is None else started["t"],
        ended=None if end is None else end["t"],
        end=None if end is None else end["kind"],
    )
