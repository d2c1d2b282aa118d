"""What a supervisor knows of its peers, and what follows from it for the replicate.

Pure bookkeeping: events go in, states come out. Nothing here waits, sends or writes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from rayhive.events import Event
from rayhive.spec import Budget

PeerState = Literal[
    "placed", "starting", "dht", "ready", "training", "finished", "failed", "lost", "gone"
]
State = Literal["completed", "timed_out", "diverged", "failed", "stopped", "invalid", "lost"]

#: Reasons to finish with which a peer says that the replicate's goal was reached.
GOALS = ("rounds", "target")


@dataclass(frozen=True)
class Outcome:
    """How a replicate ended.

    Attributes:
        state: One of the states of a ``replicate_finished`` event.
        stop_reason: Why it ended, in few words.
    """

    state: State
    stop_reason: str

    def as_dict(self) -> dict[str, str]:
        """Return what crosses to the driver."""
        return {"state": self.state, "stop_reason": self.stop_reason}


@dataclass
class PeerRecord:
    """What is known of one peer."""

    name: str
    state: PeerState = "placed"
    pid: int | None = None
    host: str | None = None
    round: int = 0
    samples: int = 0
    samples_per_s: float | None = None  # since its training started, without evaluation
    loss: float | None = None
    finish_reason: str | None = None
    error: str | None = None
    exited: bool = False
    addresses: list[str] = field(default_factory=list)
    processes: dict[str, int] = field(default_factory=dict)  # role -> pid
    doomed: bool = False  # its end is a fault's doing
    uprooted: bool = False  # its actor is gone, and maybe its node
    late: bool = False  # it did not start together with the others
    heard: float = field(default_factory=time.monotonic)

    @property
    def over(self) -> bool:
        """Whether nothing more is to come of its training."""
        return self.finish_reason is not None or (self.exited and self.doomed)

    @property
    def lives(self) -> bool:
        """Whether it trains, or will."""
        return self.pid is not None and not self.exited and self.finish_reason is None

    def status(self) -> dict[str, Any]:
        """Return the peer's row of ``rayhive status``."""
        return {
            "state": self.state,
            "round": self.round,
            "samples": self.samples,
            "samples_per_s": self.samples_per_s,
            "loss": self.loss,
            "last_event_age": time.monotonic() - self.heard,
            "host": self.host,
            "pid": self.pid,
            "error": self.error,
        }


class PeerTable:
    """The peers of one replicate.

    Args:
        names: The peers' names; the first is the bootstrap peer.
    """

    def __init__(self, names: list[str]) -> None:
        self.peers = {name: PeerRecord(name) for name in names}
        self._takers: dict[str, Callable[[PeerRecord, Event], None]] = {
            "dht_ready": _dht_ready,
            "peer_ready": _peer_ready,
            "training_started": _training_started,
            "round": _round,
            "peer_finished": _peer_finished,
            "peer_failed": _peer_failed,
        }

    def add(self, name: str) -> None:
        """Note a peer that comes later."""
        self.peers[name] = PeerRecord(name, late=True)

    def doom(self, name: str) -> None:
        """Note that the end of this peer, if it comes, is no failure."""
        self.peers[name].doomed = True

    def take(self, name: str, event: Event) -> None:
        """Take one event of the peer called ``name``."""
        peer = self.peers[name]
        peer.heard = time.monotonic()
        taker = self._takers.get(event["kind"])
        if taker is not None:
            taker(peer, event)

    def spawned(self, name: str, pid: int, host: str) -> None:
        """Note that the peer's process runs."""
        peer = self.peers[name]
        peer.pid, peer.host, peer.state = pid, host, "starting"
        peer.heard = time.monotonic()

    def lost(self, name: str, reason: str, uprooted: bool = False) -> None:
        """Note that the peer died although it was not told to go.

        Args:
            name: The peer.
            reason: What is known of its end.
            uprooted: Whether its actor is gone, and not the peer's process alone.
        """
        peer = self.peers[name]
        peer.exited, peer.uprooted = True, uprooted
        if peer.state != "failed":
            peer.state = "lost"
            peer.error = reason

    def left(self, name: str) -> None:
        """Note that the peer's process ended in the way that it should."""
        peer = self.peers[name]
        peer.exited = True
        if peer.state == "finished":
            peer.state = "gone"

    def trouble(self) -> str | None:
        """Return what is wrong with the first peer that failed or was lost by itself, if any."""
        for peer in self.peers.values():
            if peer.state in ("failed", "lost") and not peer.doomed:
                return f"{peer.name}: {peer.error}"
        if all(peer.exited for peer in self.peers.values()) and self.first_finish() is None:
            return "no peer is left"
        return None

    def uprooted(self) -> bool:
        """Return whether a peer was lost with its actor, and no fault asked for it."""
        return any(peer.uprooted and not peer.doomed for peer in self.peers.values())

    def undoomed(self) -> list[str]:
        """Return the names of the peers whose end no fault asks for."""
        return [peer.name for peer in self.peers.values() if not peer.doomed]

    def all_ready(self) -> bool:
        """Return whether every peer waits at the barrier, or is past it."""
        past = ("ready", "training", "finished", "gone")
        return all(peer.state in past for peer in self.peers.values())

    def all_finished(self) -> bool:
        """Return whether every peer's training is over; who came late may not have begun."""
        early = ("placed", "starting", "dht", "ready")
        return all(peer.over or (peer.late and peer.state in early) for peer in self.peers.values())

    def beginners(self) -> list[str]:
        """Return the names of those who came late and have not begun to train."""
        early = ("placed", "starting", "dht", "ready")
        return [
            peer.name
            for peer in self.peers.values()
            if peer.late and not peer.exited and peer.state in early
        ]

    def running(self) -> list[str]:
        """Return the names of the peers that train, or will."""
        return [peer.name for peer in self.peers.values() if peer.lives]

    def all_exited(self) -> bool:
        """Return whether no peer's process runs any more."""
        return all(peer.exited for peer in self.peers.values())

    def missing(self, *states: PeerState) -> list[str]:
        """Return the names of the peers in none of ``states``."""
        return [peer.name for peer in self.peers.values() if peer.state not in states]

    def first_finish(self) -> str | None:
        """Return the weightiest reason with which any peer finished so far."""
        reasons = {peer.finish_reason for peer in self.peers.values()}
        order = ("diverged", "target", "rounds", "seconds", "stop")
        return next((reason for reason in order if reason in reasons), None)

    def outcome(self, budget: Budget, out_of_time: bool, stopped: str | None) -> Outcome:
        """Return the outcome of a replicate all of whose peers finished.

        Args:
            budget: What was asked for.
            out_of_time: Whether the supervisor stopped the peers when their seconds were over.
            stopped: The reason, if somebody asked for the end.
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


def _dht_ready(peer: PeerRecord, event: Event) -> None:
    peer.state = "dht"
    peer.addresses = [str(address) for address in event["addresses"]]


def _peer_ready(peer: PeerRecord, event: Event) -> None:
    peer.state = "ready"
    peer.processes = {role: int(pid) for role, pid in (event.get("processes") or {}).items()}


def _training_started(peer: PeerRecord, event: Event) -> None:
    peer.state = "training"


def _round(peer: PeerRecord, event: Event) -> None:
    peer.state = "training"
    peer.round = int(event["round"])
    peer.samples += int(event["samples"])
    if event.get("clock_s"):
        peer.samples_per_s = peer.samples / float(event["clock_s"])
    if event.get("loss") is not None:
        peer.loss = float(event["loss"])


def _peer_finished(peer: PeerRecord, event: Event) -> None:
    peer.state = "finished"
    peer.finish_reason = str(event["reason"])
    peer.round = int(event["round"])
    peer.samples = int(event["samples"])


def _peer_failed(peer: PeerRecord, event: Event) -> None:
    peer.state = "failed"
    peer.error = str(event["error"])
