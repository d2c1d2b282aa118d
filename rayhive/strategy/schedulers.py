"""Learning-rate schedulers that advance with rounds.

In a swarm the weights move once per round, and all peers have to be at the same point of the
schedule. So every scheduler steps once per round, whatever ``interval`` and ``frequency`` it was
configured with.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence
from typing import Any

from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from rayhive.strategy.arguments import StrategyError

#: A frequency at which Lightning, which counts batches or epochs, never steps a scheduler.
NEVER = sys.maxsize


class RoundSchedule(LRScheduler):
    """All schedulers of an optimizer as one, which hivemind steps once per round.

    hivemind steps it until it has reached the peer's round: by one step in a usual round, and by
    several after the state of a peer that is further was downloaded.

    A downloaded state also holds learning rates, which have decayed already. They are dropped,
    because the steps that follow start from this peer's own rates.

    Args:
        optimizer: The scheduled optimizer.
        schedulers: The schedulers; any object with the methods that ``advance`` uses.
        advance: Steps one scheduler.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        schedulers: Sequence[Any],
        advance: Callable[[Any], None],
    ) -> None:
        # not super().__init__(): it would take a step
        self.optimizer = optimizer
        self.schedulers = list(schedulers)
        self._advance = advance
        self._step_count = 1
        self._rates: list[Any] = []
        optimizer.register_load_state_dict_pre_hook(self._keep_rates)
        optimizer.register_load_state_dict_post_hook(self._put_rates_back)

    def step(self, epoch: int | None = None) -> None:
        """Advance every scheduler by one round."""
        # torch would warn of a wrong order: a peer that catches up has not stepped its optimizer
        self.optimizer._opt_called = True  # type: ignore[attr-defined]
        for scheduler in self.schedulers:
            self._advance(scheduler)
        self._step_count += 1

    def restore(self, round_: int, groups: Sequence[dict[str, Any]]) -> None:
        """Continue at a round with the learning rates of a checkpoint's parameter groups."""
        self._step_count = round_ + 1
        for group, saved in zip(self.optimizer.param_groups, groups, strict=True):
            group["lr"] = saved["lr"]

    def get_last_lr(self) -> list[Any]:
        """Return the learning rate of each parameter group."""
        return [group["lr"] for group in self.optimizer.param_groups]

    def _keep_rates(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        self._rates = [group["lr"] for group in optimizer.param_groups]

    def _put_rates_back(self, optimizer: Optimizer) -> None:
        for group, rate in zip(optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate


class HiveMindScheduler:
    """Scheduler as Lightning and the module see it: its ``step`` does nothing.

    Args:
        optimizer: The swarm's optimizer.
        scheduler: The scheduler.
    """

    def __init__(self, optimizer: Any, scheduler: Any) -> None:
        self.optimizer = optimizer
        self.scheduler = scheduler

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the scheduler advances with rounds."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the scheduler."""
        return dict(self.scheduler.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of the scheduler."""
        self.scheduler.load_state_dict(state)

    def __getattr__(self, name: str) -> Any:
        if name == "scheduler":  # not set yet, during unpickling
            raise AttributeError(name)
        return getattr(self.scheduler, name)


def wrapped_config(optimizer: Any, scheduler: Any, config: LRSchedulerConfig) -> LRSchedulerConfig:
    """Return a configuration with which Lightning logs a scheduler but never steps it.

    Args:
        optimizer: The swarm's optimizer.
        scheduler: The scheduler.
        config: The configuration with which Lightning would step it, for its name and interval.
    """
    wrapped: Any = HiveMindScheduler(optimizer, scheduler)
    return dataclasses.replace(config, scheduler=wrapped, frequency=NEVER)


def refuse_plateau(schedulers: Sequence[Any]) -> None:
    """Refuse the one scheduler that needs a metric.

    Raises:
        StrategyError: A scheduler is ``ReduceLROnPlateau``.
    """
    if any(isinstance(scheduler, ReduceLROnPlateau) for scheduler in schedulers):
        allowed = (
            "a scheduler that needs no metric. The `ReduceLROnPlateau` scheduler is not supported "
            "with `HivemindStrategy`: peers measure different values, and their learning rates "
            "would differ"
        )
        raise StrategyError.about("scheduler", "ReduceLROnPlateau", allowed)


def unscheduled(group: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of a parameter group with the learning rate from before any scheduler."""
    clean = dict(group)
    if "initial_lr" in clean:
        clean["lr"] = clean.pop("initial_lr")
    return clean
