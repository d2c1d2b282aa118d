"""Schedulers advance with rounds only, whatever their kind."""

from __future__ import annotations

import pickle
import warnings
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    CosineAnnealingWarmRestarts,
    ExponentialLR,
    LinearLR,
    LRScheduler,
    ReduceLROnPlateau,
    SequentialLR,
)

from rayhive.strategy.arguments import StrategyError
from rayhive.strategy.schedulers import (
    NEVER,
    HiveMindScheduler,
    RoundSchedule,
    refuse_plateau,
    unscheduled,
    wrapped_config,
)


def sgd() -> Optimizer:
    return SGD([torch.nn.Parameter(torch.ones(2))], lr=1.0)


def schedule(optimizer: Optimizer, *schedulers: Any) -> RoundSchedule:
    return RoundSchedule(optimizer, schedulers, lambda scheduler: scheduler.step())


def hivemind_reaches(round_: int, made: RoundSchedule) -> None:
    """Step as hivemind does when the peer comes to a round."""
    while made.state_dict()["_step_count"] <= round_:
        made.step()


def make_sequence(optimizer: Optimizer) -> Any:
    parts: list[LRScheduler] = [ExponentialLR(optimizer, 1.0), ExponentialLR(optimizer, 0.5)]
    return SequentialLR(optimizer, parts, milestones=[2])


def make_chain(optimizer: Optimizer) -> Any:
    return ChainedScheduler([ExponentialLR(optimizer, 0.5), ExponentialLR(optimizer, 0.5)])


@pytest.mark.parametrize(
    ("make", "rates"),
    [
        (lambda o: ExponentialLR(o, 0.5), [1, 0.5, 0.25, 0.125]),
        (lambda o: CosineAnnealingWarmRestarts(o, 2), [1, 0.5, 1, 0.5]),
        (make_sequence, [1, 1, 1, 0.5]),
        (make_chain, [1, 0.25, 0.0625, 0.015625]),
        (lambda o: LinearLR(o, 0.25, total_iters=3), [0.25, 0.5, 0.75, 1]),
    ],
)
def test_every_kind_takes_one_step_a_round(make: Any, rates: list[float]) -> None:
    optimizer = sgd()
    made = schedule(optimizer, make(optimizer))
    assert isinstance(made, LRScheduler)
    assert made.optimizer is optimizer
    for round_, rate in enumerate(rates):
        hivemind_reaches(round_, made)
        hivemind_reaches(round_, made)
        assert made.get_last_lr() == pytest.approx([rate])


def test_several_schedulers_step_together() -> None:
    optimizer = sgd()
    made = schedule(optimizer, ExponentialLR(optimizer, 0.5), ExponentialLR(optimizer, 0.1))
    hivemind_reaches(2, made)
    assert made.get_last_lr() == pytest.approx([0.05**2])


def test_catching_up_does_not_decay_twice() -> None:
    """The state of a peer in round five holds a rate that has decayed five times already."""
    ahead, behind = sgd(), sgd()
    theirs, ours = (schedule(o, ExponentialLR(o, 0.5)) for o in (ahead, behind))
    hivemind_reaches(5, theirs)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch would complain about the order
        behind.load_state_dict(ahead.state_dict())
        hivemind_reaches(5, ours)
    assert ours.get_last_lr() == theirs.get_last_lr() == pytest.approx([0.5**5])


def test_a_checkpoint_brings_its_rates() -> None:
    before, after = sgd(), sgd()
    saved, restored = (schedule(o, ExponentialLR(o, 0.5)) for o in (before, after))
    hivemind_reaches(5, saved)
    after.load_state_dict(before.state_dict())
    restored.restore(5, before.param_groups)
    hivemind_reaches(5, restored)
    assert restored.get_last_lr() == pytest.approx([0.5**5])
    hivemind_reaches(6, restored)
    assert restored.get_last_lr() == pytest.approx([0.5**6])


def test_lightning_sees_all_of_a_scheduler_but_its_step() -> None:
    optimizer = sgd()
    scheduler = ExponentialLR(optimizer, 0.5)
    shown = HiveMindScheduler(optimizer=optimizer, scheduler=scheduler)
    shown.step()
    shown.step(3)
    assert shown.last_epoch == 0
    assert shown.get_last_lr() == [1.0]
    optimizer.step()
    scheduler.step()
    state = shown.state_dict()
    assert state["last_epoch"] == shown.last_epoch == 1
    other = HiveMindScheduler(optimizer, ExponentialLR(optimizer, 0.5))
    other.load_state_dict(state)
    assert other.last_epoch == 1
    assert pickle.loads(pickle.dumps(shown)).last_epoch == 1
    with pytest.raises(AttributeError):
        shown.no_such_thing  # noqa: B018


def test_lightning_never_steps_a_scheduler() -> None:
    optimizer = sgd()
    scheduler = ExponentialLR(optimizer, 0.5)
    own = LRSchedulerConfig(scheduler, name="rate", interval="step", frequency=3)
    config = wrapped_config(optimizer, scheduler, own)
    assert (config.name, config.interval) == ("rate", "step")
    assert all(count % config.frequency for count in range(1, 1000))
    assert config.frequency == NEVER
    assert config.scheduler.state_dict() == scheduler.state_dict()


def test_a_plateau_is_refused() -> None:
    optimizer = sgd()
    refuse_plateau([ExponentialLR(optimizer, 0.5)])
    with pytest.raises(StrategyError, match="ReduceLROnPlateau"):
        refuse_plateau([ReduceLROnPlateau(optimizer)])


def test_a_group_is_freed_of_its_scheduler() -> None:
    optimizer = sgd()
    LinearLR(optimizer, 0.25)
    group = optimizer.param_groups[0]
    assert group["lr"] == 0.25
    assert unscheduled(group)["lr"] == 1.0
    assert "initial_lr" not in unscheduled(group)
    assert "initial_lr" in group  # a copy was freed
