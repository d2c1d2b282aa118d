"""Rounds of PowerSGD against plain averaging and against the paper's algorithms.

Algorithms 1 and 2 of Vogels, Karimireddy and Jaggi, arXiv 1905.13727, are written out here in
NumPy and float64, for all workers at once, with nothing of rayhive's in them.
"""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
import torch

from tests.unit.powersgd_fakes import InMemory, attempt, give, gradients_of, peers

Array = np.ndarray


def orthogonalise(matrix: Array) -> Array:
    """The Gram-Schmidt process on the columns."""
    done: list[Array] = []
    for column in matrix.T:
        rest = column - sum((direction * (direction @ column) for direction in done), 0.0)
        done.append(rest / np.sqrt(rest @ rest))
    return np.stack(done, axis=1)


def algorithm_1(updates: list[Array], q: Array, iterations: int = 1) -> tuple[Array, Array]:
    """Compress and aggregate: power iterations on the mean, from the last Q."""
    for _ in range(iterations):
        p = orthogonalise(np.mean([update @ q for update in updates], axis=0))
        q = np.mean([update.T @ p for update in updates], axis=0)
    return p, q


class Workers:
    """Algorithm 2 without momentum: every worker's memory, and the Q that they share."""

    def __init__(self, q: Array, count: int, shape: tuple[int, int]) -> None:
        self.q, self.errors = q, [np.zeros(shape) for _ in range(count)]

    def update(self, gradients: list[Array], iterations: int = 1) -> Array:
        updates = [g + error for g, error in zip(gradients, self.errors, strict=True)]
        p, self.q = algorithm_1(updates, self.q, iterations)
        decompressed = p @ self.q.T
        self.errors = [update - decompressed for update in updates]
        return decompressed


def one_round(group: list[InMemory], gradients: list[list[torch.Tensor]], **how: Any) -> None:
    for averager, new in zip(group, gradients, strict=True):
        give(averager, new)
    assert all(asyncio.run(attempt(group, **how)).succeeded)


@pytest.mark.parametrize("method", ["gram_schmidt", "qr"])
@pytest.mark.parametrize(("rank", "iterations"), [(2, 1), (3, 1), (4, 2), (2, 3)])
def test_rounds_follow_algorithms_1_and_2(rank: int, iterations: int, method: str) -> None:
    """Six rounds of three peers, two matrices of one shape and one convolution among others."""
    shapes = [(24, 18), (18,), (24, 18), (10, 4, 3, 3)]
    large, dims = (0, 2, 3), ((24, 18), (24, 18), (10, 36))
    group = peers(
        3,
        shapes,
        averager_rank=rank,
        min_compression_ratio=0.0,
        num_iters_per_step=iterations,
        orthogonalisation=method,
    )
    oracles = [
        Workers(q.double().numpy().copy(), len(group), shape)
        for q, shape in zip(group[0]._qs, dims, strict=True)
    ]
    random = np.random.default_rng(rank)
    for _ in range(6):
        gradients = [[random.standard_normal(shape) for shape in shapes] for _ in group]
        one_round(group, [[torch.tensor(g, dtype=torch.float32) for g in own] for own in gradients])
        for at, (index, oracle) in enumerate(zip(large, oracles, strict=True)):
            seen = [own[index].reshape(dims[at]) for own in gradients]
            expected = torch.tensor(oracle.update(seen, iterations))
            for worker, averager in enumerate(group):
                applied = gradients_of(averager)[index].double().reshape(dims[at])
                torch.testing.assert_close(applied, expected, rtol=1e-3, atol=1e-3)
                owed = averager._ms[at].double().reshape(dims[at])
                error = torch.tensor(oracle.errors[worker])
                torch.testing.assert_close(owed, error, rtol=1e-3, atol=1e-3)
                new_q = averager._qs[at].double()
                torch.testing.assert_close(new_q, torch.tensor(oracle.q), rtol=1e-3, atol=1e-3)
        vectors = [torch.tensor(own[1]) for own in gradients]
        torch.testing.assert_close(
            gradients_of(group[0])[1].double(), torch.stack(vectors).mean(0), rtol=1e-5, atol=1e-6
        )


@pytest.mark.parametrize("method", ["gram_schmidt", "qr"])
def test_with_enough_rank_a_round_is_plain_averaging(method: str) -> None:
    """The mean of two peers' gradients, of rank 8 each, has rank 16: at 16 nothing is lost."""
    group = peers(
        2, [(40, 40)], averager_rank=16, min_compression_ratio=0.0, orthogonalisation=method
    )
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        gradients = [
            torch.randn(40, 8, generator=generator) @ torch.randn(8, 40, generator=generator)
            for _ in group
        ]
        one_round(group, [[gradient] for gradient in gradients])
        mean = torch.stack(gradients).mean(0)
        for averager in group:
            error = (gradients_of(averager)[0] - mean).norm() / mean.norm()
            assert error < 1e-4
            # what a peer is owed is its distance from the mean; together, nothing
        owed = torch.stack([averager._ms[0] for averager in group]).mean(0)
        assert owed.norm() / mean.norm() < 1e-4


def test_a_rank_below_that_of_the_mean_loses_something() -> None:
    """Else the test above would pass of itself."""
    group = peers(2, [(40, 40)], averager_rank=8, min_compression_ratio=0.0)
    generator = torch.Generator().manual_seed(0)
    gradients = [torch.randn(40, 40, generator=generator) for _ in group]
    one_round(group, [[gradient] for gradient in gradients])
    mean = torch.stack(gradients).mean(0)
    assert (gradients_of(group[0])[0] - mean).norm() / mean.norm() > 0.3


@pytest.mark.parametrize("count", [2, 3])
def test_200_steps_on_a_quadratic_reach_the_dense_solution(count: int) -> None:
    """Every peer has its own target; only their mean, which no peer knows, is the minimum."""
    shape, steps, rate = (12, 16), 200, 0.1
    generator = torch.Generator().manual_seed(count)
    targets = [torch.randn(shape, generator=generator) for _ in range(count)]
    scale = 0.5 + torch.rand(shape, generator=generator)  # curvatures between 0.5 and 1.5
    group = peers(count, [shape], averager_rank=2, min_compression_ratio=0.0)
    weights = torch.zeros(shape)
    dense = torch.zeros(shape)
    for _ in range(steps):
        one_round(group, [[scale * (weights - target)] for target in targets])
        weights = weights - rate * gradients_of(group[0])[0]
        dense = dense - rate * scale * (dense - torch.stack(targets).mean(0))
    solution = torch.stack(targets).mean(0)
    assert (dense - solution).norm() / solution.norm() < 0.01
    assert (weights - solution).norm() / solution.norm() < 0.01
