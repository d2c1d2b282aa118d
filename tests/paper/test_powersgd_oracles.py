"""Rounds of PowerSGD against plain averaging and against the paper's algorithms.

Algorithms 1 and 2 of Vogels, Karimireddy and Jaggi, arXiv 1905.13727, are written out here in
NumPy and float64, for all workers at once, with nothing of rayhive's in them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
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


def algorithm_1(
    updates: list[Array], q: Array, weights: Array, iterations: int = 1
) -> tuple[Array, Array, list[Array]]:
    """Compress and aggregate: power iterations on the mean, from the last Q.

    Returns:
        P, the mean Q, and the Q of every worker before the mean.
    """
    shares = weights / weights.sum()
    for _ in range(iterations):
        p = orthogonalise(np.tensordot(shares, [update @ q for update in updates], 1))
        own = [update.T @ p for update in updates]
        q = np.tensordot(shares, own, 1)
    return p, q, own


class Workers:
    """Algorithm 2 without momentum: every worker's memory, and the Q that they share.

    Line 8: a worker's error is its update less what its own compressed update stands for. The
    paper's workers have equal batches; here the memory is a sum over samples.
    """

    def __init__(self, q: Array, count: int, shape: tuple[int, int]) -> None:
        self.q, self.sums = q, [np.zeros(shape) for _ in range(count)]

    def update(self, gradients: list[Array], weights: Array, iterations: int = 1) -> Array:
        pairs = zip(gradients, self.sums, weights, strict=True)
        updates = [g + total / samples for g, total, samples in pairs]
        p, self.q, own = algorithm_1(updates, self.q, weights, iterations)
        rows = zip(updates, own, weights, strict=True)
        self.sums = [samples * (update - p @ q.T) for update, q, samples in rows]
        return p @ self.q.T


def one_round(
    group: Sequence[InMemory], gradients: Sequence[Sequence[torch.Tensor]], **how: Any
) -> None:
    for averager, new in zip(group, gradients, strict=True):
        give(averager, new)
    assert all(asyncio.run(attempt(group, **how)).succeeded)


@pytest.mark.parametrize("method", ["gram_schmidt", "qr"])
@pytest.mark.parametrize(("rank", "iterations"), [(1, 1), (2, 1), (3, 1), (4, 2), (2, 3)])
@pytest.mark.parametrize("uneven", [False, True])
def test_rounds_follow_algorithms_1_and_2(
    uneven: bool, rank: int, iterations: int, method: str
) -> None:
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
        for q, shape in zip(group[0].payload.factors.qs, dims, strict=True)
    ]
    random = np.random.default_rng(rank)
    for _ in range(6):
        gradients = [[random.standard_normal(shape) for shape in shapes] for _ in group]
        samples = random.integers(1, 33, len(group)) if uneven else np.full(len(group), 16)
        loaded = [[torch.tensor(g, dtype=torch.float32) for g in own] for own in gradients]
        one_round(group, loaded, weights=samples.tolist())
        for at, (index, oracle) in enumerate(zip(large, oracles, strict=True)):
            seen = [own[index].reshape(dims[at]) for own in gradients]
            expected = torch.tensor(oracle.update(seen, samples, iterations))
            for worker, averager in enumerate(group):
                applied = gradients_of(averager)[index].double().reshape(dims[at])
                torch.testing.assert_close(applied, expected, rtol=1e-3, atol=1e-3)
                owed = averager.payload.factors.error_feedback[at].double().reshape(dims[at])
                error = torch.tensor(oracle.sums[worker] / samples[worker])
                torch.testing.assert_close(owed, error, rtol=1e-3, atol=1e-3)
                new_q = averager.payload.factors.qs[at].double()
                torch.testing.assert_close(new_q, torch.tensor(oracle.q), rtol=1e-3, atol=1e-3)
        vectors = [torch.tensor(own[1]) for own in gradients]
        mean = torch.tensordot(torch.tensor(samples / samples.sum()), torch.stack(vectors), 1)
        torch.testing.assert_close(gradients_of(group[0])[1].double(), mean, rtol=1e-5, atol=1e-6)


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
            assert averager.payload.factors.error_feedback[0].norm() / mean.norm() < 1e-4, (
                "its own factors miss nothing"
            )


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


def test_with_enough_rank_uneven_rounds_of_a_changing_swarm_are_plain_averaging() -> None:
    """Weights change in every round, a peer dies and another one joins: nothing is left behind.

    A peer whose feedback held the difference between its gradient and the group's would be off by
    more in every round, and by all of it when a peer is gone.
    """
    # With rank 16, rounding that the factors miss would turn them, more in every round.
    one, other, joiner = peers(3, [(40, 40)], averager_rank=20, min_compression_ratio=0.0)
    generator = torch.Generator().manual_seed(0)
    for swarm in [[one, other]] * 8 + [[one]] * 2 + [[one, joiner]] * 8:
        own = 16 // len(swarm)  # together of rank 16
        gradients = [
            torch.randn(40, own, generator=generator) @ torch.randn(own, 40, generator=generator)
            for _ in swarm
        ]
        samples = torch.randint(1, 65, (len(swarm),), generator=generator).float()
        one_round(swarm, [[gradient] for gradient in gradients], weights=samples.tolist())
        mean = torch.tensordot(samples / samples.sum(), torch.stack(gradients), 1)
        for averager in swarm:
            assert (gradients_of(averager)[0] - mean).norm() / mean.norm() < 1e-3


def uneven_rounds(
    rank: int | None,
    samples: Sequence[tuple[int, int]],
    *,
    seed: int,
    at: Sequence[int],
    **how: Any,
) -> list[float]:
    """Train two peers with unequal samples; return relative distances to the solution.

    A linear map is learned from batches of random inputs; the two peers' data belong to maps that
    lie 0.3 to either side of the true one. The solution is the minimum over all samples.

    Args:
        rank: That of PowerSGD; None averages gradients as they are.
        samples: Samples of the two peers in every round.
        seed: Seed of the data.
        at: Rounds after which to measure.
        how: Passed to :func:`~tests.unit.powersgd_fakes.attempt`.
    """
    generator = torch.Generator().manual_seed(seed)
    shape, rate, noise = (24, 20), 0.05, 0.1
    true, shift = (torch.randn(shape, generator=generator) for _ in range(2))
    maps = [true + 0.3 * shift, true - 0.3 * shift]
    group = peers(2, [shape], averager_rank=rank or 1, min_compression_ratio=0.0)
    weights, distances = torch.zeros(shape), []
    totals = torch.tensor(samples[: max(at)]).sum(0)
    solution = (totals[0] * maps[0] + totals[1] * maps[1]) / totals.sum()
    for done, counts in enumerate(samples[: max(at)], start=1):
        gradients = []
        for count, own in zip(counts, maps, strict=True):
            inputs = torch.randn(count, shape[0], generator=generator)
            errors = noise * torch.randn(count, shape[1], generator=generator)
            gradients.append(inputs.T @ (inputs @ (weights - own) + errors) / count)
        if rank is None:
            step = (counts[0] * gradients[0] + counts[1] * gradients[1]) / sum(counts)
        else:
            one_round(group, [[gradient] for gradient in gradients], weights=counts, **how)
            step = gradients_of(group[0])[0]
        weights = weights - rate * step
        if done in at:
            distances.append(float((weights - solution).norm() / solution.norm()))
    return distances


def half(tensor: torch.Tensor) -> torch.Tensor:
    """Encode and decode as ``float16``."""
    return tensor.half().float()


@pytest.mark.parametrize(
    ("speeds", "codec", "seed"),
    [
        ("jitter", torch.clone, 0),
        ("jitter", half, 1),
        ("alternating", torch.clone, 0),
        ("constant", torch.clone, 0),
    ],
)
def test_peers_of_unequal_speed_reach_the_dense_solution(
    speeds: str, codec: Any, seed: int
) -> None:
    """Rank 4, 400 rounds of 64 samples, in shares that change from round to round."""
    generator = torch.Generator().manual_seed(seed)
    first = {
        "jitter": torch.randint(8, 57, (400,), generator=generator).tolist(),
        "alternating": [48, 16] * 200,
        "constant": [48] * 400,
    }[speeds]
    samples = [(count, 64 - count) for count in first]
    at = (50, 100, 200, 400)
    dense, factors = (
        uneven_rounds(rank, samples, seed=seed, at=at, codec=codec) for rank in (None, 4)
    )
    assert dense[-1] < 0.08
    assert factors[-1] <= 1.5 * dense[-1], (factors, dense)


def test_error_feedback_does_not_grow_with_the_difference_between_peers() -> None:
    """Equal weights, 400 rounds of gradients that lie to either side of their mean.

    A round takes the share rank / rows of what a peer owes, if P points anywhere: so it owes some
    rows / rank gradients in the long run, half of what is allowed here. The sum of the differences
    between a peer's gradient and the group's would be 400.
    """
    rows, rank = 24, 4
    group = peers(2, [(rows, 20)], averager_rank=rank, min_compression_ratio=0.0)
    generator = torch.Generator().manual_seed(0)
    apart = torch.randn(rows, 20, generator=generator)
    for _ in range(400):
        gradients = [
            torch.randn(rows, 20, generator=generator) + sign * apart for sign in (1.0, -1.0)
        ]
        one_round(group, [[gradient] for gradient in gradients])
    for averager in group:
        assert averager.payload.factors.error_feedback[0].norm() < 2 * rows / rank * apart.norm()
