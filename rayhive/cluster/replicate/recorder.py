"""Intake of a replicate: everything that its peers report or that happens to them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rayhive.cluster.node.forkserver_manager import tail
from rayhive.cluster.replicate.fault_target import SwarmTarget
from rayhive.cluster.replicate.log import ReplicateLog
from rayhive.cluster.replicate.nemesis import Nemesis
from rayhive.cluster.replicate.peer_actor import Exited, StreamItem, Unreadable
from rayhive.cluster.replicate.peer_table import PeerTable
from rayhive.cluster.replicate.swarm import Started
from rayhive.events import Event, PeerLost, PeerSpawned, TrainingStarted, Transition
from rayhive.spec.replicate import PeerSpec


class Recorder:
    """Passes events to the log, the peer table and the faults, in this order.

    Args:
        log: Log of the replicate.
        peer_table: State of the peers.
        log_of: Returns the path of a peer's own log.
        on_change: Called after each item.

    Attributes:
        shutting_down: Whether the peers were asked to exit: their ends are no losses.
        target: The swarm as the faults see it; None without faults.
        nemesis: The faults; None without faults.
    """

    def __init__(
        self,
        log: ReplicateLog,
        peer_table: PeerTable,
        log_of: Callable[[str], Path],
        on_change: Callable[[], None],
    ) -> None:
        self.shutting_down = False
        self.target: SwarmTarget | None = None
        self.nemesis: Nemesis | None = None
        self._log, self._peer_table = log, peer_table
        self._log_of, self._on_change = log_of, on_change

    def write(self, event: Event) -> None:
        """Write an event of the supervisor."""
        self._log.append(event)
        if self.target is not None and event.peer is not None:
            self.target.heard(event)

    async def receive(self, name: str, item: StreamItem) -> None:
        """Take an item of a peer's stream."""
        match item:
            case Exited():
                self._exited(name, item)
            case Unreadable():
                self._peer_table.lost(name, f"it sent an event that can't be read: {item.reason}")
            case Event():
                self._event(item.of_peer(name))
        self._on_change()

    def _event(self, event: Event) -> None:
        self._log.append(event)
        self._peer_table.take(str(event.peer), event)
        if self.target is not None:
            self.target.heard(event)
        if self.nemesis is not None and isinstance(event, (Transition, TrainingStarted)):
            self.nemesis.heard(event.round or 0)

    def _exited(self, name: str, end: Exited) -> None:
        if self.shutting_down or self._peer_table.peers[name].finish_reason is not None:
            self._peer_table.left(name)
            return
        text = end.reason or _describe_exit(end.exit_code)
        known = self._peer_table.peers[name].error
        last_lines = tail(self._log_of(name), 6)
        # only the loss of its actor has a reason of its own
        self._peer_table.lost(
            name, f"{text}; its log ends with: {last_lines}", actor_lost=end.reason is not None
        )
        self.write(PeerLost(peer=name, exit_code=end.exit_code, reason=known or text))

    def spawned(self, cause: str | None) -> Started:
        """Return the callback for a peer that a fault starts; None for the first peers."""

        def started(peer: PeerSpec, answer: Mapping[str, Any]) -> None:
            pid, host = int(answer["pid"]), str(answer["host"])
            self._peer_table.spawned(peer.name, pid, host)
            self.write(
                PeerSpawned(
                    peer=peer.name,
                    node=str(answer["node"]),
                    host=host,
                    pid=pid,
                    slot=peer.replica,
                    life=peer.incarnation,
                    cause=cause,
                )
            )

        return started


def _describe_exit(code: int | None) -> str:
    if code is None:
        return "its process ended"
    if code < 0:
        return f"its process was killed by signal {-code}"
    return f"its process ended with exit code {code}"
