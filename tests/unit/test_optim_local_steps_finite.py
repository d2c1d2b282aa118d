"""Local steps: one batch that is not finite costs its own progress, and no later one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rayhive.averaging.optimizer_statistics import statistics
from rayhive.optim.local_rule import LocalStepsRule
from rayhive.optim.local_steps import LocalSteps
from tests.unit.test_optim_local_steps import Averager

ROUNDS = 4


class Peer:
    """A peer with two parameters and Adam, whose group refuses what is not finite."""

    def __init__(
        self,
        delayed: bool,
        fragments: int = 1,
        mixing: float | None = None,
        inner_state: Any = "keep",
    ) -> None:
        self.parameters = [torch.nn.Parameter(torch.full((3 - n,), 10.0)) for n in range(2)]
        rule = LocalStepsRule(4, 1.0, 0.0, inner_state, fragments=fragments, mixing=mixing)
        self.averager: Any = Averager()
        inner = torch.optim.Adam(self.parameters, lr=0.1)
        self.local = LocalSteps(rule, inner, self.parameters, self.averager, delayed)
        self.outer = [parameter.detach().clone() for parameter in self.parameters]
        self.refused: list[bool] = []

    def batches(self, count: int, value: float = 1.0) -> None:
        for _ in range(count):
            for parameter in self.parameters:
                parameter.grad = torch.full_like(parameter, value)
            self.local.step(8)

    def round(self, number: int, alone: bool) -> None:
        """Average with other peers, or alone: then a round with refused progress is skipped."""
        self.local.take(number)
        sent = self.averager.sent
        finite = all(bool(torch.isfinite(each).all()) for each in sent)
        self.refused.append(not finite)
        if self.local.delayed:
            self.batches(1)
        self.local.end_round(skipped=alone and not finite)
        if finite:
            self.outer = [a - b for a, b in zip(self.outer, sent, strict=True)]
        self.local.adopt(self.outer)


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("delayed", [False, True])
@pytest.mark.parametrize("options", [{}, {"fragments": 2}, {"fragments": 2, "mixing": 0.5}])
def test_a_batch_that_is_not_finite_costs_one_round(
    alone: bool, delayed: bool, options: dict[str, Any]
) -> None:
    peer = Peer(delayed, **options)
    peer.batches(2)
    peer.batches(1, torch.nan)
    for number in range(1, ROUNDS + 1):
        peer.round(number, alone)
        assert all(bool(torch.isfinite(each).all()) for each in peer.parameters)
        peer.batches(2)
    assert peer.refused == [True] + [False] * (ROUNDS - 1)
    assert all(bool((each < 10).all()) for each in peer.outer), "it goes on to learn"


def test_averaged_statistics_stay_the_tensors_that_are_averaged() -> None:
    peer = Peer(delayed=False, inner_state="average")
    peer.batches(1)
    averaged = list(statistics(peer.local.inner))
    peer.batches(1, torch.nan)
    peer.round(1, alone=False)
    peer.batches(1)
    now = list(statistics(peer.local.inner))
    assert all(a is b for a, b in zip(now, averaged, strict=True))
    assert all(bool(torch.isfinite(each).all()) for each in now)
