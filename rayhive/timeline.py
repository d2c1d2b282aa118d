"""Timeline of one replicate: its events by kind, peer and round, and along the training clock."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from rayhive.events import (
    APPLIED,
    BarrierReleased,
    Evaluation,
    Event,
    FaultFired,
    FaultHealed,
    Left,
    PeerFailed,
    PeerFinished,
    PeerLost,
    PeerReady,
    PeerSpawned,
    Progress,
    ReplicateFinished,
    RolledBack,
    Round,
    StateRound,
    TrainingStarted,
    Transition,
    Weights,
    lost_alone,
    reverted,
)
from rayhive.events.joined_clocks import clock_offsets
from rayhive.events.supervisor import FaultEffect
from rayhive.spec.pruning import SKIPPED
from rayhive.spec.replicate import ReplicateSpec

if TYPE_CHECKING:
    from rayhive.metrics.clocks import Clocks

#: States of a finished replicate. Replicates in other states failed, with these exceptions:
FINISHED = frozenset({"completed", "timed_out"})
#: State of a replicate whose every attempt lost a part of the cluster.
LOST = "lost"
#: States of replicates that are in no number.
UNKNOWN = frozenset({LOST, SKIPPED})
#: State of a replicate without a recorded end: it runs, or its supervisor died.
UNFINISHED = "unfinished"
#: States of replicates that count neither as finished nor as failed.
UNCOUNTED = frozenset({"stopped", UNFINISHED})

#: Events that end an incarnation; the earliest counts.
End: TypeAlias = PeerFinished | Left | PeerFailed | PeerLost
#: Events with the training clock of their peer.
Clocked: TypeAlias = Round | Transition | Evaluation | PeerFinished

E = TypeVar("E", bound=Event)
InRound = TypeVar("InRound", bound=Round | StateRound | Transition | Weights | Evaluation)
Key = TypeVar("Key", str, int)


@dataclass(frozen=True)
class Incarnation:
    """One process of a replica; all times are Unix times [s].

    Attributes:
        name: Name in events, for example ``peer-1.1``.
        cause: Id of the fault that asked for it; None if no fault did.
        spawned: Start of the process; None if it is not recorded.
        started: Start of training; None if it never trained.
        end: Event that ended it; None if it is not recorded.
    """

    name: str
    cause: str | None
    spawned: float | None
    started: float | None
    end: End | None

    @property
    def replica(self) -> str:
        """The replica: ``peer-1`` for its incarnation ``peer-1.1``."""
        return self.name.partition(".")[0]

    @property
    def place(self) -> tuple[int, int]:
        """Number of the replica, and number of its earlier incarnations."""
        replica, _, earlier = self.name.removeprefix("peer-").partition(".")
        return int(replica), int(earlier or 0)

    @property
    def ended(self) -> float | None:
        """Time of the end."""
        return None if self.end is None else self.end.t

    def joined(self, peers: int) -> bool:
        """Return whether it is not one of the ``peers`` that started together."""
        replica, earlier = self.place
        return earlier > 0 or replica >= peers


@dataclass(frozen=True)
class FaultWindow:
    """A fault from its firing to its heal.

    Attributes:
        fault: Id of the fault.
        kind: Kind of the fault.
        effect: State of its targets while it lasts.
        targets: Names of the targeted incarnations.
        fired: Time of the injection [s, Unix time].
        healed: Time of the heal [s, Unix time]; None without one.
    """

    fault: str
    kind: str
    effect: FaultEffect
    targets: frozenset[str]
    fired: float
    healed: float | None


class Timeline:
    """Events of one attempt at a replicate.

    Events of different peers may be in any order; those of one peer are in the order of time.
    Round ``n`` is the ``n``-th of the swarm, from 1. Each incarnation is a peer of its own.

    Args:
        spec: Specification of the replicate.
        events: Its events.
        log: File with the events; None if there is none.
        clocks: Clocks by which the times were corrected; None if they are as recorded.

    Attributes:
        state: State in ``replicate_finished``; ``unfinished`` without that event.
        stop_reason: Reason of the end, in words.
    """

    def __init__(
        self, spec: ReplicateSpec, events: Iterable[Event], log: Path | None = None,
        clocks: Clocks | None = None,
    ) -> None:  # fmt: skip
        self.spec, self.log, self.clocks = spec, log, clocks
        self.events = tuple(events)
        self._index: dict[tuple[type[Event], str | None], list[Any]] = defaultdict(list)
        for event in self.events:
            for peer in {None, event.peer}:
                self._index[type(event), peer].append(event)
        end = next(reversed(self.of(ReplicateFinished)), None)
        self.state = UNFINISHED if end is None else end.state
        self.stop_reason = None if end is None else end.stop_reason

    # -- selections ----------------------------------------------------------------------------

    def of(self, kind: type[E], peer: str | None = None) -> list[E]:
        """Return the events of one kind, of one peer or of all."""
        return self._index.get((kind, peer), [])

    def first(self, kind: type[E]) -> E | None:
        """Return the first event of a kind, or None."""
        return next(iter(self.of(kind)), None)

    @cached_property
    def of_peers(self) -> dict[str, list[Event]]:
        """Events of each peer by its name, including those written by its supervisor."""
        return group_by((e for e in self.events if e.peer is not None), lambda e: e.peer or "")

    def by_peer(self, kind: type[E]) -> dict[str, list[E]]:
        """Return the events of one kind by the name of the peer, names sorted."""
        return group_by(self.of(kind), lambda event: event.peer or "")

    def by_round(self, kind: type[InRound]) -> dict[int, list[InRound]]:
        """Return the events of one kind by round, rounds sorted, without the reverted ones."""
        return group_by(filter(self.stands, self.of(kind)), lambda event: event.round)

    @property
    def target(self) -> Mapping[str, Any] | None:
        """Target of the training: ``metric``, ``value`` and ``mode`` (min or max)."""
        ready = self.first(PeerReady)
        return None if ready is None else ready.target

    # -- peers and time ------------------------------------------------------------------------

    @cached_property
    def incarnations(self) -> dict[str, Incarnation]:
        """Incarnations of all replicas by name, in the order of replicas and incarnations."""
        found = []
        for name, events in self.of_peers.items():
            spawned = _earliest(self.of(PeerSpawned, name))
            started = _earliest(self.of(TrainingStarted, name))
            found.append(
                Incarnation(
                    name,
                    cause=None if spawned is None else spawned.cause,
                    spawned=None if spawned is None else spawned.t,
                    started=None if started is None else started.t,
                    end=_earliest(event for event in events if isinstance(event, End)),
                )
            )
        return {item.name: item for item in sorted(found, key=lambda item: item.place)}

    @cached_property
    def trained(self) -> tuple[str, ...]:
        """Names of the peers that began to train, in the order of the log."""
        return tuple(dict.fromkeys(event.peer or "" for event in self.of(TrainingStarted)))

    @cached_property
    def holders(self) -> frozenset[str]:
        """Names of the peers that hold their nodes and do not train."""
        return frozenset(event.peer or "" for event in self.of(PeerReady) if not event.trains)

    @cached_property
    def living(self) -> tuple[str, ...]:
        """Names of the peers that trained to the end."""
        return tuple(name for name in self.trained if self.gone(name) is None)

    def gone(self, peer: str) -> float | None:
        """Return when a peer left, failed or was lost [s, Unix time]; None if it did not."""
        events = chain.from_iterable(self.of(kind, peer) for kind in (Left, PeerLost, PeerFailed))
        return min((event.t for event in events), default=None)

    @cached_property
    def faults(self) -> tuple[FaultWindow, ...]:
        """Faults that fired, in the order of the log."""
        healed = {event.fault: event.t for event in self.of(FaultHealed)}
        return tuple(
            FaultWindow(
                fault=event.fault,
                kind=event.fault_kind,
                effect=event.effect,
                targets=frozenset(event.lives or ()),
                fired=event.t,
                healed=healed.get(event.fault),
            )
            for event in self.of(FaultFired)
        )

    @cached_property
    def end(self) -> float:
        """Unix time of the last peer's end of training, or else of any peer's last event [s]."""
        finished = [event.t for event in self.of(PeerFinished)]
        last_seen = [event.t for event in self.events if event.peer is not None]
        return max(finished or last_seen, default=0.0)

    @cached_property
    def span(self) -> tuple[float, float] | None:
        """Unix times [s] between which the swarm trained; None if it never did.

        From the release of the barrier (without that event, the first start of training) to
        :attr:`end`.
        """
        started = [item.started for item in self.incarnations.values() if item.started is not None]
        if not started:
            return None
        released = self.first(BarrierReleased)
        began = min(started) if released is None else released.t
        return began, max(began, self.end)

    @cached_property
    def clock_s(self) -> float | None:
        """Training clock of the swarm at its end [s]: the maximum over the peers."""
        return max(map(self.clock_of, self._clocked), default=None)

    def clock_of(self, event: Clocked) -> float:
        """Return the swarm's training clock [s] at an event.

        The clock of a peer begins with its own training. For a peer that joined later, it is
        shifted by the swarm's training clock at that time.

        Raises:
            ValueError: The event has no ``clock_s``.
        """
        if event.clock_s is None:
            raise ValueError(f"{event.kind} without clock_s")
        return event.clock_s + self._offsets.get(event.peer or "", 0.0)

    @cached_property
    def _clocked(self) -> list[Clocked]:
        """Events with a ``clock_s``, in the order of the log."""
        clocked = (event for event in self.events if isinstance(event, Clocked))
        return [event for event in clocked if event.clock_s is not None]

    @cached_property
    def _offsets(self) -> dict[str, float]:
        points: dict[str, list[tuple[float, float]]] = defaultdict(list)
        for event in sorted(self._clocked, key=lambda each: each.t):
            points[event.peer or ""].append((event.t, event.clock_s or 0.0))
        joined, together = list[tuple[float, str]](), list[str]()
        for item in self.incarnations.values():
            if not item.joined(self.spec.swarm.peers):
                together.append(item.name)
            elif item.started is not None:
                joined.append((item.started, item.name))
        began = 0.0 if self.span is None else self.span[0]
        return clock_offsets(together, joined, points, self.gone, began)

    # -- rounds and samples --------------------------------------------------------------------

    @cached_property
    def rounds(self) -> tuple[int, ...]:
        """Rounds that at least one peer applied."""
        applied = (event for event in self.of(Round) if event.outcome in APPLIED)
        return tuple(sorted({event.round for event in applied if self.stands(event)}))

    @cached_property
    def averagings(self) -> list[Round | StateRound]:
        """Averagings of gradients, then those of state."""
        return [*self.of(Round), *self.of(StateRound)]

    def applied(self, event: Round) -> bool:
        """Return whether a peer applied a round and did not undo it later."""
        kept = (event.peer, event.round) not in self.undone and self.stands(event)
        return event.outcome in APPLIED and kept

    def stands(self, event: InRound) -> bool:
        """Return whether the training did not go back to a checkpoint before an event's round."""
        return id(event) not in self._reverted

    @cached_property
    def _reverted(self) -> frozenset[int]:
        return reverted(self.of(RolledBack), self.of_peers)

    @cached_property
    def undone(self) -> frozenset[tuple[str | None, int]]:
        """Rounds (peer, round) whose samples no peer's parameters contain any more.

        A peer loses the rounds that it stepped alone (outcome ``alone`` or ``local``) or in one of
        several groups, if it loads the state of another peer before it averages with all peers
        again.
        """
        peers = self.spec.swarm.peers
        pairs = self.spec.configuration.group_peers(peers) < peers
        return lost_alone(self.events, any_peer=pairs)

    def committed(self, until: int | None = None) -> int:
        """Return the samples whose gradients entered an applied round, over the swarm.

        Args:
            until: Last round that counts; by default all rounds count.
        """
        rounds, sums = self._committed
        return sums[len(rounds) if until is None else bisect_right(rounds, until)]

    @cached_property
    def _committed(self) -> tuple[list[int], list[int]]:
        """Rounds with committed samples, and these samples before the first and up to each."""
        samples: Counter[int] = Counter()
        for event in self.of(Round):
            if self.applied(event):
                samples[event.round] += event.samples
        rounds = sorted(samples)
        return rounds, [0, *accumulate(samples[number] for number in rounds)]

    @cached_property
    def computed(self) -> int:
        """Samples that went through a backward pass, over the swarm."""
        return sum(self.computed_by_peer.values())

    @cached_property
    def computed_by_peer(self) -> dict[str, int]:
        """Samples that each peer is known to have computed.

        Peers report the number in ``computed`` of rounds, transitions and ``progress``, at
        evaluations and at their end. For a peer that died the last report counts; without any
        report, the samples of its rounds do.
        """
        entered: dict[str, int] = defaultdict(int)
        reported: dict[str, int] = defaultdict(int)
        for event in self.events:
            count = None
            if isinstance(event, (Evaluation, PeerFinished)):
                count = event.samples
            elif isinstance(event, (Round, Transition, Progress)):
                count = event.computed
            name = event.peer or ""
            if isinstance(event, Round):
                entered[name] += event.samples
            if count is not None:
                reported[name] = max(reported[name], count)
        peers = reported.keys() | entered.keys()
        return {peer: max(reported[peer], entered[peer]) for peer in peers}


def _earliest(events: Iterable[E]) -> E | None:
    return min(events, key=lambda event: event.t, default=None)


def group_by(events: Iterable[E], key: Callable[[E], Key]) -> dict[Key, list[E]]:
    """Return events by a key, keys sorted."""
    groups: dict[Key, list[E]] = defaultdict(list)
    for event in events:
        groups[key(event)].append(event)
    return {value: groups[value] for value in sorted(groups)}
