"""Handle of the driver on a running replicate."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayActorError, RayError

from rayhive.cluster.calls import RETRY_EVERY
from rayhive.errors import ClusterError, NoAnswerError, RayhiveError
from rayhive.events import ReplicateFinished, of_kind, read_events
from rayhive.spec.replicate import ReplicateSpec

_ANSWER_TIMEOUT = 10.0
_POLL = 20.0


class ReplicateHandle:
    """A replicate whose supervisor lived when the handle was created.

    Args:
        spec: The replicate.
        actor: Its supervisor.
        broken: Returns a description of a failure of the whole cluster; None if there is none.
    """

    def __init__(
        self,
        spec: ReplicateSpec,
        actor: Any,
        broken: Callable[[], str | None] = lambda: None,
    ) -> None:
        self.spec = spec
        self._broken = broken
        self._actor = actor
        self._outcome: dict[str, str] | None = None
        self._reason: str | None = None

    @property
    def run_id(self) -> str:
        """Name of the supervisor."""
        return self.spec.run_id

    def wait(self, timeout: float | None = None) -> dict[str, str] | None:
        """Return the outcome, or None if the replicate still runs after ``timeout`` seconds.

        Returns:
            ``state`` and ``stop_reason`` of the ``replicate_finished`` event, which is on disk by
            then. If the supervisor is gone, the outcome is read from disk. If it died before it
            wrote that event, the state is ``lost``, and the log stays without an end.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while self._outcome is None:
            left = _POLL if deadline is None else min(_POLL, deadline - time.monotonic())
            try:
                self._outcome = ray.get(
                    self._actor.outcome.remote(max(0.0, left)), timeout=left + _ANSWER_TIMEOUT
                )
            except (GetTimeoutError, ActorUnavailableError) as error:
                # The supervisor is busy or out of reach; Ray reports one that died.
                if isinstance(error, ActorUnavailableError):
                    if self._reason is not None:  # the request to stop may not have arrived
                        self._actor.stop.remote(self._reason)
                    time.sleep(RETRY_EVERY if left > RETRY_EVERY else max(0.0, left))
            except RayActorError as error:
                reason = str(error).splitlines()[0]
                self._outcome = settle(Path(self.spec.folder), self._broken() or reason)
            except RayError:
                if self._broken() is None:
                    raise
            if self._outcome is None and (why := self._broken()) is not None:
                self._outcome = settle(Path(self.spec.folder), why)
            if self._outcome is None and deadline is not None and time.monotonic() >= deadline:
                return None
        return self._outcome

    def status(self) -> dict[str, Any]:
        """Return ``phase``, ``seconds`` and the status of each of the ``peers``.

        Raises:
            NoAnswerError: The supervisor does not answer.
            ClusterError: The supervisor is gone.
        """
        try:
            answer: dict[str, Any] = ray.get(self._actor.status.remote(), timeout=_ANSWER_TIMEOUT)
        except (GetTimeoutError, ActorUnavailableError) as error:
            raise NoAnswerError(f"{self.run_id} does not answer: {error}") from error
        except RayActorError as error:
            raise ClusterError(f"{self.run_id} is gone: {error}") from error
        return answer

    def stop(self, reason: str) -> None:
        """Ask for an early end and return at once; :meth:`wait` returns at the end.

        The supervisor ends the replicate within seconds, even if this process dies. A repeated
        call sends the first reason again, as Ray may deliver the calls in another order.
        """
        self._reason = self._reason or reason
        if self._outcome is None:
            self._actor.stop.remote(self._reason)

    def release(self) -> None:
        """Let the supervisor exit once its outcome is on disk. May be called again."""
        self._actor.release.remote()


def settle(folder: Path, reason: str) -> dict[str, str]:
    """Return the outcome of a replicate whose supervisor is gone.

    Args:
        folder: The replicate's folder.
        reason: Ray's report of the end of the supervisor.
    """
    with contextlib.suppress(OSError, RayhiveError):
        for end in of_kind(read_events(folder / "events.jsonl"), ReplicateFinished):
            return {"state": end.state, "stop_reason": str(end.stop_reason)}
    return {"state": "lost", "stop_reason": f"the supervisor died: {reason}"}
