"""Learning-rate schedulers of ``configure_optimizers``, made again for another optimizer."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from rayhive.workloads.base import SchedulerFn


def only_scheduler(configured: Any) -> Any:
    """Return the scheduler in a result of ``configure_optimizers``; None unless there is one."""
    found = list(_schedulers(configured))
    return found[0] if len(found) == 1 else None


def _schedulers(configured: Any) -> Iterator[Any]:
    if isinstance(configured, Mapping):
        found = configured.get("lr_scheduler")
        inner = found.get("scheduler") if isinstance(found, Mapping) else found
        yield from () if inner is None else (inner,)
    elif isinstance(configured, (tuple, list)):
        lists = len(configured) == 2 and isinstance(configured[1], (tuple, list))
        if lists:
            for each in configured[1]:
                yield each.get("scheduler") if isinstance(each, Mapping) else each
        else:
            for each in configured:
                yield from _schedulers(each)


def first_rates(scheduler: LRScheduler, steps: int) -> list[list[float]]:
    """Return the rates of all groups of parameters before and after each of some steps.

    Args:
        scheduler: A scheduler that has not stepped; it has afterwards.
        steps: Number of steps.
    """
    rates = [_rates(scheduler)]
    for _ in range(steps):
        scheduler.step()
        rates.append(_rates(scheduler))
    return rates


def _rates(scheduler: LRScheduler) -> list[float]:
    return [float(group["lr"]) for group in scheduler.optimizer.param_groups]


def remade(scheduler: LRScheduler) -> SchedulerFn:
    """Return a factory of schedulers that are equal to ``scheduler``, which has not stepped."""

    def make(optimizer: Optimizer) -> LRScheduler:
        groups = zip(optimizer.param_groups, scheduler.optimizer.param_groups, strict=False)
        for group, old in groups:
            # A scheduler sets the first rate, and keeps values of its own in the groups.
            group |= {k: v for k, v in old.items() if k not in ("params", "weight_decay")}
        return copy.deepcopy(scheduler, {id(scheduler.optimizer): optimizer})

    return make
