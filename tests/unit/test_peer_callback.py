"""Evaluations of a peer during its training."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from rayhive.peer.callback import PeerTraining

UNTRAINED = SimpleNamespace(view=SimpleNamespace(own=SimpleNamespace(untrained=True)))
TRAINED = SimpleNamespace(view=SimpleNamespace(own=SimpleNamespace(untrained=False)))


class Monitor:
    """Observer that notes the evaluations."""

    def __init__(self) -> None:
        self.evaluations: list[dict[str, float]] = []

    def seconds(self) -> float:
        return 1.0

    def evaluates_at_end(self, *_: Any, **__: Any) -> bool:
        return True

    def after_evaluation(self, round_: int, values: dict[str, float], **_: Any) -> None:
        self.evaluations.append(values)

    def end(self, *_: Any) -> None:
        pass


@pytest.mark.parametrize(("tracker", "times"), [(UNTRAINED, 0), (TRAINED, 1)])
def test_parameters_that_the_run_has_not_trained_are_not_evaluated(
    tracker: Any, times: int
) -> None:
    optimizer = SimpleNamespace(tracker=tracker, settle=lambda: None)
    trainer: Any = SimpleNamespace(strategy=SimpleNamespace(optimizer=optimizer))
    workload: Any = SimpleNamespace(evaluate=lambda *_: {"loss": 2.0})
    monitor: Any = Monitor()
    training = PeerTraining(SimpleNamespace(), workload, monitor)  # type: ignore[arg-type]
    training.on_train_end(trainer, SimpleNamespace(device="cpu"))  # type: ignore[arg-type]
    assert monitor.evaluations == times * [{"loss": 2.0}]
