"""Base of the faults that a peer's training process executes itself.

Such a kind runs in two places. In the peer process :meth:`InTraining.act` changes gradients, state
or clock in the planned round; :mod:`rayhive.peer.fault_injection` calls it and reports the result
as a ``sabotaged`` event. In the supervisor, ``inject`` waits for that event and ``verify`` passes
the reported measurements to :meth:`InTraining.took_effect`.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeAlias

from pydantic import Field

from rayhive.errors import RayhiveError
from rayhive.events import FaultActed
from rayhive.faults.kind import FaultKind, Group, Proof, Record, Targets
from rayhive.faults.target import FaultTarget
from rayhive.spec import Model

if TYPE_CHECKING:
    import torch

Tensors: TypeAlias = "Sequence[torch.Tensor]"

#: Longest wait for a peer's report once the fault is due [s]; its round has to end first.
REPORT_S = 60.0
#: Longer than any replicate [s].
_EVER = 10 * 365 * 24 * 3600.0


class TrainingPeer(Protocol):
    """The training process of a peer, just before its gradients enter a round's all-reduce."""

    @property
    def gradients(self) -> Tensors:
        """Accumulated gradients of the round, one tensor a parameter; changed in place."""

    @property
    def scale(self) -> float:
        """Factor that makes the gradients means over samples; 0 without samples."""

    def skew_clock(self, seconds: float) -> dict[str, float]:
        """Set the offset of the peer's DHT clock.

        Returns:
            ``off_before_s`` and ``off_after_s``, measured [s].
        """


class RoundsArgs(Model):
    """Parameters of a fault in gradients.

    Attributes:
        rounds: Number of rounds, beginning with the planned one.
    """

    rounds: int = Field(default=1, ge=1)


def changes_gradients(kind: type[FaultKind]) -> bool:
    """Return whether faults of a kind change gradients; one does in a round of a peer."""
    return issubclass(kind.Args, RoundsArgs)


class InTraining(FaultKind):
    """A fault that a peer's training process executes itself."""

    group: ClassVar[Group] = "training"
    needs = ()
    in_training = True
    of_swarm = True
    #: Whether :meth:`act` sets the peer's clock, which has to be replaced before the peer forks.
    skews_clock: ClassVar[bool] = False

    _reports: Sequence[asyncio.Task[FaultActed | None]] = ()

    @abstractmethod
    def act(self, peer: TrainingPeer) -> Record | None:
        """Execute the fault in the peer's training process; called once in each of its rounds.

        Returns:
            Measurements for the ``sabotaged`` event, on which :meth:`took_effect` decides; None if
            the fault has to wait for the next round.
        """

    def observe(self, peer: TrainingPeer, round_: int) -> None:
        """Note the gradients of a round, before any fault changes them; called in every round."""

    def forget(self) -> None:
        """Forget the last gradients that were observed: they enter the next round, as they were."""
        return

    def serve(self, tensors: Tensors) -> Tensors | None:
        """Return what a joiner gets in place of the peer's state; None for the state itself."""
        return None

    @abstractmethod
    def took_effect(self, what: dict[str, Any]) -> bool:
        """Return whether the measurements that :meth:`act` returned show the fault."""

    @staticmethod
    def measured(gradients: Tensors, change: Callable[[Tensors], object]) -> dict[str, float]:
        """Change gradients in place and return the measurements of :func:`compare`."""
        before = [gradient.detach().clone() for gradient in gradients]
        change(gradients)
        return compare(before, gradients)

    @property
    def rounds(self) -> int:
        """Rounds in which the fault acts; one without the parameter."""
        return getattr(self.args, "rounds", 1)

    @property
    def patience_s(self) -> float:
        """No limit: the proof waits for the last of the rounds."""
        return _EVER

    async def setup(self, swarm: FaultTarget) -> None:
        """Begin to listen for reports; past events do not count."""

        def reports(count: int) -> dict[str, asyncio.Task[FaultActed | None]]:
            fault = self.planned.id
            return {
                peer: asyncio.ensure_future(
                    swarm.event(FaultActed, peer, _EVER, count=count, fault=fault)
                )
                for peer in self.planned.who
            }

        self._first, self._last = reports(1), reports(self.rounds)
        self._reports = [*self._first.values(), *self._last.values()]
        await asyncio.sleep(0)  # the tasks begin to listen

    async def inject(self, swarm: FaultTarget, targets: Targets) -> Record:
        """Wait until every peer has reported its first round.

        Raises:
            RayhiveError: A report did not come in time.
        """
        _, late = await asyncio.wait(self._first.values(), timeout=REPORT_S)
        silent = [peer for peer, report in self._first.items() if report in late]
        if silent:
            raise RayhiveError(f"no report from {', '.join(silent)} within {REPORT_S:.0f} s")
        events = [event for report in self._first.values() if (event := report.result())]
        self._seen = [event.what or {} for event in events]
        return {"sabotaged": [{"round": e.round, **(e.what or {})} for e in events]}

    async def verify(self, swarm: FaultTarget, targets: Targets) -> Proof:
        """Check the peers' measurements of the first and the last round."""
        events = await asyncio.gather(*self._last.values())
        last = [event.what or {} for event in events if event is not None]
        both = [*self._seen, *last]
        ok = len(both) == 2 * len(self.planned.who) and all(map(self.took_effect, both))
        return Proof(ok, {"sabotaged": last, "rounds": self.rounds})

    async def teardown(self, swarm: FaultTarget) -> None:
        """Stop listening."""
        for report in self._reports:
            report.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await report


def compare(before: Tensors, after: Tensors) -> dict[str, float]:
    """Compare tensors, as one vector, before and after a change; integer tensors are left out.

    Returns:
        ``norm_before``, ``norm_after``, and the ``cosine`` between the two; 0 for a zero vector.
    """
    pairs = [
        (a.double().flatten(), b.double().flatten())
        for a, b in zip(before, after, strict=True)
        if a.is_floating_point()
    ]
    norms = [math.sqrt(sum(float(pair[side] @ pair[side]) for pair in pairs)) for side in (0, 1)]
    product = norms[0] * norms[1]
    dot = sum(float(a @ b) for a, b in pairs)
    cosine = dot / product if product else 0.0
    return {"norm_before": norms[0], "norm_after": norms[1], "cosine": cosine}
