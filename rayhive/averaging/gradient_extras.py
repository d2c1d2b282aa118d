"""Extra tensors that are averaged in the rounds of gradients, such as batch norm's statistics.

Each peer computes its own between two rounds. They enter a round behind the gradients, in its last
all-reduce, as they are, so that a round has one group and parameters need not be averaged for them.
A peer weighs with its samples, as in the average of the gradients.
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import torch
from hivemind.compression import CompressionBase

from rayhive.averaging.payload_policy import GroupRound, PayloadPolicy
from rayhive.averaging.policy_thread import PolicyThread

#: Largest magnitude of an element that is averaged: its sums over samples stay finite.
LARGEST = 1e30


def averageable(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is of floating point, and an average of such tensors is finite.

    Masks of -inf are not.
    """
    if not tensor.is_floating_point():
        return False
    return not tensor.numel() or bool(tensor.detach().abs().max() <= LARGEST)


class GradientExtras:
    """Extra tensors of one peer, and their copies in memory that its processes share.

    Args:
        tensors: Floating-point tensors of the module, on any device.

    Attributes:
        shared: The copies, on the host, in float32.
        delayed: Whether batches may come between :meth:`load` and :meth:`take`.
        arrived: Whether the copies are averages that :meth:`take` has not used.
    """

    delayed = arrived = False

    @torch.no_grad()
    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = tensors
        copies = (tensor.detach().to("cpu", torch.float32, copy=True) for tensor in tensors)
        self.shared = [each.contiguous().share_memory_() for each in copies]  # type: ignore[no-untyped-call]
        self._sent: list[torch.Tensor] = []

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Shapes of the tensors."""
        return [tuple(tensor.shape) for tensor in self._tensors]

    @torch.no_grad()
    def load(self) -> None:
        """Copy the tensors for a round; the last average stands in for one that is not finite."""
        self.arrived = False
        for tensor, shared in zip(self._tensors, self.shared, strict=True):
            if averageable(tensor):
                shared.copy_(tensor)
        if self.delayed:
            self._sent = [shared.clone() for shared in self.shared]

    @torch.no_grad()
    def take(self) -> None:
        """Set the tensors to the averages.

        With a delay, batches may have changed a tensor since :meth:`load`. It then moves by the
        difference between the average and the value that was sent, and at most to the average. The
        limit keeps a variance from becoming negative. A value that is not finite becomes the
        average.
        """
        self.arrived = False
        for at, (tensor, average) in enumerate(zip(self._tensors, self.shared, strict=True)):
            if not self.delayed:
                tensor.copy_(average)
                continue
            now = tensor.to(average.device, average.dtype)
            moved = average + (now - self._sent[at])
            found = torch.clamp(moved, torch.minimum(now, average), torch.maximum(now, average))
            tensor.copy_(torch.where(found.isfinite(), found, average))


class WithExtras(PayloadPolicy):
    """Policy that averages extra tensors in the last all-reduce of another policy's round.

    Args:
        policy: Policy of the other tensors.
        extras: The extra tensors, which are the last ones of the averager.
    """

    def __init__(self, policy: PayloadPolicy, extras: Sequence[torch.Tensor]) -> None:
        self._policy, self._extras = policy, len(extras)
        self._thread = PolicyThread("extras", sum(each.numel() for each in extras))

    def phases(self, gathered: Mapping[Any, Any]) -> tuple[str, ...]:
        """Return the phases of the policy."""
        return self._policy.phases(gathered)

    async def prepare(
        self, tensors: Sequence[torch.Tensor], weight: float, step: Future[Any]
    ) -> None:
        """Let the policy prepare a round."""
        await self._policy.prepare(tensors[: len(tensors) - self._extras], weight, step)

    async def average(self, tensors: Sequence[torch.Tensor], round_: GroupRound) -> None:
        """Replace tensors by the averages of the group; on failure no extra tensor has changed."""
        first = len(tensors) - self._extras
        averaged = await self._thread.run(_clones, tensors[first:])
        last = self.phases(round_.gathered)[-1]

        def allreduce(
            phase: str,
            tensors: Sequence[torch.Tensor],
            owed: Sequence[torch.Tensor] | None = None,
            exact: int = 0,
            codec: CompressionBase | None = None,
        ) -> Awaitable[float]:
            if phase != last:
                return round_.allreduce(phase, tensors, owed, exact, codec)
            if owed is not None:
                owed = [*owed, *map(torch.zeros_like, averaged)]
            return round_.allreduce(phase, [*tensors, *averaged], owed, exact + self._extras, codec)

        await self._policy.average(tensors[:first], replace(round_, allreduce=allreduce))
        if not round_.auxiliary:
            await self._thread.run(_copy, tensors[first:], averaged, final=True)

    def close(self) -> None:
        """Close the policy."""
        self._policy.close()


def _clones(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.clone() for tensor in tensors]


def _copy(tensors: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    for tensor, value in zip(tensors, values, strict=True):
        tensor.copy_(value)
