"""Execution of one replicate: keep it if it is finished on disk, adopt it if it runs, else run it.

A replicate that was lost to the infrastructure runs again as a further attempt. If every attempt is
lost the replicate stays lost, which says nothing about its configuration.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Generator, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeAlias

from rayhive.cluster.replicate.peer_table import Outcome, ReplicateStatus
from rayhive.crash_points import crash_point
from rayhive.errors import (
    ClusterError,
    ConfigError,
    DamagedError,
    NoAnswerError,
    Problem,
    SupervisorError,
)
from rayhive.events import ReplicateFinished, ReplicateStarted, read_events
from rayhive.files import write_atomically
from rayhive.spec import SwarmConfig
from rayhive.spec.replicate import ReplicateSpec
from rayhive.sweep import attempts
from rayhive.sweep.resumption import plan_problem
from rayhive.sweep.signals import Interrupted, Interruption
from rayhive.timeline import LOST

#: Interval at which a running replicate is polled [s].
POLL_S = 0.5
#: Time for a supervisor to end its peers and write its last event [s].
STOP_S = 30.0
#: Default number of further attempts at a replicate that was lost.
RETRIES = 2


class Handle(Protocol):
    """A running replicate on a cluster."""

    def wait(self, timeout: float) -> Outcome | None:
        """Return the outcome once it has ended, None while it runs."""

    def status(self) -> ReplicateStatus:
        """Return the phase and the state of each peer."""

    def stop(self, reason: str) -> None:
        """Request its end, which :meth:`wait` reports."""

    def release(self) -> None:
        """Release its resources on the cluster."""


class Swarms(Protocol):
    """Interface of a cluster for a sweep."""

    def check_room(self, swarm: SwarmConfig) -> Iterable[Problem]:
        """Return the reasons for which the swarm can never be placed."""

    def at_once(self, swarm: SwarmConfig, joining: int = 0) -> int:
        """Return how many replicates of a swarm can run at the same time, at least 1."""

    def check_kinds(
        self, needs: Mapping[str, Collection[str]], swarm: SwarmConfig
    ) -> Iterable[Problem]:
        """Return the kinds of faults that some node of the swarm cannot commit."""

    def find(self, run_id: str, folder: str | Path | None = None) -> Handle | None:
        """Return the live replicate of that name that writes to that folder, if any.

        Raises:
            NoAnswerError: It is alive but does not answer.
        """

    def start(self, spec: ReplicateSpec) -> Handle:
        """Start a replicate, or adopt the live one of the same name."""


class Watcher(Protocol):
    """Display of the progress of single replicates."""

    def replicate_started(self, spec: ReplicateSpec, adopted: bool) -> None:
        """Take note of a replicate that was started or adopted."""

    def replicate_status(self, spec: ReplicateSpec, handle: Handle) -> None:
        """Take note of a replicate that runs; called about every :data:`POLL_S` seconds."""

    def note(self, text: str) -> None:
        """Show a line."""


#: Course of a replicate, which pauses at every poll; it returns whether the replicate ran now.
Course: TypeAlias = Generator[None, None, bool]


@dataclass(frozen=True)
class ReplicateRunner:
    """Runs replicates to their end, one or several at the same time.

    Attributes:
        swarms: The cluster.
        watcher: Display of the progress.
        interruption: Ends the running replicate.
        poll_s: Interval at which it is polled [s].
        retries: Further attempts at a replicate that was lost.
        before: Called before a replicate is started, and not before one that runs is adopted.
    """

    swarms: Swarms
    watcher: Watcher
    interruption: Interruption
    poll_s: float = POLL_S
    retries: int = RETRIES
    before: Callable[[ReplicateSpec], None] | None = None

    def run(self, spec: ReplicateSpec, again: bool = False) -> bool:
        """Return once the replicate is finished on disk; see :meth:`course`."""
        course = self.course(spec, again)
        while True:
            try:
                next(course)
            except StopIteration as end:
                return bool(end.value)

    def course(self, spec: ReplicateSpec, again: bool = False) -> Course:
        """Run a replicate until it is finished on disk, with a pause at every poll.

        An error that is thrown in stops the replicate, and is raised after one more pause: until
        then the courses beside it can be stopped too.

        Args:
            spec: The replicate; its ``attempt`` is chosen here.
            again: Whether a replicate that was lost in every attempt gets the same number of
                further attempts.

        Returns:
            True if the replicate ran now, False if a finished one was kept.

        Raises:
            Interrupted: The sweep was interrupted; the replicate has been stopped.
            ConfigError: The recorded replicate has another fault plan.
        """
        folder = Path(spec.folder)
        ran = False
        bound = self.retries + (attempts.lost_attempts(folder) if again else 0)
        self.interruption.check()
        spec = spec.model_copy(update={"attempt": attempts.current_attempt(folder)})
        # The cluster is asked before the disk is read: a replicate that ends in between has written
        # its last event by then.
        handle = (yield from self._find(spec.run_id, folder)) if folder.exists() else None
        if handle is None:
            yield from self._wait_for_writer(spec, folder)
        end = None if handle is not None else self._finished(spec, folder)
        if end is not None or handle is not None:
            _check_plan(spec, folder)
        while True:
            if end is not None:
                if end.state != LOST or attempts.lost_attempts(folder) > bound:
                    return ran
                self.watcher.note(
                    f"{spec.title} r{spec.replicate} {spec.scenario} was lost "
                    f"({end.stop_reason}); it is tried again"
                )
            self.interruption.check()
            ran = True
            if handle is None and self.before is not None:
                self.before(spec)
            # The supervisor of an attempt that has ended may still live; it is not adopted.
            reason, handle = (yield from self._follow(spec, handle)), None
            yield from self._wait_for_writer(spec, folder)
            end = self._finished(spec, folder)
            if end is None and not attempts.is_stopped(folder):
                end = attempts.record_end(folder, LOST, reason)

    def _wait_for_writer(self, spec: ReplicateSpec, folder: Path) -> Generator[None, None, None]:
        """Wait while a supervisor that the cluster does not know writes the log of a replicate.

        Ray ends the processes of a node up to a minute after the death of its head. Until then
        another attempt would run beside the peers of this one.
        """
        if attempts.is_being_written(folder):
            self.watcher.note(
                f"the supervisor of trial {spec.trial} r{spec.replicate} {spec.scenario} still "
                "writes, and Ray does not know it; waiting for its end"
            )
        while attempts.is_being_written(folder):
            time.sleep(self.poll_s)
            yield

    def _finished(self, spec: ReplicateSpec, folder: Path) -> ReplicateFinished | None:
        """Return the last event of a finished replicate; set a damaged log aside."""
        try:
            found = attempts.finished_event(folder)
            outcome = attempts.unfinished_outcome(folder)
        except DamagedError as error:
            self.set_aside(spec, error)
            return None
        if outcome is None:
            return found
        return attempts.record_end(folder, outcome.state, outcome.stop_reason)

    def set_aside(self, spec: ReplicateSpec, error: DamagedError) -> None:
        """Rename a damaged file of a replicate so that it is not read, and report it."""
        new = attempts.set_aside(error.path)
        again = "; it is run again" if error.path.name == attempts.EVENTS else ""
        self.watcher.note(
            f"{spec.title} r{spec.replicate} {spec.scenario} is damaged: {error}; "
            f"kept as {new.name}{again}"
        )

    def of_other_code(self, spec: ReplicateSpec) -> bool:
        """Return whether a finished replicate ran with other code, and archive it if so.

        It keeps a row of its own, and the values that Optuna receives for a trial come from one
        version of the code.
        """
        try:
            if attempts.read_spec(Path(spec.folder)).code == spec.code:
                return False
        except (OSError, ValueError):
            return False
        attempts.archive(Path(spec.folder))
        why = "" if spec.baseline else ", and its trial has not ended"
        self.watcher.note(
            f"{spec.title} r{spec.replicate} {spec.scenario} ran with other code{why}: it is run "
            "again"
        )
        return True

    def _find(self, run_id: str, folder: Path) -> Generator[None, None, Handle | None]:
        """Find a live replicate, waiting for its supervisor as long as it does not answer.

        A second supervisor would otherwise run beside it.
        """
        noted = False
        while True:
            try:
                return self.swarms.find(run_id, folder)
            except NoAnswerError as error:
                if not noted:
                    self.watcher.note(f"{error}; waiting for it")
                noted = True
            time.sleep(self.poll_s)
            yield

    def _follow(self, spec: ReplicateSpec, handle: Handle | None) -> Generator[None, None, str]:
        """Run a replicate, or wait for one that runs, and return the reason of its end."""
        adopted = handle is not None
        with self.interruption.held():
            if handle is None:
                spec = prepare(spec)
                crash_point("replicate_prepared")
                try:
                    handle = self.swarms.start(spec)
                except SupervisorError as error:
                    return str(error)
                crash_point("supervisor_started")
            # An earlier driver may have died while it stopped the replicate.
            stopping = adopted and _stop_requested(handle)
            try:
                self.watcher.replicate_started(spec, adopted)
                reason = yield from self._wait(spec, handle, stopping)
                crash_point("replicate_ended")
                return reason
            finally:
                handle.release()
                crash_point("supervisor_released")

    def _wait(
        self, spec: ReplicateSpec, handle: Handle, stopping: bool
    ) -> Generator[None, None, str]:
        outcome = None
        try:
            while outcome is None:
                outcome = handle.wait(self.poll_s)
                self.interruption.check()
                if outcome is None:
                    crash_point("replicate_followed")
                    self.watcher.replicate_status(spec, handle)
                    yield
        except BaseException as error:
            # Peers must not outlive the driver's error. Stopping them may fail for the same cause.
            with suppress(Exception):
                handle.stop(str(error) or type(error).__name__)
            try:
                if not isinstance(error, GeneratorExit):
                    yield  # the others are told, too
            finally:
                with suppress(Exception):
                    handle.wait(STOP_S)
            raise
        if outcome.state == "stopped" and not stopping:
            raise Interrupted(f"stopped from outside: {outcome.stop_reason}")
        return outcome.stop_reason


def _stop_requested(handle: Handle) -> bool:
    """Return whether a replicate was asked to end before it is adopted."""
    with suppress(ClusterError):  # it does not answer
        return handle.status().stop_requested
    return False


def _check_plan(spec: ReplicateSpec, folder: Path) -> None:
    """Refuse a replicate whose recorded plan differs: one row must not mix two plans."""
    try:
        before = attempts.read_spec(folder).plan
    except FileNotFoundError:
        return
    except ValueError:
        first = next(iter(read_events(folder / attempts.EVENTS)), None)
        if not isinstance(first, ReplicateStarted):
            return  # the plan of the recorded run is unknown
        before = ReplicateSpec.model_validate(first.spec).plan
        write_atomically(folder / attempts.SPEC, json.dumps(first.spec, indent=1) + "\n")
    problem = plan_problem(spec.scenario, before, spec.plan, folder)
    if problem is not None:
        raise ConfigError(problem)


def prepare(spec: ReplicateSpec) -> ReplicateSpec:
    """Prepare the folder of a replicate for a run and return the spec of the new attempt.

    Files of an earlier attempt stay beside it, under a name with the number of the attempt.
    """
    folder = Path(spec.folder)
    folder.mkdir(parents=True, exist_ok=True)
    attempts.archive(folder)
    spec = spec.model_copy(update={"attempt": attempts.current_attempt(folder)})
    write_atomically(folder / attempts.SPEC, spec.model_dump_json(by_alias=True, indent=1) + "\n")
    return spec
