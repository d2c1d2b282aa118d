"""Fragments of the parameters, of which each round averages one.

Streaming DiLoCo (Douillard et al., 2025, arXiv:2501.18512, section 2.2) averages fragments of the
parameters at different times, so that the most bytes at a time fall with the number of fragments.
All peers split alike, by sizes, and find the fragment of a round by its number.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import torch

from rayhive.averaging.matchmaking import round_in
from rayhive.averaging.payload_policy import GroupRound, PayloadPolicy
from rayhive.compression.fragments import split


class FragmentedPayload(PayloadPolicy):
    """Policy that averages one fragment in a round, with a policy of its own.

    The other tensors stay as they are.

    Args:
        tensors: All averaged tensors.
        fragments: Number of fragments.
        policy: Makes the policy of the tensors of one fragment.
    """

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        *,
        fragments: int,
        policy: Callable[[Sequence[torch.Tensor]], PayloadPolicy],
    ) -> None:
        self._members = split([tensor.numel() for tensor in tensors], fragments)
        self._policies = [policy([tensors[i] for i in each]) for each in self._members]

    def phases(self, gathered: Mapping[Any, Any]) -> tuple[str, ...]:
        """Return the phases of the fragment's policy."""
        return self._policies[self._fragment(gathered)].phases(gathered)

    async def average(self, tensors: Sequence[torch.Tensor], round_: GroupRound) -> None:
        """Replace the tensors of the round's fragment by their averages."""
        fragment = self._fragment(round_.gathered)
        await self.undo_given_up(round_.step)
        chosen = [tensors[index] for index in self._members[fragment]]
        await self._policies[fragment].average(chosen, round_)

    async def undo_given_up(self, current: Future[Any] | None = None) -> None:
        """Undo the last round if its step was given up before the trainer got its result."""
        for policy in self._policies:
            undo = getattr(policy, "undo_given_up", None)
            if undo is not None:
                await undo(current)

    def _fragment(self, gathered: Mapping[Any, Any]) -> int:
        rounds = [number for item in gathered.values() if (number := round_in(item)) is not None]
        return max(rounds, default=0) % len(self._policies)

    def close(self) -> None:
        """Release what the policies hold."""
        for policy in self._policies:
            policy.close()
