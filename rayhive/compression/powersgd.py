"""PowerSGD whose error feedback survives failed rounds (Vogels et al., arXiv 1905.13727)."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterable
from typing import Any

import torch
from hivemind.averaging.allreduce import AveragingMode
from hivemind.averaging.group_info import GroupInfo
from hivemind.averaging.load_balancing import load_balance_peers
from hivemind.averaging.matchmaking import MatchmakingException
from hivemind.optim.power_sgd_averager import AllReducePhases, PowerSGDGradientAverager
from hivemind.utils.asyncio import enter_asynchronously
from hivemind.utils.math import orthogonalize_

from rayhive.compression.accounting import compressed_tensors
from rayhive.config import DEFAULT_MIN_COMPRESSION_RATIO


class TransactionalPowerSGD(PowerSGDGradientAverager):
    """PowerSGD as hivemind runs it, except where a failure or another peer would hurt.

    * The first Q is drawn from a seed that all peers of a prefix share, normally distributed as
      in the paper. hivemind's peers each draw their own, and factors made with different Q do not
      add up to an average.
    * A round changes gradients, Q and error feedback at its end or not at all. hivemind adds the
      gradient to the feedback first: after a failure the retry would apply it twice.
    * Factors are computed in a thread, not in the event loop that serves the network.

    The tensors that are averaged are hivemind's, so that both kinds of peers can form a group.

    Args:
        parameters: As hivemind's.
        averager_rank: Rank of the factors.
        prefix: As hivemind's; it also seeds Q.
        min_compression_ratio: Least fraction saved for a matrix to be factorised.
        start: Start the averager's process at once.
        kwargs: As hivemind's.

    Raises:
        ConfigError: The rank is below 1 or the ratio negative.
    """

    def __init__(
        self,
        parameters: Iterable[torch.nn.Parameter],
        averager_rank: int,
        *,
        prefix: str,
        min_compression_ratio: float = DEFAULT_MIN_COMPRESSION_RATIO,
        start: bool,
        **kwargs: Any,
    ) -> None:
        parameters = tuple(parameters)
        shapes = [tuple(parameter.shape) for parameter in parameters]
        self.compressed = compressed_tensors(shapes, averager_rank, min_compression_ratio)
        with torch.random.fork_rng(devices=[]):  # hivemind draws a Q that is not used
            super().__init__(
                parameters,
                averager_rank,
                prefix=prefix,
                min_compression_ratio=min_compression_ratio,
                start=False,
                **kwargs,
            )
        seed = int.from_bytes(hashlib.sha256(prefix.encode()).digest()[:8], "big")
        generator = torch.Generator().manual_seed(seed)
        for q in self._qs:
            q.normal_(generator=generator)
        if start:
            self.run_in_background(await_ready=True)

    async def _aggregate_with_group(
        self, group_info: GroupInfo, min_vector_size: int, **kwargs: Any
    ) -> dict[Any, Any]:
        """Run one round in a group; on any failure nothing has changed.

        Raises:
            MatchmakingException: The round failed; the caller may try again.
        """
        try:
            members = [self.serializer.loads(item) for item in group_info.gathered]
            gathered = {
                peer: self.serializer.loads(data)
                for peer, (_, _, data) in zip(group_info.peer_ids, members, strict=True)
            }
            client = AveragingMode.CLIENT.value
            bandwidths = [0.0 if mode == client else speed for speed, mode, _ in members]
            loop = asyncio.get_running_loop()
            fractions = await loop.run_in_executor(
                None, load_balance_peers, self.total_size, bandwidths, min_vector_size
            )
            kwargs.update(peer_fractions=fractions)
            async with enter_asynchronously(self.get_tensors()) as gradients:
                await self._average(gradients, group_info, kwargs)
        except BaseException as error:
            raise MatchmakingException(f"PowerSGD round failed: {error!r}") from error
        return gathered

    async def _average(
        self, gradients: tuple[torch.Tensor, ...], group_info: GroupInfo, options: dict[str, Any]
    ) -> None:
        """Replace gradients by their average, compressed ones by their common approximation."""
        loop = asyncio.get_running_loop()
        phase_p, phase_q = (
            group_info.group_id + phase.name.encode()
            for phase in (AllReducePhases.PHASE_P, AllReducePhases.PHASE_Q)
        )
        large = [gradients[index] for index in self.compressed]
        rest = [g for i, g in enumerate(gradients) if i in self._uncompressed_gradients_indexes]

        matrices, ps = await loop.run_in_executor(None, self._project, large)
        await self._run_allreduce_inplace_(ps, group_info, phase_p, **options)
        qs = await loop.run_in_executor(None, _backproject, matrices, ps)
        averaged = [tensor.clone() for tensor in rest]
        await self._run_allreduce_inplace_(qs + averaged, group_info, phase_q, **options)
        approximations = await loop.run_in_executor(None, _multiply, ps, qs)
        # From here on nothing waits, so nothing can interrupt.
        for gradient, new in zip(rest, averaged, strict=True):
            gradient.copy_(new)
        for gradient, new, matrix, m in zip(large, approximations, matrices, self._ms, strict=True):
            gradient.copy_(new.reshape(gradient.shape))
            m.copy_(matrix.sub_(new).reshape(m.shape))
        for q, new in zip(self._qs, qs, strict=True):
            q.copy_(new)

    @torch.no_grad()
    def _project(
        self, gradients: list[torch.Tensor]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return each gradient with its feedback as a matrix (n, m), and its P (n, r)."""
        matrices = [
            (m.float() + gradient.float()).reshape(-1, q.shape[0])
            for gradient, m, q in zip(gradients, self._ms, self._qs, strict=True)
        ]
        return matrices, [matrix @ q for matrix, q in zip(matrices, self._qs, strict=True)]


@torch.no_grad()
def _multiply(ps: list[torch.Tensor], qs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the matrices (n, m) that the factors stand for."""
    return [p @ q.t() for p, q in zip(ps, qs, strict=True)]


@torch.no_grad()
def _backproject(matrices: list[torch.Tensor], ps: list[torch.Tensor]) -> list[torch.Tensor]:
    """Orthonormalise every P in place and return the Q (m, r) that goes with it."""
    for p in ps:
        orthogonalize_(p)
    return [matrix.t() @ p for matrix, p in zip(matrices, ps, strict=True)]
