"""One replicate: kept if it is finished on disk, adopted if it still runs, else run.

A replicate that the infrastructure lost is run again as a further attempt, and only if every
attempt is lost it stays so: it says nothing about its configuration.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from rayhive.errors import ConfigError, DamagedError, NoAnswerError, Problem, SupervisorError
from rayhive.events import Event, EventLog, make_event, read_events
from rayhive.metrics.timeline import LOST
from rayhive.spec.replicate import ReplicateSpec
from rayhive.sweep.aside import archive, current_attempt, set_aside
from rayhive.sweep.files import write_atomically
from rayhive.sweep.signals import Interrupted, Interruption

#: Seconds between two looks at a running replicate.
POLL_S = 0.5
#: Seconds that a supervisor gets to end its peers and write its last event.
STOP_S = 30.0
#: Further attempts at a replicate that was lost, unless the study says otherwise.
RETRIES = 2


class Handle(Protocol):
    """A running replicate, as the cluster offers it."""

    def wait(self, timeout: float) -> Mapping[str, Any] | None:
        """Return ``state`` and ``stop_reason`` once it is over, None if it still runs."""

    def status(self) -> Mapping[str, Any]:
        """Return the phase and the state of each peer."""

    def stop(self, reason: str) -> None:
        """Ask it to end; it answers through :meth:`wait`."""

    def release(self) -> None:
        """Let go of what it still holds."""


class Swarms(Protocol):
    """What the driver needs of a cluster."""

    def find(self, run_id: str, folder: str | Path | None = None) -> Handle | None:
        """Return the live replicate of that name that writes to that folder, if there is one.

        Raises:
            NoAnswerError: One lives but does not answer.
        """

    def start(self, spec: ReplicateSpec) -> Handle:
        """Start a replicate, or adopt the live one of the same name."""


class Watcher(Protocol):
    """Whoever wants to see a replicate run."""

    def replicate_started(self, spec: ReplicateSpec, adopted: bool) -> None:
        """It was started, or a live one was adopted."""

    def replicate_status(self, spec: ReplicateSpec, handle: Handle) -> None:
        """It still runs; called about every :data:`POLL_S` seconds."""

    def note(self, text: str) -> None:
        """Something that is worth a line."""


def replicate_seed(seed: int, replicate: int) -> int:
    """Return the seed of a replicate number: the same for every configuration of a study."""
    digest = hashlib.blake2b(f"{seed}/{replicate}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") >> 1


def finished_event(folder: Path) -> Event | None:
    """Return how the replicate in ``folder`` ended; None if it did not or was stopped.

    Raises:
        DamagedError: Its event log is damaged.
    """
    log = folder / "events.jsonl"
    if not log.exists():
        return None
    last = None
    for event in read_events(log):
        if event["kind"] == "replicate_finished":
            if not isinstance(event.get("state"), str):
                raise DamagedError(log, "it does not say how the replicate ended")
            last = event
    return None if last is None or last["state"] == "stopped" else last


class ReplicateRunner:
    """Brings replicates to their end.

    Args:
        swarms: The cluster.
        watcher: Whoever wants to see.
        interruption: Ends the running replicate.
        poll_s: Seconds between two looks at it.
        retries: Further attempts at a replicate that was lost.
    """

    def __init__(
        self,
        swarms: Swarms,
        watcher: Watcher,
        interruption: Interruption,
        poll_s: float = POLL_S,
        retries: int = RETRIES,
    ) -> None:
        self._swarms = swarms
        self._watcher = watcher
        self._interruption = interruption
        self._poll_s = poll_s
        self._retries = retries

    def run(self, spec: ReplicateSpec, again: bool = False) -> bool:
        """Return once the replicate is finished on disk.

        Args:
            spec: The replicate; its ``attempt`` is chosen here.
            again: Whether one that was lost in every attempt gets as many once more.

        Returns:
            Whether it was run now; False if a finished one was kept.

        Raises:
            Interrupted: The sweep was told to end; the replicate has been stopped.
            ConfigError: The one that is there ran under another fault plan.
        """
        folder = Path(spec.folder)
        ran = False
        bound = self._retries + (lost_attempts(folder) if again else 0)
        self._interruption.check()
        spec, handle = self._adopt(spec, folder)
        end = None if handle is not None else self._finished(spec, folder)
        if end is not None or handle is not None:
            _check_plan(spec, folder)
        while True:
            if end is not None:
                if end["state"] != LOST or lost_attempts(folder) > bound:
                    return ran
                self._watcher.note(
                    f"trial {spec.trial} r{spec.replicate} {spec.scenario} was lost "
                    f"({end['stop_reason']}); it is tried again"
                )
            self._interruption.check()
            ran = True
            # the supervisor of an attempt that has ended may still be there: it is not adopted
            reason, handle = self._follow(spec, handle), None
            end = self._finished(spec, folder) or record_end(folder, LOST, reason)

    def _finished(self, spec: ReplicateSpec, folder: Path) -> Event | None:
        """Return how a replicate ended, None if it did not; a damaged one is set aside."""
        try:
            found = finished_event(folder)
            outcome = None if found is not None else _outcome(folder)
        except DamagedError as error:
            self.set_aside(spec, error)
            return None
        if outcome is not None:  # its supervisor died while it cleared up
            return record_end(folder, outcome["state"], outcome["stop_reason"])
        return found

    def set_aside(self, spec: ReplicateSpec, error: DamagedError) -> None:
        """Put a damaged file of a replicate where nobody reads it, and say so."""
        new = set_aside(error.path)
        again = "; it is run again" if error.path.name == "events.jsonl" else ""
        self._watcher.note(
            f"trial {spec.trial} r{spec.replicate} {spec.scenario} is damaged: {error}; "
            f"kept as {new.name}{again}"
        )

    def of_other_code(self, spec: ReplicateSpec) -> bool:
        """Return whether a finished replicate ran with other code; it makes room, if so.

        It keeps a row of its own, and what the sampler is told of a trial is of one code.
        """
        recorded = Path(spec.folder) / "spec.json"
        try:
            before = ReplicateSpec.model_validate_json(recorded.read_bytes())
        except (OSError, ValueError):
            return False
        if before.code == spec.code:
            return False
        archive(Path(spec.folder))
        self._watcher.note(
            f"trial {spec.trial} r{spec.replicate} {spec.scenario} ran with other code, and its "
            "trial has not ended: it is run again"
        )
        return True

    def _adopt(self, spec: ReplicateSpec, folder: Path) -> tuple[ReplicateSpec, Handle | None]:
        """Return the spec with its attempt, and the live replicate if there is one.

        Looking for a live one comes before looking at the disk: one that ends in between has
        written its last event by then.
        """
        current = spec.model_copy(update={"attempt": current_attempt(folder)})
        handle = self._find(current.run_id, folder) if folder.exists() else None
        return current, handle

    def _find(self, run_id: str, folder: Path) -> Handle | None:
        """Wait for a live supervisor that does not answer: another one would run beside it."""
        told = False
        while True:
            try:
                return self._swarms.find(run_id, folder)
            except NoAnswerError as error:
                if not told:
                    self._watcher.note(f"{error}; waiting for it")
                told = True
            time.sleep(self._poll_s)

    def _follow(self, spec: ReplicateSpec, handle: Handle | None) -> str:
        """Run a replicate, or wait for one that runs, and return why it ended."""
        adopted = handle is not None
        with self._interruption.held():
            if handle is None:
                spec = prepare(spec)
                try:
                    handle = self._swarms.start(spec)
                except SupervisorError as error:
                    return str(error)
            try:
                self._watcher.replicate_started(spec, adopted)
                return self._wait(spec, handle)
            finally:
                handle.release()

    def _wait(self, spec: ReplicateSpec, handle: Handle) -> str:
        outcome = None
        try:
            while outcome is None:
                outcome = handle.wait(self._poll_s)
                self._interruption.check()
                if outcome is None:
                    self._watcher.replicate_status(spec, handle)
        except BaseException as error:
            # Whatever happened here, peers must not outlive it; that may fail for the same cause.
            with suppress(Exception):
                handle.stop(str(error) or type(error).__name__)
                handle.wait(STOP_S)
            raise
        if outcome["state"] == "stopped":
            raise Interrupted(f"stopped from outside: {outcome['stop_reason']}")
        return str(outcome["stop_reason"])


def _check_plan(spec: ReplicateSpec, folder: Path) -> None:
    """Refuse to put replicates of different plans into one row: a scenario is a name for a file."""
    recorded = folder / "spec.json"
    if not recorded.exists():
        return
    try:
        before = ReplicateSpec.model_validate_json(recorded.read_bytes()).plan
    except ValueError:
        started = next(iter(read_events(folder / "events.jsonl")), {}).get("spec")
        if started is None:
            return  # nothing says under which
        before = ReplicateSpec.model_validate(started).plan
        write_atomically(recorded, json.dumps(started, indent=1) + "\n")
    if before != spec.plan:
        allowed = (
            f"what it was when {folder} was recorded: its faults are others now; put the file "
            "back, or begin a new run folder"
        )
        raise ConfigError([Problem("scenarios", spec.scenario, allowed)])


def prepare(spec: ReplicateSpec) -> ReplicateSpec:
    """Make the folder of a replicate ready for a run and return the spec of the new attempt.

    What an earlier attempt left is kept beside it, under a name with its number.
    """
    folder = Path(spec.folder)
    folder.mkdir(parents=True, exist_ok=True)
    archive(folder)
    spec = spec.model_copy(update={"attempt": current_attempt(folder)})
    write_atomically(folder / "spec.json", spec.model_dump_json(by_alias=True, indent=1) + "\n")
    return spec


def lost_attempts(folder: Path) -> int:
    """Return how many attempts at a replicate were lost to the infrastructure."""
    logs = [path for path in folder.glob("events*.jsonl") if "damaged" not in path.name]
    return sum(_lost(log) for log in logs)


def _lost(log: Path) -> bool:
    """Return whether the attempt of a log was lost; one that can't be read says nothing."""
    state = None
    with suppress(DamagedError, OSError):
        for event in read_events(log):
            if event["kind"] == "replicate_finished":
                state = event.get("state")
    return state == LOST


def _outcome(folder: Path) -> Event | None:
    """Return the outcome of a replicate whose log has no end, if it came to one."""
    log, found = folder / "events.jsonl", None
    for event in read_events(log) if log.exists() else ():
        if event["kind"] == "replicate_finished":
            return None
        if event["kind"] == "outcome":
            if not isinstance(event.get("state"), str):
                raise DamagedError(log, "it does not say how the replicate ended")
            found = event
    return found


def record_end(folder: Path, state: str, reason: str) -> Event:
    """End a log whose writer is gone; return its last event."""
    end = make_event("replicate_finished", state=state, stop_reason=reason)
    events = EventLog(folder / "events.jsonl")
    events.append(end)
    events.close()
    return end
