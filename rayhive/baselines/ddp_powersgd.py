"""Baseline ``ddp-powersgd``: DDP with torch's PowerSGD communication hook."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

from rayhive.baselines.ddp import Ddp, Hook, MeasuredDDP, Rank

#: Rank of the factors, as in the main results of Vogels, Karimireddy and Jaggi, 2019, "PowerSGD".
RANK = 4
#: Share of the rounds before the compression begins, as torch's documentation advises.
DENSE_SHARE = 0.1
#: Fewest rounds before it: DDP rebuilds its buckets in the first one.
FEWEST = 2
#: Size of a bucket that holds every gradient [MiB].
ONE_BUCKET_MB = 1 << 20


class PowerSGDRank(Rank):
    """One process; it sends low-rank factors of the gradients.

    All gradients are in one bucket: over gloo the factors of several buckets would cross.
    """

    def hook(self) -> tuple[Hook, Any]:
        """Return torch's hook, and a state that begins after a tenth of the rounds."""
        rounds = self.spec.budget.rounds(self.round_size) or 0
        state = powerSGD_hook.PowerSGDState(
            None,
            matrix_approximation_rank=RANK,
            start_powerSGD_iter=max(FEWEST, round(DENSE_SHARE * rounds)),
        )
        return powerSGD_hook.powerSGD_hook, state

    def arguments(self) -> dict[str, Any]:
        """Return the size of a bucket."""
        return {"bucket_cap_mb": ONE_BUCKET_MB}

    def strategy(self) -> MeasuredDDP:
        """Return the strategy, with one bucket from the first round on."""
        dist._DEFAULT_FIRST_BUCKET_BYTES = ONE_BUCKET_MB << 20  # type: ignore[attr-defined]
        return super().strategy()

    def payload_fields(self, dense_bytes: int) -> dict[str, Any]:
        """Return nothing: the bytes change when the compression begins."""
        return {}


class DdpPowersgd(Ddp):
    """DDP with PowerSGD of rank 4, error feedback and warm start, torch's defaults otherwise.

    The first tenth of the rounds is dense, as torch advises; without a budget of samples, the
    first two.
    """

    about = "DDP with torch's PowerSGD hook of rank 4."
    member = PowerSGDRank
