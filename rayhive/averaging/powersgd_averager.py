"""Averager of gradients whose payload policy is PowerSGD."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from hivemind.compression import CompressionInfo, TensorRole

from rayhive.averaging.gradient_averager import RayhiveGradientAverager
from rayhive.averaging.powersgd_payload import PowerSGDOptions, PowerSGDPayload
from rayhive.compression.powersgd.shapes import DEFAULT_MIN_COMPRESSION_RATIO


class RayhivePowerSGDAverager(RayhiveGradientAverager):
    """Averager of gradients through low-rank factors.

    Its arguments are those of hivemind's ``PowerSGDGradientAverager``, and the further options of
    :class:`PowerSGDOptions`.

    Args:
        parameters: Parameters whose gradients are averaged.
        averager_rank: Rank of the factors.
        prefix: As hivemind's; it also seeds Q.
        min_compression_ratio: See :class:`PowerSGDOptions`, as the next four.
        num_iters_per_step: Power iterations of a round.
        start_compressing_after_num_steps: Rounds before the first with factors.
        orthogonalisation: ``gram_schmidt`` or ``qr``.
        device: Device that multiplies the matrices.
        kwargs: As those of :class:`RayhiveGradientAverager`.

    Raises:
        ConfigError: An option is out of range, or the device does not exist.
    """

    wire_name = "PowerSGDGradientAverager"
    payload: PowerSGDPayload

    def __init__(
        self,
        parameters: Iterable[torch.nn.Parameter],
        averager_rank: int,
        *,
        prefix: str,
        min_compression_ratio: float = DEFAULT_MIN_COMPRESSION_RATIO,
        num_iters_per_step: int = 1,
        start_compressing_after_num_steps: int = 0,
        orthogonalisation: str = "gram_schmidt",
        device: torch.device | str | None = None,
        **kwargs: Any,
    ) -> None:
        options = PowerSGDOptions(
            averager_rank,
            min_compression_ratio,
            num_iters_per_step,
            start_compressing_after_num_steps,
            orthogonalisation,
            device,
        )
        parameters = tuple(parameters)
        where = options.device_for(parameters)
        policy = partial(PowerSGDPayload, options=options, seed=prefix, device=where)
        super().__init__(parameters, prefix=prefix, payload=policy, **kwargs)

    def get_current_state(self) -> tuple[Any, list[torch.Tensor], list[CompressionInfo]]:
        """Return the state that a joining peer needs to factorise like the group: every Q."""
        with self.lock_averaged_tensors:
            metadata, qs = self.payload.snapshot()
        infos = [
            CompressionInfo.from_tensor(q, key=f"buffer_q_{index}", role=TensorRole.GRADIENT)
            for index, q in enumerate(qs)
        ]
        return {"group_bits": self.get_group_bits(), **metadata}, qs, infos

    def load_state_from_peers(self, wait: bool = True, timeout: float | None = None) -> bool:
        """Take over the Q of a peer; the error feedback of this peer stays.

        Returns:
            Whether a peer had Q that fit.
        """
        loaded = super().load_state_from_peers(wait, timeout)
        if loaded is None:
            return False
        with self.lock_averaged_tensors:
            return self.payload.restore(*loaded)
