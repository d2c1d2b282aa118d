"""Learning-rate schedulers that advance with rounds.

In a swarm neither micro-batches nor passes over the data mean anything to the learning rate:
what moves the weights is a round, and all peers have to be at the same point of the schedule.
So a round is the unit of every scheduler, whatever ``interval`` and ``frequency`` it was
configured with.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from rayhive.errors import Problem
from rayhive.strategy.validation import StrategyError

#: A frequency at which Lightning, which counts batches or epochs, never steps a scheduler.
NEVER = sys.maxsize


class RoundSchedule(LRScheduler):
    """All schedulers of an optimizer, stepped together, once a round.

    It is what hivemind gets for a scheduler. hivemind steps it until it is level with the round
    that the peer is in, which is one step in a usual round and several after the state of a
    peer that is further was loaded.

    That state holds learning rates too. They are not taken: the steps to catch up start from
    this peer's own, and would otherwise be applied to rates that have decayed already.

    Args:
        optimizer: The optimizer that they schedule.
        schedulers: The schedulers; any object with the methods that ``advance`` uses.
        advance: Steps one of them.
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
        self._restoring = False
        self._rates: list[Any] = []
        optimizer.register_load_state_dict_pre_hook(self._keep_rates)
        optimizer.register_load_state_dict_post_hook(self._put_rates_back)

    def step(self, epoch: int | None = None) -> None:
        """Advance every scheduler by one round."""
        # A peer that catches up has not stepped itself; torch would warn about the order.
        self.optimizer._opt_called = True  # type: ignore[attr-defined]
        for scheduler in self.schedulers:
            self._advance(scheduler)
        self._step_count += 1

    def level_with(self, round_: int) -> None:
        """Count the schedulers as being where they are in round ``round_``."""
        self._step_count = round_ + 1

    def get_last_lr(self) -> list[Any]:
        """Return the learning rate of each parameter group."""
        return [group["lr"] for group in self.optimizer.param_groups]

    @contextlib.contextmanager
    def restoring(self) -> Iterator[None]:
        """Take learning rates from what is loaded in the body: it is this peer's own past."""
        self._restoring = True
        try:
            yield
        finally:
            self._restoring = False

    def _keep_rates(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        self._rates = [group["lr"] for group in optimizer.param_groups]

    def _put_rates_back(self, optimizer: Optimizer) -> None:
        if not self._restoring:
            for group, rate in zip(optimizer.param_groups, self._rates, strict=True):
                group["lr"] = rate


class HiveMindScheduler:
    """What Lightning and the module see of a scheduler: everything but its step.

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
        """Put the scheduler where it was."""
        self.scheduler.load_state_dict(state)

    def __getattr__(self, name: str) -> Any:
        if name == "scheduler":  # not set yet, as while unpickling
            raise AttributeError(name)
        return getattr(self.scheduler, name)


def wrapped_config(optimizer: Any, scheduler: Any, config: Any = None) -> LRSchedulerConfig:
    """Return the configuration with which Lightning shows a scheduler but never steps it.

    Args:
        optimizer: The swarm's optimizer.
        scheduler: The scheduler.
        config: What Lightning made of the module's own, for its name and interval.
    """
    wrapped: Any = HiveMindScheduler(optimizer, scheduler)
    if config is None:
        return LRSchedulerConfig(wrapped, interval="step", frequency=NEVER)
    return LRSchedulerConfig(
        wrapped, name=config.name, interval=config.interval, frequency=NEVER, strict=config.strict
    )


def refuse_plateau(schedulers: Sequence[Any]) -> None:
    """Refuse the one scheduler that waits for a metric.

    Raises:
        StrategyError: One of them is ``ReduceLROnPlateau``.
    """
    for scheduler in schedulers:
        if isinstance(scheduler, ReduceLROnPlateau):
            raise StrategyError(
                Problem(
                    "scheduler",
                    "ReduceLROnPlateau",
                    "a scheduler that needs no metric. The `ReduceLROnPlateau` scheduler is not "
                    "supported with `HivemindStrategy`: peers measure different values, and "
                    "their learning rates would part",
                )
            )


def unscheduled(group: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of a parameter group as it was before any scheduler touched it."""
    clean = dict(group)
    if "initial_lr" in clean:
        clean["lr"] = clean.pop("initial_lr")
    return clean
