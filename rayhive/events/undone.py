"""Rounds whose samples no peer's parameters contain any more."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain

from rayhive.events.event import Event
from rayhive.events.peer import RolledBack, StateLoaded
from rayhive.events.training import Evaluation, Round, StateRound, Transition, Weights

#: Outcomes of a gradient round after which the optimizer stepped: the samples are committed.
APPLIED = frozenset({"averaged", "partial", "local", "alone"})
#: Outcomes of a round in which a peer was in a group with other peers.
GROUPED = frozenset({"averaged", "partial"})
#: Events of rounds, which a return to a checkpoint may undo.
NUMBERED = (Round, StateRound, Transition, Weights, Evaluation)


def lost_alone(
    events: Iterable[Event], any_peer: bool = False
) -> frozenset[tuple[str | None, int]]:
    """Return the rounds (peer, round) that a peer stepped apart and lost with a loaded state.

    Args:
        events: Events of a replicate; those of one peer are in the order of time.
        any_peer: Whether a peer's work enters the swarm with an average with any other peer, as
            in a study whose groups are pairs. Otherwise all peers of the round have to be in it.
    """
    events = tuple(events)
    lost: set[tuple[str | None, int]] = set()
    own: dict[str | None, set[tuple[str | None, int]]] = defaultdict(set)
    averagings = (event for event in events if isinstance(event, (Round, StateRound)))
    grouped = Counter((e.kind, e.round) for e in averagings if e.outcome in GROUPED)
    for event in events:
        if isinstance(event, StateLoaded):
            lost |= own.pop(event.peer, set())
        elif isinstance(event, (Round, StateRound)):
            met = (event.group_size or 1) if event.outcome in GROUPED else 0
            needed = 2 if any_peer else max(1, grouped[event.kind, event.round])
            if met >= needed:
                own.pop(event.peer, None)
            elif isinstance(event, Round) and event.outcome in APPLIED:
                own[event.peer].add((event.peer, event.round))
    return frozenset(lost)


def reverted(
    returns: Iterable[RolledBack], of_peers: Mapping[str, Sequence[Event]]
) -> frozenset[int]:
    """Return the identities of the events of rounds behind which the training went back.

    A peer that goes on from a checkpoint tells so in the order of its own events. The rounds of
    other peers, which are gone, are compared by time.

    Args:
        returns: Returns to a checkpoint.
        of_peers: Events of each peer by its name.
    """
    found: set[int] = set()
    for back in returns:
        gone = of_peers.keys() - {*back.group, back.peer}
        others = (event for name in gone for event in of_peers[name] if event.t < back.t)
        for event in chain(_before(back, of_peers[back.peer or ""]), others):
            if isinstance(event, NUMBERED) and event.round > back.round:
                found.add(id(event))
    return frozenset(found)


def _before(event: Event, events: Iterable[Event]) -> Iterator[Event]:
    """Yield the events up to one of them."""
    for other in events:
        if other is event:
            return
        yield other
