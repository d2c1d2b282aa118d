"""Baseline ``ddp-fp16``: DDP with torch's half-precision communication hook."""

from __future__ import annotations

from typing import Any

from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from rayhive.baselines.ddp import Ddp, Hook, Rank


class HalfRank(Rank):
    """One process; it sends gradients as 16-bit floats."""

    def hook(self) -> tuple[Hook, Any]:
        """Return torch's hook."""
        return default_hooks.fp16_compress_hook, None

    def payload_fields(self, dense_bytes: int) -> dict[str, Any]:
        """Return half of the bytes."""
        return super().payload_fields(dense_bytes // 2)


class DdpFp16(Ddp):
    """DDP whose gradients are rounded to 16 bits before the all-reduce."""

    about = "DDP with torch's hook that sends gradients in half precision."
    member = HalfRank
