"""PowerSGD's factors, computed by the process that made them, for another one.

The device is the CPU here: differences of a GPU are in ``tests/gpu``.
"""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from rayhive.compression.powersgd import gpu_worker
from rayhive.compression.powersgd.factors import Factors
from rayhive.compression.powersgd.gpu_worker import NoFactors, ServedFactors
from rayhive.compression.powersgd.kernels import gram_schmidt

SHAPES = [(20, 30), (20, 30), (12, 3, 3, 3), (16, 20)]
OPTIONS: dict[str, Any] = {
    "seed": 1,
    "orthogonalise": gram_schmidt,
    "device": torch.device("cpu"),
}


@pytest.fixture
def gradients() -> list[torch.Tensor]:
    return [torch.zeros(shape).share_memory_() for shape in SHAPES]  # type: ignore[no-untyped-call]


@pytest.fixture
def served(gradients: list[torch.Tensor]) -> Iterator[ServedFactors]:
    made = ServedFactors(gradients, 2, **OPTIONS)
    yield made
    made.close()


def play(factors: Factors, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Play rounds of unequal weights: a NaN, one taken back, one with weight 0; return all."""
    seen = []
    for seed in range(7):
        generator = torch.Generator().manual_seed(seed)
        for gradient in gradients:
            gradient.copy_(torch.randn(gradient.shape, generator=generator))
        if seed == 2:
            gradients[1][3, 4] = torch.nan
        ps = factors.begin(gradients, weight=(3, 1, 2, 4, 1, 0, 2)[seed])
        qs = factors.backproject(ps)
        ps = factors.project(qs)
        qs = factors.backproject(ps)
        seen += [factor.clone() for factor in (*ps, *qs)]
        for q in qs:
            q.add_(0.1)  # others' gradients are in the average
        factors.commit(gradients, ps, qs)
        if seed == 4:
            factors.undo()
        seen += [gradient.clone() for gradient in gradients]
    return [*seen, *factors.error_feedback, *factors.qs]


def play_elsewhere(factors: Factors, gradients: Any, answer: Any) -> None:
    answer.put([tensor.numpy() for tensor in play(factors, gradients)])


@pytest.mark.parametrize("forked", [False, True])
def test_served_factors_equal_computed_ones(
    forked: bool, served: ServedFactors, gradients: list[torch.Tensor]
) -> None:
    own = [torch.zeros(shape) for shape in SHAPES]
    expected = play(Factors(own, 2, **OPTIONS), own)
    if forked:
        context = multiprocessing.get_context("fork")
        answer = context.Queue()
        process = context.Process(target=play_elsewhere, args=(served, gradients, answer))
        process.start()
        found = [torch.from_numpy(array) for array in answer.get(timeout=60)]
        process.join(10)
        assert process.exitcode == 0
    else:
        found = play(served, gradients)
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
    # What the other process changed is here, too: the joiner's Q, and what is owed.
    last = [*served.error_feedback, *served.qs]
    for one, other in zip(last, expected[-2 * len(SHAPES) :], strict=True):
        assert torch.equal(one, other)


def test_a_failure_is_raised_and_changes_nothing(
    served: ServedFactors, gradients: list[torch.Tensor]
) -> None:
    play(served, gradients)
    owed, qs = served.error_feedback, [q.clone() for q in served.qs]
    lost = gradients.pop()
    with pytest.raises(NoFactors, match="begin: IndexError"):
        served.begin(gradients)
    gradients.append(lost)
    for one, other in zip([*served.error_feedback, *served.qs], [*owed, *qs], strict=True):
        assert torch.equal(one, other)


def test_closed_factors_do_not_answer(served: ServedFactors, gradients: list[torch.Tensor]) -> None:
    assert "powersgd" in [thread.name for thread in threading.enumerate()]
    served.begin(gradients)
    served.close()
    assert "powersgd" not in [thread.name for thread in threading.enumerate()]
    with pytest.raises(NoFactors, match="does not answer"):
        served.begin(gradients)
    served.close()  # twice is once


def test_a_process_that_does_not_answer_is_given_up(
    monkeypatch: pytest.MonkeyPatch, gradients: list[torch.Tensor]
) -> None:
    busy = threading.Event()

    class Slow(list[torch.Tensor]):
        def __getitem__(self, at: Any) -> Any:
            busy.wait(30)
            return super().__getitem__(at)

    monkeypatch.setattr(gpu_worker, "PATIENCE_S", 0.2)
    monkeypatch.setattr(gpu_worker, "GOODBYE_S", 0.2)
    served = ServedFactors(Slow(gradients), 2, **OPTIONS)
    with pytest.raises(NoFactors, match="begin took"):
        served.begin([])
    busy.set()  # its late answer is not that of the next request
    with pytest.raises(NoFactors, match="does not answer"):
        served.undo()
