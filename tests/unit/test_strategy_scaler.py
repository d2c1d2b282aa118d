"""The scaler of 16-bit training fits the way in which gradients are accumulated."""

from __future__ import annotations

from typing import Any

import hivemind
import pytest
import torch

from rayhive.strategy.arguments import StrategyError
from rayhive.strategy.gradients import BatchScaler, RoundScaler, swarm_scaler


def scaler(**options: Any) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1, **options)


def test_the_scale_goes_on_where_it_was() -> None:
    plain = scaler()
    plain.scale(torch.ones(1))
    for reuse, kind in ((False, BatchScaler), (True, RoundScaler)):
        made = swarm_scaler(plain, reuse)
        assert type(made) is kind
        assert isinstance(made, hivemind.GradScaler)
        assert made.state_dict() == plain.state_dict()
        assert swarm_scaler(made, reuse) is made
    assert swarm_scaler(None, True) is None
    assert not swarm_scaler(scaler(enabled=False), True).is_enabled()


def test_a_users_own_scaler_is_used_only_where_it_can_unscale_rounds() -> None:
    class Own(torch.amp.GradScaler):
        pass

    own = Own("cpu")
    assert swarm_scaler(own, False) is own
    with pytest.raises(StrategyError, match="reuse_grad_buffers"):
        swarm_scaler(own, True)


def test_a_batch_is_unscaled_before_it_is_counted() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    made = swarm_scaler(scaler(), False)
    made.scale(parameter.sum()).backward()
    made.unscale_(optimizer)
    made.step(optimizer)
    made.update()
    assert parameter.tolist() == [0.0, 0.0]
    assert made.get_scale() == 16.0
    parameter.grad = torch.full((2,), torch.inf)
    made.unscale_(optimizer)
    made.step(optimizer)
    made.update()
    assert parameter.tolist() == [0.0, 0.0]  # an overflow is left out
    assert made.get_scale() == 8.0
