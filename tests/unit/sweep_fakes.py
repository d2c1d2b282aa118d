"""Fake cluster without processes: its supervisors write real event logs, one step at each poll.

A :class:`World` outlives drivers, as a Ray cluster does. The test determines the actions of a
supervisor between two polls of the driver.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rayhive.cluster.replicate.peer_table import Outcome, PeerStatus, ReplicateStatus
from rayhive.errors import NoAnswerError, Problem
from rayhive.events import Event, EventLog, make_event
from rayhive.spec import SwarmConfig
from rayhive.spec.replicate import ReplicateSpec
from tests.fixtures.logs import Log

SHAPES = ((64, 32), (32,), (10, 64), (10,))
#: A study of two trials.
TINY: dict[str, Any] = {
    "name": "tiny",
    "workload": {"name": "digits"},
    "swarm": {"peers": 2, "target_batch_size": 128},
    "space": {"codec": ["none", "float16"]},
    "replicates": 1,
    "budget": {"trials": 2, "seconds_per_replicate": 5},
    "storage": "journal:trials.log",
}


class Killed(BaseException):
    """Death of the driver at this point, as by SIGKILL."""


def write_half_an_event(log: EventLog) -> None:
    """End a log in the middle of a line, as the death of its writer does."""
    log.close()
    with log.path.open("a", encoding="utf-8") as file:
        file.write('{"kind":"rou')


class Supervisor:
    """One running replicate, which finishes after ``looks`` polls."""

    def __init__(self, log: Log, looks: int) -> None:
        self.spec = log.spec
        self.left = looks
        self.planned = log
        self.file = EventLog(Path(self.spec.folder) / "events.jsonl")
        self.outcome: Outcome | None = None
        self.stop_requested = False
        self.write(log.head())
        self.file.sync()

    def write(self, events: Iterable[Event]) -> None:
        for event in events:
            self.file.append(event)

    def step(self) -> None:
        self.left -= 1
        if self.left <= 0 and self.outcome is None:
            for peer in range(self.spec.swarm.peers):
                self.write(self.planned.of_peer(peer))
            self.finish(str(self.planned.state), "rounds")

    def finish(self, state: str, reason: str) -> None:
        self.write([make_event("replicate_finished", state=state, stop_reason=reason)])
        self.file.close()
        self.outcome = Outcome(state, reason)


class World:
    """State that outlives a driver.

    Args:
        looks: Polls that a replicate takes.
        tick: Called at every request of a driver to the cluster.
        log: Log of a replicate; by default it completes.
    """

    def __init__(
        self,
        looks: int = 2,
        tick: Callable[[], None] = lambda: None,
        log: Callable[[ReplicateSpec], Log] = Log,
    ) -> None:
        self.looks = looks
        self.tick = tick
        self.log = log
        self.live: dict[str, Supervisor] = {}
        self.starts: Counter[str] = Counter()
        self.ends: Counter[str] = Counter()
        self.released: list[str] = []
        self.awaited: set[str] = set()  # after a stop
        self.lose: set[str] = set()
        self.silent = 0  # number of requests that a live supervisor does not answer
        self.room: list[Problem] = []
        self.at_once = 4
        self.closed = 0

    def run_on(self) -> None:
        """Run every live supervisor to its end, as it does without a driver."""
        for run_id, supervisor in list(self.live.items()):
            while supervisor.outcome is None:
                self.look(run_id)
            del self.live[run_id]

    def look(self, run_id: str) -> Outcome | None:
        """Run a supervisor for the time between two polls."""
        supervisor = self.live[run_id]
        before = supervisor.outcome
        supervisor.step()
        if before is None and supervisor.outcome is not None:
            self.ends[replicate_name(supervisor.spec)] += 1
        return supervisor.outcome

    def die(self) -> None:
        """End every supervisor in the middle of a line."""
        for supervisor in self.live.values():
            if supervisor.outcome is None:
                write_half_an_event(supervisor.file)
        self.live.clear()

    @contextmanager
    def connect(self, address: str | None) -> Iterator[FakeCluster]:
        """Stand in for ``Cluster.connect``."""
        try:
            yield FakeCluster(self)
        finally:
            self.closed += 1


class FakeCluster:
    """One driver's view of the world."""

    def __init__(self, world: World) -> None:
        self.world = world

    def check_kinds(self, needs: Any, swarm: SwarmConfig) -> list[Problem]:
        return []

    def check_room(self, swarm: SwarmConfig) -> list[Problem]:
        return self.world.room

    def at_once(self, swarm: SwarmConfig, joining: int = 0) -> int:
        return self.world.at_once

    def find(self, run_id: str, folder: Any = None) -> FakeHandle | None:
        self.world.tick()
        live = self.world.live.get(run_id)
        if live is None or (folder is not None and Path(live.spec.folder) != Path(folder)):
            return None
        if self.world.silent:
            self.world.silent -= 1
            raise NoAnswerError(f"{run_id} does not answer")
        return FakeHandle(self.world, run_id)

    def start(self, spec: ReplicateSpec) -> FakeHandle:
        world = self.world
        world.tick()
        if spec.run_id not in world.live:
            world.live[spec.run_id] = Supervisor(world.log(spec), world.looks)
            world.starts[replicate_name(spec)] += 1
        world.tick()
        return FakeHandle(world, spec.run_id)


class FakeHandle:
    """Handle of one driver on a replicate."""

    def __init__(self, world: World, run_id: str) -> None:
        self.world = world
        self.run_id = run_id

    def wait(self, timeout: float) -> Outcome | None:
        self.world.tick()
        if self.world.live[self.run_id].stop_requested:
            self.world.awaited.add(self.run_id)
        if self.run_id in self.world.lose:  # its node is gone
            self.world.lose.discard(self.run_id)
            log = self.world.live.pop(self.run_id).file
            write_half_an_event(log)
            return Outcome("failed", "the supervisor died")
        return self.world.look(self.run_id)

    def status(self) -> ReplicateStatus:
        return ReplicateStatus(
            self.run_id,
            "training",
            peers={"peer-0": PeerStatus("training", round=3)},
            stop_requested=self.world.live[self.run_id].stop_requested,
        )

    def stop(self, reason: str) -> None:
        self.world.tick()
        supervisor = self.world.live[self.run_id]
        supervisor.stop_requested = True
        if supervisor.outcome is None:
            supervisor.finish("stopped", reason)

    def release(self) -> None:
        self.world.tick()
        self.world.released.append(self.run_id)
        self.world.live.pop(self.run_id, None)


def replicate_name(spec: ReplicateSpec) -> str:
    return f"{spec.place}/{spec.replicate}/{spec.scenario}"


class Recorder:
    """Progress that records its calls."""

    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []

    def began(self, trials: int, replicates: int) -> None:
        self.events.append(("began", trials, replicates))

    def replicate_started(self, spec: ReplicateSpec, adopted: bool) -> None:
        self.events.append(("started", replicate_name(spec), spec.attempt, adopted))

    def replicate_status(self, spec: ReplicateSpec, handle: Any) -> None:
        self.events.append(("status", replicate_name(spec)))

    def replicate_finished(self, spec: ReplicateSpec, row: Mapping[str, Any], kept: bool) -> None:
        self.events.append(("finished", replicate_name(spec), row["state"], kept))

    def trial_finished(self, record: Any, values: Any, reason: str | None) -> None:
        self.events.append(("trial", record.number, values, reason))

    def note(self, text: str) -> None:
        self.events.append(("note", text))

    def of(self, kind: str) -> list[tuple[Any, ...]]:
        return [event[1:] for event in self.events if event[0] == kind]
