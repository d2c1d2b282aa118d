"""Learning-rate schedulers of ``configure_optimizers``, made again for another optimizer."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from rayhive.workloads.base import SchedulerFn


def scheduler_of(configured: Any) -> Any:
    """Return the only scheduler in a result of ``configure_optimizers``; None if there is none.

    Several schedulers are found by the strategy, which refuses them; here the first one counts.
    """
    if isinstance(configured, Mapping):
        return _inner(configured.get("lr_scheduler"))
    if isinstance(configured, (tuple, list)) and configured:
        first = configured[0]
        if isinstance(first, Mapping):
            return scheduler_of(first)
        if isinstance(first, (tuple, list)) and len(configured) == 2:
            return _inner(next(iter(configured[1]), None))
    return None


def _inner(found: Any) -> Any:
    return found.get("scheduler") if isinstance(found, Mapping) else found


def remade(scheduler: LRScheduler) -> SchedulerFn:
    """Return a factory of schedulers that are equal to ``scheduler``, which has not stepped."""

    def make(optimizer: Optimizer) -> LRScheduler:
        groups = zip(optimizer.param_groups, scheduler.optimizer.param_groups, strict=False)
        for group, old in groups:
            # A scheduler sets the first rate, and keeps values of its own in the groups.
            group |= {k: v for k, v in old.items() if k not in ("params", "weight_decay")}
        return copy.deepcopy(scheduler, {id(scheduler.optimizer): optimizer})

    return make
