"""The driver's side of a running replicate: wait, stop, release."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, cast

import ray
from ray import exceptions

from rayhive.cluster.actors import RETRY_EVERY
from rayhive.cluster.replicate.peer_table import Outcome, ReplicateStatus, State
from rayhive.errors import ClusterError, NoAnswerError, RayhiveError
from rayhive.events import ReplicateFinished, of_kind, read_events
from rayhive.spec.replicate import ReplicateSpec

_ANSWER_TIMEOUT, _RELEASE_TIMEOUT = 10.0, 2.0
_POLL = 20.0
#: Errors of Ray for an actor that may live.
NO_ANSWER = (exceptions.GetTimeoutError, exceptions.ActorUnavailableError)
_LEFT = "its supervisor has left it"


class ReplicateHandle:
    """A replicate whose supervisor lived when the handle was created.

    Args:
        spec: The replicate.
        actor: Its supervisor.
        broken: Returns a description of a failure of the whole cluster; None if there is none.

    Attributes:
        run_id: Name of the replicate.
    """

    def __init__(
        self, spec: ReplicateSpec, actor: Any, broken: Callable[[], str | None] = lambda: None
    ) -> None:
        self.spec, self.run_id = spec, spec.run_id
        self._broken = broken
        self._actor = actor
        self._outcome: Outcome | None = None
        self._reason: str | None = None

    def wait(self, timeout: float) -> Outcome | None:
        """Return the outcome, or None if the replicate still runs after ``timeout`` seconds.

        Returns:
            The outcome in the ``replicate_finished`` event, which is on disk by then. If the
            supervisor is gone, the outcome is read from disk. If it died before it wrote that
            event, the state is ``lost``, and the log stays without an end.
        """
        deadline = time.monotonic() + timeout
        while self._outcome is None:
            left, gone = max(0.0, min(_POLL, deadline - time.monotonic())), None
            try:
                known, self._outcome = ray.get(
                    self._actor.outcome.remote(self.run_id, left), timeout=left + _ANSWER_TIMEOUT
                )
                gone = None if known else _LEFT
            except exceptions.GetTimeoutError:
                pass  # the supervisor is busy; Ray reports one that died
            except exceptions.ActorUnavailableError:
                if self._reason is not None:  # the request to stop may not have arrived
                    self._actor.stop.remote(self.run_id, self._reason)
                time.sleep(min(RETRY_EVERY, left))
            except exceptions.RayActorError as error:
                gone = str(error).splitlines()[0]
            except exceptions.RayError:
                if self._broken() is None:
                    raise
            if self._outcome is None and (why := self._broken() or gone):
                self._outcome = settle(Path(self.spec.folder), why)
            if self._outcome is None and time.monotonic() >= deadline:
                return None
        return self._outcome

    def status(self) -> ReplicateStatus:
        """Return phase, times and peers.

        Raises:
            NoAnswerError: The supervisor does not answer.
            ClusterError: The supervisor is gone.
        """
        try:
            status = self._actor.status.remote(self.run_id)
            answer: ReplicateStatus | None = ray.get(status, timeout=_ANSWER_TIMEOUT)
        except NO_ANSWER as error:
            raise NoAnswerError(f"{self.run_id} does not answer: {error}") from error
        except exceptions.RayActorError as error:
            raise ClusterError(f"{self.run_id} is gone: {error}") from error
        if answer is None:
            raise ClusterError(f"{self.run_id} is gone: {_LEFT}")
        return answer

    def stop(self, reason: str) -> None:
        """Ask for an early end and return at once; :meth:`wait` returns at the end.

        The supervisor ends the replicate within seconds, even if this process dies. A repeated
        call sends the first reason again, as Ray may deliver the calls in another order.
        """
        self._reason = self._reason or reason
        if self._outcome is None:
            self._actor.stop.remote(self.run_id, self._reason)

    def release(self) -> None:
        """Let the supervisor forget the replicate once its outcome is on disk.

        May be called again. Ray may deliver calls in another order, so it waits for the answer: a
        replicate that begins now finds the supervisor idle.
        """
        with contextlib.suppress(exceptions.RayError):
            ray.get(self._actor.release.remote(self.run_id), timeout=_RELEASE_TIMEOUT)


def still_running(handles: Iterable[ReplicateHandle], timeout: float) -> list[ReplicateHandle]:
    """Return the replicates that have not ended after ``timeout`` seconds in all."""
    deadline = time.monotonic() + timeout
    return [each for each in handles if each.wait(max(0.0, deadline - time.monotonic())) is None]


def settle(folder: Path, reason: str) -> Outcome:
    """Return the outcome of a replicate whose supervisor is gone.

    Args:
        folder: The replicate's folder.
        reason: Ray's report of the end of the supervisor.
    """
    with contextlib.suppress(OSError, RayhiveError):
        for end in of_kind(read_events(folder / "events.jsonl"), ReplicateFinished):
            return Outcome(cast(State, end.state), str(end.stop_reason))
    return Outcome("lost", f"the supervisor died: {reason}")
