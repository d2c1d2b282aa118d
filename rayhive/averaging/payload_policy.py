"""Payload policies: the tensors that the all-reduces of a round average.

An averager holds one policy. :class:`DensePayload` averages the tensors themselves,
:class:`rayhive.averaging.powersgd_payload.PowerSGDPayload` averages low-rank factors of them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from hivemind.compression import CompressionBase

from rayhive.averaging.allreduce_groups import DENSE

#: Weight of tensors that must not count. Non-zero, so that the weights of a group in which no
#: member counts do not sum to 0.
STALE_WEIGHT = 1e-9


class AllReduce(Protocol):
    """Averages tensors in place in one phase; returns the fraction of the averaging that happened.

    Args:
        phase: Name of the phase.
        tensors: The tensors.
        owed: Tensors of the same shapes to which the errors of this peer's encodings are added, as
            sums over samples (:mod:`rayhive.averaging.error_feedback`); None drops the errors.
        exact: Number of the last tensors, which no codec encodes.
        codec: Codec in place of that of the group; only in a plain group, see
            :class:`GroupRound`.
    """

    def __call__(
        self,
        phase: str,
        tensors: Sequence[torch.Tensor],
        owed: Sequence[torch.Tensor] | None = None,
        exact: int = 0,
        codec: CompressionBase | None = None,
    ) -> Awaitable[float]:
        """Run the all-reduce."""


@dataclass(frozen=True)
class GroupRound:
    """One round of a group, as a payload policy sees it.

    Attributes:
        allreduce: Runs one all-reduce of the round.
        gathered: Data that each peer of the group gathered, by peer.
        weight: Weight of this peer in the averages; 0 if its tensors are excluded.
        auxiliary: Whether this peer only reduces for others and keeps its tensors.
        step: The step that the round belongs to; its state says whether the result reached the
            trainer. None outside a step.
        plain: Whether the group has no codec, and the policy may choose one.
    """

    allreduce: AllReduce
    gathered: Mapping[Any, Any]
    weight: float = 1.0
    auxiliary: bool = False
    step: Future[Any] | None = None
    plain: bool = False


def counted(weight: float) -> float:
    """Return a weight of tensors; 0 if they must not count."""
    return weight if weight > STALE_WEIGHT else 0.0


def given_up(step: Future[Any] | None, current: Future[Any] | None) -> bool:
    """Return whether a committed round's step was given up before the trainer got its result.

    Args:
        step: The step of the round; None if there is none.
        current: The step under way, of which the round was an earlier attempt.
    """
    if step is None or step is current:
        return False
    return not step.done() or step.cancelled() or step.exception() is not None


class PayloadPolicy(Protocol):
    """Decides which tensors a round averages, and derives the averages of the originals."""

    def phases(self, gathered: Mapping[Any, Any]) -> tuple[str, ...]:
        """Return the names of a round's all-reduces, in order.

        Args:
            gathered: Data that each peer of the group gathered; equal gathered data give equal
                phases, so that all members agree.
        """

    async def prepare(
        self, tensors: Sequence[torch.Tensor], weight: float, step: Future[Any]
    ) -> None:
        """Compute what a round needs before its group is known; by default nothing.

        Args:
            tensors: As in :meth:`average`, and locked as there.
            weight: Weight of the step.
            step: The step; its round may not come, or have another weight.
        """
        return None

    async def average(self, tensors: Sequence[torch.Tensor], round_: GroupRound) -> None:
        """Replace tensors by the averages of the group.

        Args:
            tensors: The averaged tensors of the averager, locked for the length of the call.
            round_: The round.
        """

    def close(self) -> None:
        """Release threads and pipes, if any; called once in the trainer's process at shutdown."""
        return None


class DensePayload(PayloadPolicy):
    """Policy that averages the tensors themselves, in place.

    An attempt that fails half-way leaves the averages that had arrived by then. A retry averages
    them again, and its round is partial (:attr:`rayhive.averaging.steps.StepTrace.replaced`).
    """

    def phases(self, gathered: Mapping[Any, Any]) -> tuple[str, ...]:
        """Return the one phase of a dense round."""
        return (DENSE,)

    async def average(self, tensors: Sequence[torch.Tensor], round_: GroupRound) -> None:
        """Average the tensors in one all-reduce."""
        await round_.allreduce(DENSE, tensors)
