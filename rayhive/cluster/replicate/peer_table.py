"""State of the peers of a replicate, and the outcome of the replicate that follows from it.

Pure bookkeeping: events go in, states come out. Nothing here sends or writes.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Literal

from rayhive import events
from rayhive.cluster.replicate.target_watch import TargetWatch
from rayhive.spec import Budget
from rayhive.spec.replicate import ReplicateSpec

PeerState = Literal[
    "placed", "starting", "dht", "ready", "training", "finished", "failed", "lost", "gone"
]
State = Literal[
    "completed", "timed_out", "diverged", "failed", "stopped", "invalid", "lost", "pruned"
]

#: Reasons with which a peer finishes when the goal of the replicate is reached.
TARGET = "target"
GOALS = ("rounds", TARGET)
#: States before the training of a peer.
_BEFORE_TRAINING = ("placed", "starting", "dht", "ready")


@dataclass(frozen=True)
class Outcome:
    """Outcome of a replicate.

    Attributes:
        state: One of the states of a ``replicate_finished`` event.
        stop_reason: Short reason of the end.
    """

    state: State
    stop_reason: str


@dataclass(frozen=True)
class PeerStatus:
    """Row of a peer in ``rayhive status``; see :class:`PeerRecord`.

    Attributes:
        last_event_age: Time since its last event [s].
    """

    state: PeerState = "placed"
    round: int = 0
    samples: int = 0
    samples_per_s: float | None = None
    loss: float | None = None
    last_event_age: float = 0.0
    host: str | None = None
    pid: int | None = None
    error: str | None = None


@dataclass(frozen=True)
class ReplicateStatus:
    """Status of a running replicate; of one that does not answer, only run id and phase are known.

    Attributes:
        run_id: Name of its supervisor.
        phase: ``placing``, ``starting``, ``training``, ``stopping`` or ``finished``.
        study: Name of its study.
        folder: Folder of its files.
        seconds: Time since the barrier; before it, since the start [s].
        budget_seconds: Longest training [s].
        outcome: Outcome; None before the end.
        peers: Status of each peer.
        stop_requested: Whether the replicate was asked to end early.
    """

    run_id: str
    phase: str
    study: str | None = None
    folder: str | None = None
    seconds: float | None = None
    budget_seconds: float | None = None
    outcome: Outcome | None = None
    peers: Mapping[str, PeerStatus] = field(default_factory=dict)
    stop_requested: bool = False


@dataclass
class PeerRecord:
    """State of one incarnation.

    Attributes:
        name: Name in events.
        state: Phase of its life cycle.
        pid: Process id; None before the start.
        host: Host name of its node.
        round: Last round that it finished.
        samples: Own samples that entered rounds.
        samples_per_s: Rate since its training started, without evaluation [samples/s].
        loss: Last reported loss.
        finish_reason: Reason with which its training ended; None before.
        error: Reason of a failure or loss.
        exited: Whether its process has ended.
        addresses: Multiaddresses of its DHT.
        processes: Role -> process id.
        loss_expected: Whether a fault asked for its end.
        actor_lost: Whether its actor is gone, and possibly its node.
        late: Whether it started later than the first peers.
        trained: Whether it has the state of the run: it started with the others, loaded the state,
            or was in a group with other peers.
        trains: Whether it is going to train, and does not hold its node for a baseline.
        heard: Time of its last event [s, Unix time].
    """

    name: str
    state: PeerState = "placed"
    pid: int | None = None
    host: str | None = None
    round: int = 0
    samples: int = 0
    samples_per_s: float | None = None
    loss: float | None = None
    finish_reason: str | None = None
    error: str | None = None
    exited: bool = False
    addresses: list[str] = field(default_factory=list)
    processes: dict[str, int] = field(default_factory=dict)
    loss_expected: bool = False
    actor_lost: bool = False
    late: bool = False
    trained: bool = True
    trains: bool = True
    heard: float = field(default_factory=time.time)

    @property
    def over(self) -> bool:
        """Whether its training is over."""
        return self.finish_reason is not None or (self.exited and self.loss_expected)

    @property
    def lives(self) -> bool:
        """Whether its process runs, and its training is not over."""
        return self.pid is not None and not self.exited and self.finish_reason is None

    @property
    def last_event_age(self) -> float:
        """Time since its last event [s]."""
        return time.time() - self.heard

    def status(self) -> PeerStatus:
        """Return the peer's row of ``rayhive status``."""
        return PeerStatus(**{each.name: getattr(self, each.name) for each in fields(PeerStatus)})

    def take(self, event: events.Event) -> None:
        """Update the state with one event of the peer."""
        self.heard = time.time()
        match event:
            case events.DHTReady():
                self.state, self.addresses = "dht", event.addresses
            case events.PeerReady():
                self.state, self.processes = "ready", event.processes or {}
                self.trains = event.trains
            case events.TrainingStarted():
                self.state = "training"
            case events.Round():
                self.state, self.round = "training", event.round
                self.samples += event.samples
                self.trained |= event.outcome in events.GROUPED
                if event.clock_s:
                    self.samples_per_s = self.samples / event.clock_s
                if event.loss is not None:
                    self.loss = event.loss
            case events.StateLoaded():
                self.trained |= bool(event.round_of_state)
            case events.StateRound():
                self.trained |= event.outcome in events.GROUPED
            case events.PeerFinished():
                self.state, self.finish_reason = "finished", event.reason
                self.round, self.samples = event.round, event.samples
            case events.PeerFailed():
                self.state, self.error = "failed", event.error


class PeerTable:
    """The incarnations of one replicate, by name.

    Args:
        names: Names of the peers that start together; the first is the bootstrap peer.
        checkpoints: Whether a peer that starts later goes on from a checkpoint, and not from the
            state of another peer.
        target: Compares their evaluations with the target that ends training; None without one.
    """

    def __init__(
        self, names: list[str], checkpoints: bool = False, target: TargetWatch | None = None
    ) -> None:
        self.peers = {name: PeerRecord(name) for name in names}
        self._checkpoints, self._target = checkpoints, target

    @classmethod
    def of(cls, spec: ReplicateSpec) -> PeerTable:
        """Return the table of the peers of a replicate that start together."""
        names = [spec.peer_spec(number).name for number in range(spec.swarm.peers)]
        watched = spec.budget.stop_at_target and spec.baseline is None  # a baseline agrees itself
        target = TargetWatch() if watched else None
        return cls(names, checkpoints=spec.baseline == "elastic", target=target)

    def add(self, name: str) -> None:
        """Add an incarnation that starts later."""
        self.peers[name] = PeerRecord(name, late=True, trained=self._checkpoints)

    def status(
        self, spec: ReplicateSpec, phase: str, seconds: float, outcome: Outcome | None
    ) -> ReplicateStatus:
        """Return the status of the replicate.

        Args:
            spec: The replicate.
            phase: Its phase.
            seconds: Time since the barrier; before it, since the start [s].
            outcome: Its outcome; None before the end.
        """
        return ReplicateStatus(
            run_id=spec.run_id,
            phase=phase,
            study=spec.study,
            folder=spec.folder,
            seconds=seconds,
            budget_seconds=spec.budget.seconds_per_replicate,
            outcome=outcome,
            peers={name: peer.status() for name, peer in self.peers.items()},
        )

    def take(self, name: str, event: events.Event) -> None:
        """Update the state of a peer with one of its events."""
        self.peers[name].take(event)
        if self._target is not None:
            rounds = {each: self.peers[each].round for each in self.training()}
            self._target.heard(name, event, rounds)

    def spawned(self, name: str, pid: int, host: str) -> None:
        """Record that the process of a peer runs."""
        peer = self.peers[name]
        peer.pid, peer.host, peer.state = pid, host, "starting"
        peer.heard = time.time()

    def lost(self, name: str, reason: str, actor_lost: bool = False) -> None:
        """Record that a peer ended without being asked to.

        Args:
            name: The peer.
            reason: Known reason of its end.
            actor_lost: Whether its actor is gone, and not only its process.
        """
        peer = self.peers[name]
        peer.exited, peer.actor_lost = True, actor_lost
        if peer.state != "failed":
            peer.state = "lost"
            peer.error = reason

    def left(self, name: str) -> None:
        """Record that the process of a peer ended as planned."""
        peer = self.peers[name]
        peer.exited = True
        if peer.state == "finished":
            peer.state = "gone"

    def trouble(self) -> str | None:
        """Return the problem of the first peer that failed or was lost unexpectedly, if any."""
        for peer in self.peers.values():
            if peer.state in ("failed", "lost") and not peer.loss_expected:
                return f"{peer.name}: {peer.error}"
        if self.first_finish() is not None:
            return None
        left = [peer for peer in self.peers.values() if peer.trains and not peer.exited]
        if not left:
            return "no peer is left that trains"
        newest = max(peer.round for peer in self.peers.values())
        if newest and not any(peer.trained for peer in left):
            return f"no peer is left that has the state of round {newest}"
        return None

    def all_ready(self) -> bool:
        """Return whether every peer is at the barrier or past it."""
        past = ("ready", "training", "finished", "gone")
        return all(peer.state in past for peer in self.peers.values())

    def all_finished(self) -> bool:
        """Return whether the training of every peer is over; a late peer may not have begun."""
        return all(
            peer.over or (peer.late and peer.state in _BEFORE_TRAINING)
            for peer in self.peers.values()
        )

    def late_before_training(self) -> list[str]:
        """Return the names of the late peers that run and have not begun to train."""
        return [
            peer.name
            for peer in self.peers.values()
            if peer.late and not peer.exited and peer.state in _BEFORE_TRAINING
        ]

    def running(self) -> list[str]:
        """Return the names of the peers that train or will train."""
        return [peer.name for peer in self.peers.values() if peer.lives]

    def training(self) -> list[str]:
        """Return the names of the peers that train; a late one may not have begun."""
        late = self.late_before_training()
        return [name for name in self.running() if name not in late]

    def missing(self, *states: PeerState) -> list[str]:
        """Return the names of the peers in none of ``states``."""
        return [peer.name for peer in self.peers.values() if peer.state not in states]

    def first_finish(self) -> str | None:
        """Return the most important reason for which training ends, or ended for a peer, if any."""
        reasons = {peer.finish_reason for peer in self.peers.values()}
        if self._target is not None and self._target.reached:
            reasons.add(TARGET)
        order = ("diverged", TARGET, "rounds", "seconds", "stop")
        return next((reason for reason in order if reason in reasons), None)

    async def blame(
        self, trouble: str, silent_nodes: Callable[[Sequence[str]], Awaitable[Mapping[str, str]]]
    ) -> Outcome:
        """Return the outcome of a replicate that failed.

        It is ``lost`` if an actor or a node is the cause, and otherwise ``failed``: a failure of
        the configuration. A node that goes down takes its peers along before Ray notices, so all
        nodes are asked.

        Args:
            trouble: Description of the failure.
            silent_nodes: Returns the nodes of some peers that do not answer, each with the reason.
        """
        there = [peer for peer in self.peers.values() if not peer.loss_expected]
        if any(peer.actor_lost for peer in there):
            return Outcome("lost", trouble)
        gone = await silent_nodes([peer.name for peer in there])
        if not gone:
            return Outcome("failed", trouble)
        nodes = "; ".join(f"node {node[:8]} does not answer ({why})" for node, why in gone.items())
        return Outcome("lost", f"{nodes}; {trouble}")

    def outcome(self, budget: Budget, out_of_time: bool, stopped: str | None) -> Outcome:
        """Return the outcome of a replicate in which every peer finished.

        Args:
            budget: Budget of the replicate.
            out_of_time: Whether the supervisor stopped the peers at the end of their seconds.
            stopped: Reason of a requested stop; None if there was none.
        """
        reason = self.first_finish()
        if reason == "diverged":
            name, at = next(
                (peer.name, peer.round)
                for peer in self.peers.values()
                if peer.finish_reason == "diverged"
            )
            return Outcome("diverged", f"{name} diverged in round {at}")
        if reason in GOALS:
            return Outcome("completed", str(reason))
        if stopped is not None:
            return Outcome("stopped", stopped)
        if out_of_time or reason == "seconds":
            wanted = budget.samples_per_replicate is not None or budget.stop_at_target
            return Outcome("timed_out" if wanted else "completed", "seconds")
        return Outcome("stopped", "the peers stopped by themselves")
