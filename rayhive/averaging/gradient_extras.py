"""Extra tensors that are averaged in the rounds of gradients, such as batch norm's statistics.

Each peer computes its own between two rounds. They enter a round behind the gradients, in its last
all-reduce, as they are, so that a round has one group and parameters need not be averaged for them.
A peer weighs with its samples, as in the average of the gradients.
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from rayhive.averaging.payload_policy import GroupRound, PayloadPolicy


class GradientExtras:
    """Extra tensors of one peer, and their copies in memory that its processes share.

    Args:
        tensors: Floating-point tensors of the module, on any device.
        shared: The copies, on the host.

    Attributes:
        arrived: Whether the copies are averages that :meth:`take` has not used.
    """

    arrived = False

    def __init__(self, tensors: Sequence[torch.Tensor], shared: Sequence[torch.Tensor]) -> None:
        self._tensors, self._shared = tensors, shared
        self._sent: list[torch.Tensor] = []

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Shapes of the tensors."""
        return [tuple(tensor.shape) for tensor in self._tensors]

    @torch.no_grad()
    def load(self) -> None:
        """Copy the tensors for a round."""
        for tensor, shared in zip(self._tensors, self._shared, strict=True):
            shared.copy_(tensor)
        self._sent, self.arrived = [shared.clone() for shared in self._shared], False

    @torch.no_grad()
    def take(self) -> None:
        """Move the tensors by what the round changed, and at most to the averages.

        Without batches since :meth:`load` the result is the average. With a delay, a tensor keeps
        what these batches changed. The limit keeps a variance from becoming negative. A value that
        is not finite becomes the average.
        """
        for tensor, average, sent in zip(self._tensors, self._shared, self._sent, strict=True):
            now = tensor.to(average.device, average.dtype)
            moved = average + (now - sent)
            low, high = torch.minimum(now, average), torch.maximum(now, average)
            found = torch.clamp(moved, low, high)
            tensor.copy_(torch.where(found.isfinite(), found, average))
        self.arrived = False


class WithExtras:
    """Policy that averages extra tensors in the last all-reduce of another policy's round.

    Args:
        policy: Policy of the other tensors.
        extras: Number of the extra tensors, which are the last ones of the averager.
    """

    def __init__(self, policy: PayloadPolicy, extras: int) -> None:
        self._policy, self._extras = policy, extras

    def phases(self, gathered: Mapping[Any, Any]) -> tuple[str, ...]:
        """Return the phases of the policy."""
        return self._policy.phases(gathered)

    async def average(self, tensors: Sequence[torch.Tensor], round_: GroupRound) -> None:
        """Replace tensors by the averages of the group; on failure no extra tensor has changed."""
        first = len(tensors) - self._extras
        averaged = [each.clone() for each in tensors[first:]]
        last = self.phases(round_.gathered)[-1]

        def allreduce(
            phase: str,
            tensors: Sequence[torch.Tensor],
            owed: Sequence[torch.Tensor] | None = None,
            exact: int = 0,
        ) -> Awaitable[float]:
            if phase != last:
                return round_.allreduce(phase, tensors, owed, exact)
            if owed is not None:
                owed = [*owed, *map(torch.zeros_like, averaged)]
            return round_.allreduce(phase, [*tensors, *averaged], owed, exact + self._extras)

        await self._policy.average(tensors[:first], replace(round_, allreduce=allreduce))
        if not round_.auxiliary:
            for tensor, new in zip(tensors[first:], averaged, strict=True):
                tensor.copy_(new)

    def close(self) -> None:
        """Close the policy."""
        self._policy.close()
