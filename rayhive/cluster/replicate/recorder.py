"""Intake and event log of a replicate: what its peers report and what happens to them."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rayhive.cluster.live_metrics import ReplicateMetrics
from rayhive.cluster.node.forkserver_manager import tail
from rayhive.cluster.node.processes import ending
from rayhive.cluster.replicate import peer_actor
from rayhive.cluster.replicate.early_stop import EarlyStopWatch
from rayhive.cluster.replicate.fault_target import SwarmTarget
from rayhive.cluster.replicate.nemesis import Nemesis
from rayhive.cluster.replicate.peer_table import PeerTable
from rayhive.errors import ReplicateError
from rayhive.events import Event, EventLog, PeerLost, PeerSpawned, TrainingStarted, Transition
from rayhive.files import first_free, write_atomically
from rayhive.spec.replicate import PeerSpec, ReplicateSpec


class ReplicateLog:
    """Event log that remembers that its disk failed instead of raising.

    Args:
        spec: The replicate; its folder is made by :meth:`open`.
        failed: Called when an event cannot be written.

    Attributes:
        error: Description of the disk's failure; None without a failure.
        path: File of the events.
    """

    def __init__(self, spec: ReplicateSpec, failed: Callable[[], None]) -> None:
        self.error: str | None = None
        self._spec = spec
        self._folder = Path(spec.folder)
        self.path = self._folder / "events.jsonl"
        self._failed = failed
        self._log: EventLog | None = None

    def open(self) -> None:
        """Write spec and plan, and begin an empty log; earlier events are set aside.

        Raises:
            ReplicateError: The folder can't be written.
        """
        try:
            (self._folder / "logs").mkdir(parents=True, exist_ok=True)
            spec = self._spec.model_dump_json(by_alias=True, indent=1) + "\n"
            write_atomically(self._folder / "spec.json", spec)
            if self._spec.plan is not None:
                write_atomically(self._folder / "plan.json", self._spec.plan.canonical())
            self._log = EventLog(set_aside(self.path))
            self._log.hold()  # a driver that does not find this supervisor waits for its end
        except OSError as error:
            raise ReplicateError(f"{self._folder} can't be written: {error.strerror}") from error

    def append(self, event: Event) -> None:
        """Write one event; after a failure, do nothing."""
        with self._kept_error():
            if self._log is not None and self.error is None:
                self._log.append(event)

    def sync(self) -> None:
        """Sync the events to disk."""
        with self._kept_error():
            if self._log is not None and self.error is None:
                self._log.sync()

    def close(self) -> None:
        """Sync and close."""
        with self._kept_error():
            if self._log is not None:
                self._log.close()

    @contextmanager
    def _kept_error(self) -> Iterator[None]:
        """Keep an error of the disk as :attr:`error`."""
        try:
            yield
        except OSError as error:
            self.error = f"events can't be written: {error}"
            self._failed()

    def note_failure(self) -> None:
        """Write the traceback of the current exception to the supervisor's own log."""
        try:
            with (self._folder / "logs" / "supervisor.log").open("a", encoding="utf-8") as file:
                file.write(traceback.format_exc())
        except OSError:
            traceback.print_exc()


def set_aside(path: Path) -> Path:
    """Rename the event log of an earlier attempt in the same folder; return ``path``."""
    if path.exists() and path.stat().st_size:
        os.replace(
            path, first_free(lambda n: path.with_name(f"{path.stem}.attempt-{n}{path.suffix}"))
        )
    return path


class Recorder:
    """Passes events to the log, the peer table and the faults, in this order.

    Args:
        log: Log of the replicate.
        peer_table: State of the peers.
        on_change: Called after each item.
        early_stop: Watch that may stop the replicate.
        metrics: Metrics of the replicate for Prometheus.

    Attributes:
        shutting_down: Whether the peers were asked to exit: their ends are no losses.
        target: The swarm as the faults see it; None without faults.
        nemesis: The faults; None without faults.
    """

    def __init__(
        self,
        log: ReplicateLog,
        peer_table: PeerTable,
        on_change: Callable[[], None],
        early_stop: EarlyStopWatch,
        metrics: ReplicateMetrics,
    ) -> None:
        self.shutting_down = False
        self.target: SwarmTarget | None = None
        self.nemesis: Nemesis | None = None
        self._log, self._peer_table, self._on_change = log, peer_table, on_change
        self._early_stop, self._metrics = early_stop, metrics

    def write(self, event: Event) -> None:
        """Write an event of the supervisor."""
        self._log.append(event)
        self._metrics.heard(event)
        if self.target is not None and event.peer is not None:
            self.target.heard(event)

    async def receive(self, name: str, item: peer_actor.StreamItem) -> None:
        """Take an item of a peer's stream."""
        match item:
            case peer_actor.Exited():
                self._exited(name, item)
            case peer_actor.Unreadable():
                self._peer_table.lost(name, f"it sent an event that can't be read: {item.reason}")
            case Event():
                try:
                    self._event(item.of_peer(name))
                except Exception as error:  # else the peer would seem to train without a word
                    self._log.note_failure()
                    text = f"its event {item.kind} can't be taken in: {error!r}"
                    self._peer_table.lost(name, text)
        self._on_change()

    def _event(self, event: Event) -> None:
        self._log.append(event)
        self._peer_table.take(str(event.peer), event)
        self._metrics.heard(event, self._peer_table.peers[str(event.peer)].samples_per_s)
        if self.target is not None:
            self.target.heard(event)
        pruned = self._early_stop.heard(event)
        if pruned is not None:
            self.write(pruned)
        if self.nemesis is not None and isinstance(event, (Transition, TrainingStarted)):
            self.nemesis.heard(event.round or 0)

    def _exited(self, name: str, end: peer_actor.Exited) -> None:
        if self.shutting_down or self._peer_table.peers[name].finish_reason is not None:
            self._peer_table.left(name)
            return
        text = end.reason or f"its process {ending(end.exit_code)}"
        known = self._peer_table.peers[name].error
        log, last_lines = peer_actor.log_of(self._log.path.parent, name), end.last_lines
        if last_lines is None and log.exists():  # it is on this node
            last_lines = tail(log, peer_actor.LAST_LINES)
        shown = text if last_lines is None else f"{text}; its log ends with: {last_lines}"
        # only the loss of its actor has a reason of its own
        self._peer_table.lost(name, shown, actor_lost=end.reason is not None)
        self.write(PeerLost(peer=name, exit_code=end.exit_code, reason=known or text))

    def spawned(self, cause: str | None) -> peer_actor.Started:
        """Return the callback for a peer that a fault starts; None for the first peers."""

        def started(peer: PeerSpec, node: str, process: peer_actor.PeerProcess) -> None:
            self._peer_table.spawned(peer.name, process.pid, process.host)
            self.write(
                PeerSpawned(
                    peer=peer.name,
                    node=node,
                    host=process.host,
                    pid=process.pid,
                    slot=peer.replica,
                    life=peer.incarnation,
                    cause=cause,
                    boot=process.boot,
                    versions=process.versions,
                    hardware=process.hardware,
                )
            )

        return started
