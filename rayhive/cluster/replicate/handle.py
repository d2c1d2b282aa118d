"""The driver's end of a running replicate."""

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
from rayhive.events import read_events
from rayhive.spec.replicate import ReplicateSpec

_ANSWER_TIMEOUT = 10.0
_POLL = 20.0


class ReplicateHandle:
    """A replicate whose supervisor lives, or did when this was made.

    Args:
        spec: The replicate.
        actor: Its supervisor.
        broken: Says what is wrong with the cluster as a whole, if something is.
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
            ``state`` and ``stop_reason``, as in the ``replicate_finished`` event, which is on
            disk by then. If the supervisor is gone the outcome is read from there; if it died
            before it wrote one, the state is ``lost`` and the events have no end.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while self._outcome is None:
            left = _POLL if deadline is None else min(_POLL, deadline - time.monotonic())
            try:
                self._outcome = ray.get(
                    self._actor.outcome.remote(max(0.0, left)), timeout=left + _ANSWER_TIMEOUT
                )
            except (GetTimeoutError, ActorUnavailableError) as error:
                # It is busy or out of reach; a supervisor that died is noticed by Ray.
                if isinstance(error, ActorUnavailableError):
                    if self._reason is not None:  # the request to stop may not have arrived
                        self._actor.stop.remote(self._reason)
                    time.sleep(RETRY_EVERY if left > RETRY_EVERY else max(0.0, left))
            except RayActorError as error:
                said = str(error).splitlines()[0]
                self._outcome = settle(Path(self.spec.folder), self._broken() or said)
            except RayError:
                if self._broken() is None:
                    raise
            if self._outcome is None and (why := self._broken()) is not None:
                self._outcome = settle(Path(self.spec.folder), why)
            if self._outcome is None and deadline is not None and time.monotonic() >= deadline:
                return None
        return self._outcome

    def status(self) -> dict[str, Any]:
        """Return ``phase``, ``seconds`` and for each of the ``peers`` what it is doing.

        Raises:
            NoAnswerError: The supervisor does not answer.
            ClusterError: It is gone.
        """
        try:
            answer: dict[str, Any] = ray.get(self._actor.status.remote(), timeout=_ANSWER_TIMEOUT)
        except (GetTimeoutError, ActorUnavailableError) as error:
            raise NoAnswerError(f"{self.run_id} does not answer: {error}") from error
        except RayActorError as error:
            raise ClusterError(f"{self.run_id} is gone: {error}") from error
        return answer

    def stop(self, reason: str) -> None:
        """Ask for an early end and return at once; :meth:`wait` tells when it is over.

        The supervisor ends the replicate within seconds, also if this process dies meanwhile.
        Asked again, it repeats the first reason: Ray may deliver the calls in another order.
        """
        self._reason = self._reason or reason
        if self._outcome is None:
            self._actor.stop.remote(self._reason)

    def release(self) -> None:
        """Let the supervisor go: at once if its outcome is on disk, else as soon as it is.

        May be called again.
        """
        self._actor.release.remote()


def settle(folder: Path, reason: str) -> dict[str, str]:
    """Return the outcome of a replicate whose supervisor is gone.

    Args:
        folder: The replicate's folder.
        reason: What Ray says of the supervisor.
    """
    with contextlib.suppress(OSError, KeyError, RayhiveError):
        for event in read_events(folder / "events.jsonl"):
            if event["kind"] == "replicate_finished":
                return {key: str(event[key]) for key in ("state", "stop_reason")}
    return {"state": "lost", "stop_reason": f"the supervisor died: {reason}"}
