"""Contract of a baseline, and of one peer's part in its training."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from lightning.pytorch import Trainer
from lightning.pytorch.strategies import Strategy

from rayhive.spec.replicate import PeerSpec

#: Reasons to stop, the most important one last: where members differ, it counts.
REASONS = ("stop", "seconds", "target", "diverged")


class Member(ABC):
    """One peer's part in the training of a baseline, inside the peer's process.

    The calls come in this order: :meth:`listen`, :meth:`connect`, :meth:`strategy`, then those of
    the training, and :meth:`close`.

    Args:
        spec: The peer.
        batch_size: Samples in one of its micro-batches.

    Attributes:
        batches_per_round: Micro-batches of this peer between two optimizer steps.
        round_size: Samples of all members together in a round.
        in_step: Whether members need each other in every round, and so stop in the same one.
        schedules_rounds: Whether its strategy steps the scheduler of the learning rate.
        stopping: Returns whether the peer is asked to stop.
    """

    batches_per_round: int = 1
    round_size: int
    in_step: bool = True
    schedules_rounds: bool = False

    def __init__(self, spec: PeerSpec, batch_size: int) -> None:
        self.spec, self.batch_size = spec, batch_size
        self.stopping: Callable[[], bool] = lambda: False

    @abstractmethod
    def listen(self, known: Sequence[str]) -> list[str]:
        """Prepare for the other members.

        Args:
            known: Addresses of the members that listen already; empty for the first one.

        Returns:
            Addresses at which the others find this group.
        """

    def connect(self) -> None:  # noqa: B027  (most have nothing to connect)
        """Wait until all members are connected."""

    @abstractmethod
    def strategy(self) -> Strategy | str:
        """Return the strategy of the Lightning trainer."""

    def rounds(self, trainer: Trainer) -> int:
        """Return the number of optimizer steps so far."""
        return trainer.global_step

    def training_began(self) -> None:  # noqa: B027  (only collectives are measured)
        """Take note that the next round begins now."""

    def backward_ended(self) -> None:  # noqa: B027  (only collectives are measured)
        """Take note of the end of a backward pass."""

    @abstractmethod
    def round_fields(self) -> dict[str, Any]:
        """Return the fields of the ``round`` event that only this member can know."""

    def loaded_state(self) -> dict[str, Any] | None:
        """Return the fields of a ``state_loaded`` event since the last call; None without one."""
        return None

    def payload_fields(self, dense_bytes: int) -> dict[str, Any]:
        """Return the predictions for ``peer_ready``.

        Args:
            dense_bytes: Uncompressed gradients of one peer [B].
        """
        return {}

    def agree(self, reason: str | None) -> str | None:
        """Return the reason for which all members stop after this round; None to go on.

        Args:
            reason: Reason of this member to stop; one of :data:`REASONS`.
        """
        return reason

    def meet(self) -> None:  # noqa: B027  (most do not need each other)
        """Wait until all members have evaluated: the wait is no training time of the fast ones."""

    def lost_others(self, error: BaseException) -> bool:
        """Return whether an error says that another member is gone."""
        return False

    def close(self) -> None:  # noqa: B027  (most have nothing to close)
        """Release connections."""


class Baseline(ABC):
    """Another way to train the workload of a study.

    Attributes:
        about: Summary in one sentence.
        member: Class of a peer's part.
        restarts: Whether torch's elastic agent runs the training in a process of its own, and
            starts it again after a failure.
    """

    about: ClassVar[str]
    member: ClassVar[type[Member]]
    restarts: ClassVar[bool] = False

    def trains(self, spec: PeerSpec) -> bool:
        """Return whether a peer trains; the others only hold their node and link."""
        return not spec.joins

    def share(self, spec: PeerSpec) -> tuple[int, int]:
        """Return the index of a peer's share of the data, and the number of shares."""
        return spec.data_index, spec.peers


def batches_per_round(target: int, batch_size: int, members: int) -> int:
    """Return the micro-batches of each of some equal members that make up a round.

    Args:
        target: Samples of a round at least.
        batch_size: Samples in a micro-batch.
        members: Number of members.
    """
    return -(-target // (batch_size * members))
