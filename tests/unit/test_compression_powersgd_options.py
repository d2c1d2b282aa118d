"""PowerSGD's options, and what a peer that comes later has to know."""

from __future__ import annotations

import asyncio
from functools import partial
from math import nan
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hivemind.averaging import DecentralizedAverager
from hivemind.utils.math import orthogonalize_

from rayhive.averaging.allreduce_groups import DENSE, allreduce_id
from rayhive.averaging.averager import MeasuredAverager
from rayhive.averaging.gradient_averager import RayhivePowerSGDAverager
from rayhive.averaging.payload_policy import STALE_WEIGHT
from rayhive.averaging.powersgd_payload import PowerSGDOptions
from rayhive.compression.payload import payload
from rayhive.compression.powersgd.kernels import METHODS
from rayhive.compression.powersgd.shapes import (
    MAX_ITERATIONS,
    ORTHOGONALISATIONS,
    factor_rank,
    phase_names,
)
from rayhive.errors import ConfigError
from tests.unit.averaging_fakes import unstarted
from tests.unit.powersgd_fakes import InMemory, attempt, give, gradients_of, peers, state

SHAPES = [(12, 10), (5,), (12, 10), (6, 4, 3, 3)]
RANK: dict[str, Any] = {"averager_rank": 2, "min_compression_ratio": 0.2}
METHOD = pytest.mark.parametrize("method", list(METHODS.values()), ids=list(METHODS))


def gradients(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def rounds(group: list[InMemory], seeds: range, **how: Any) -> list[list[str]]:
    """Run rounds and return the phases of each."""
    phases = []
    for seed in seeds:
        for number, averager in enumerate(group):
            give(averager, gradients(100 * seed + number))
        room = asyncio.run(attempt(group, **how))
        assert all(room.succeeded)
        phases.append(room.phases)
    return phases


# -- orthogonalisation


def test_every_name_has_a_method() -> None:
    assert tuple(METHODS) == ORTHOGONALISATIONS


@METHOD
def test_independent_columns_become_those_of_hivemind(method: Any) -> None:
    matrices = torch.randn(5, 30, 4, generator=torch.Generator().manual_seed(0))
    expected = matrices.clone()
    for matrix in expected:
        orthogonalize_(matrix)
    torch.testing.assert_close(method(matrices), expected, rtol=1e-4, atol=1e-5)
    assert method(matrices).dtype == torch.float32


@METHOD
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_dependent_columns_become_zero_and_the_others_orthonormal(
    method: Any, scale: float
) -> None:
    """hivemind blows the rounding of a dependent column up to length 1, along any direction."""
    a, b, c = torch.randn(3, 30, 1, generator=torch.Generator().manual_seed(0))
    zero = torch.zeros(30, 1)
    cases = {
        (1, 1, 1): torch.cat([a, b, c], 1),
        (1, 0, 1): torch.cat([a, 3 * a, b], 1),
        (1, 1, 0): torch.cat([a, b, a - 2 * b], 1),
        (0, 1, 0): torch.cat([zero, a, zero], 1),
        (0, 0, 0): torch.cat([zero, zero, zero], 1),
    }
    matrices = scale * torch.stack(list(cases.values()))
    for kept, done in zip(cases, method(matrices), strict=True):
        gram = done.double().T @ done.double()
        torch.testing.assert_close(gram, torch.diag(torch.tensor(kept).double()), atol=1e-6, rtol=0)


@METHOD
def test_nearly_dependent_columns_become_orthonormal_too(method: Any) -> None:
    """float32 alone, as in hivemind, leaves an angle."""
    a, b = torch.randn(2, 200, 1, generator=torch.Generator().manual_seed(0))
    matrix = torch.cat([a, a + 1e-4 * b], 1)
    (done,) = method(matrix[None])
    torch.testing.assert_close(done.T @ done, torch.eye(2), atol=1e-6, rtol=0)
    orthogonalize_(matrix)
    assert (matrix.T @ matrix - torch.eye(2)).abs().max() > 1e-5


@METHOD
def test_a_matrix_that_is_not_finite_spoils_no_other(method: Any) -> None:
    matrices = torch.randn(3, 20, 2, generator=torch.Generator().manual_seed(0))
    good = method(matrices)
    for bad in (nan, float("inf")):
        matrices[1, 4, 0] = bad
        done = method(matrices)
        assert torch.equal(done[[0, 2]], good[[0, 2]])
        assert not done[1].isfinite().all()


# -- iterations, dense rounds, stacks


def test_more_iterations_approximate_better() -> None:
    errors = []
    for iterations in (1, 2, 4):
        group = peers(2, SHAPES, num_iters_per_step=iterations, **RANK)
        (phases,) = rounds(group, range(1))
        assert phases == [f"{name}" for name in phase_names(iterations)]
        mean = torch.stack([gradients(0)[0], gradients(1)[0]]).mean(0)
        errors.append(float((gradients_of(group[0])[0] - mean).norm()))
    assert errors[0] > errors[1] > errors[2]


def test_the_first_iteration_has_hiveminds_names() -> None:
    assert phase_names() == ("P", "Q")
    assert phase_names(3) == ("P", "Q", "P2", "Q2", "P3", "Q3")
    assert len(set(phase_names(MAX_ITERATIONS))) == 2 * MAX_ITERATIONS
    assert allreduce_id(b"group", "P") == b"groupPHASE_P"
    assert allreduce_id(b"group", "Q") == b"groupPHASE_Q"
    assert allreduce_id(b"group", DENSE) == b"group"


@pytest.mark.parametrize("gather", [int, lambda number: [number, False]], ids=["alone", "listed"])
def test_rounds_are_dense_until_the_group_has_reached_the_number(gather: Any) -> None:
    """All members use the gathered number; the count of one that joins would be another."""
    old, joined = peers(2, SHAPES, start_compressing_after_num_steps=3, **RANK)
    dense, factors = [[DENSE]], [["P", "Q"]]
    for number, expected in ((1, dense), (3, dense), (4, factors), (200, factors)):
        seeds, gathered = range(number, number + 1), gather(number)
        assert rounds([old, joined], seeds, gathered=gathered) == expected
        if number <= 3:
            given = [gradients(100 * number + peer)[0] for peer in range(2)]
            torch.testing.assert_close(gradients_of(old)[0], torch.stack(given).mean(0))
            assert all(not owed.any() for owed in old.payload.factors.error_feedback)


def test_without_a_number_a_peer_counts_its_own_rounds() -> None:
    group = peers(2, SHAPES, start_compressing_after_num_steps=2, **RANK)
    assert rounds(group, range(4)) == [[DENSE], [DENSE], *[["P", "Q"]] * 2]


def test_a_failed_dense_round_changes_nothing_either() -> None:
    group = peers(2, SHAPES, start_compressing_after_num_steps=2, **RANK)
    for averager in group:
        give(averager, gradients(0))
    before = state(group[0])
    room = asyncio.run(attempt(group, {(0, DENSE): "after", (1, DENSE): "after"}))
    assert room.succeeded == [False, False]
    assert all(torch.equal(a, b) for a, b in zip(before, state(group[0]), strict=True))


def test_matrices_of_one_shape_do_not_meet() -> None:
    """They are multiplied in one stack, and come out as each would by itself."""
    (together,) = peers(1, SHAPES, **RANK)
    rounds([together], range(3))
    for at, index in enumerate((0, 2, 3)):
        (alone,) = peers(1, [SHAPES[index]], **RANK)
        (fresh,) = peers(1, SHAPES, **RANK)
        alone.payload.factors.qs[0].copy_(fresh.payload.factors.qs[at])
        for seed in range(3):
            give(alone, [gradients(100 * seed)[index]])
            asyncio.run(attempt([alone]))
        torch.testing.assert_close(
            alone.payload.factors.error_feedback[0], together.payload.factors.error_feedback[at]
        )
        torch.testing.assert_close(alone.payload.factors.qs[0], together.payload.factors.qs[at])


def test_gradients_with_other_strides_are_averaged_alike() -> None:
    """channels_last, for one: cutting such a tensor into parts is an error in hivemind."""
    (usual,), (other,) = peers(1, SHAPES, **RANK), peers(1, SHAPES, **RANK)
    other.gradients[3] = other.gradients[3].to(memory_format=torch.channels_last)
    for averager in (usual, other):
        rounds([averager], range(2))
    for one, same in zip(state(usual), state(other), strict=True):
        torch.testing.assert_close(one, same)


def test_what_rounding_takes_from_half_precision_is_owed() -> None:
    (averager,) = peers(1, SHAPES, **RANK)
    averager.gradients = [gradient.bfloat16() for gradient in averager.gradients]
    total = torch.zeros(SHAPES[0])
    for seed in range(4):
        given = gradients(seed)[0].bfloat16().float()
        give(averager, gradients(seed))
        asyncio.run(attempt([averager]))
        total += given - gradients_of(averager)[0].float()
    torch.testing.assert_close(averager.payload.factors.error_feedback[0], total, rtol=0, atol=1e-5)


@pytest.mark.parametrize("weight", [STALE_WEIGHT, 0.0], ids=["stale", "excluded or no samples"])
def test_a_peer_that_does_not_count_keeps_its_error_feedback(weight: float) -> None:
    """It applies the others' average; its feedback neither enters the average nor changes."""
    (peer,) = peers(1, SHAPES, **RANK)
    for seed, excluded in enumerate([False, True, False, True, True, False]):
        before = [feedback.clone() for feedback in peer.payload.factors.error_feedback]
        qs = [q.clone() for q in peer.payload.factors.qs]
        large = [gradient for gradient in gradients(seed) if gradient.ndim > 1]
        give(peer, gradients(seed))
        # alone in the group, a peer gets its own factors back, whatever its weight
        room = asyncio.run(attempt([peer], weights=[weight if excluded else 1.0], alone=True))
        applied = [gradient for gradient in gradients_of(peer) if gradient.ndim > 1]
        assert all(gradient.any() for gradient in applied)
        feedback = peer.payload.factors.error_feedback
        rows = zip(room.given["P"][0], feedback, before, large, qs, applied, strict=True)
        for p, owed, was, new, q, mean in rows:
            entered = new if excluded else was + new
            product = entered.reshape(len(p), -1) @ q
            scales = torch.exp2((p.norm(dim=0) / product.norm(dim=0)).log2().round())
            torch.testing.assert_close(p, product * scales, rtol=1e-4, atol=1e-4)
            if excluded:
                assert torch.equal(owed, was)
            else:
                torch.testing.assert_close(owed, was + new - mean)


# -- options and bytes


def test_ranks_are_clipped_to_the_smaller_side() -> None:
    shapes = [(3, 20), (20, 2), (9, 9), (2, 2, 9)]
    assert [factor_rank(shape, 4) for shape in shapes] == [3, 2, 4, 4]
    (averager,) = peers(1, SHAPES, averager_rank=2, min_compression_ratio=0.0)
    assert [tuple(q.shape) for q in averager.payload.factors.qs] == [(10, 2), (10, 2), (9, 2)]


@pytest.mark.parametrize("iterations", [1, 3])
def test_the_prediction_knows_iterations_and_dense_rounds(iterations: int) -> None:
    options = {"num_iters_per_step": iterations, "start_compressing_after_num_steps": 2}
    ranks = {"powersgd_rank": 2, "min_compression_ratio": 0.2, "num_iters_per_step": iterations}
    low_rank = payload(SHAPES, **ranks, factor_codec="none")
    group = peers(2, SHAPES, **options, **RANK)
    for number in (2, 3):
        for averager in group:
            give(averager, gradients(0))
        room = asyncio.run(attempt(group, gathered=number))
        assert all(room.succeeded)
        predicted = low_rank if number > 2 else payload(SHAPES)
        assert room.sent == [(phase.name, phase.elements) for phase in predicted.phases]
        assert predicted.bytes_per_transfer == 4 * sum(sum(sizes) for _, sizes in room.sent)


def test_all_mistakes_are_reported_at_once() -> None:
    wrong = {
        "averager_rank": 0,
        "min_compression_ratio": -1.0,
        "num_iters_per_step": MAX_ITERATIONS + 1,
        "start_compressing_after_num_steps": -1,
        "orthogonalisation": "gram_shmidt",
        "factor_codec": "float_16",
        "device": "gpu",
    }
    with pytest.raises(ConfigError) as caught:
        unstarted(RayhivePowerSGDAverager, SHAPES, **wrong)
    problems = {problem.key: problem for problem in caught.value.problems}
    assert set(problems) == {"powersgd_rank", *wrong} - {"averager_rank"}
    assert problems["orthogonalisation"].nearest == "gram_schmidt"
    assert problems["factor_codec"].nearest == "float16"
    with pytest.raises(ConfigError, match="num_iters_per_step"):
        payload(SHAPES, powersgd_rank=1, num_iters_per_step=0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without CUDA")
def test_a_missing_device_is_refused() -> None:
    with pytest.raises(ConfigError, match="cpu, or one of 0 of CUDA"):
        unstarted(RayhivePowerSGDAverager, SHAPES, device="cuda", **RANK)


@pytest.mark.parametrize(
    ("asked", "where", "multiplied"),
    [
        (None, ["cpu"], "cpu"),
        (None, ["cuda:1", "cuda:1"], "cuda:1"),
        ("cuda", ["cuda:1"], "cuda:1"),
        ("cuda:0", ["cuda:1"], "cuda:0"),
        ("cpu", ["cuda:1"], "cpu"),
        (None, ["cuda:0", "cuda:1"], "cpu"),
    ],
)
def test_factors_are_where_the_parameters_are(
    asked: str | None, where: list[str], multiplied: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless it is said otherwise, or they are in several places."""
    parameters: Any = [SimpleNamespace(device=torch.device(name)) for name in where]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert PowerSGDOptions(1, device=asked).device_for(parameters) == torch.device(multiplied)


def test_the_options_arrive_through_a_factory() -> None:
    make = partial(RayhivePowerSGDAverager, averager_rank=2, num_iters_per_step=2, device="cpu")
    assert unstarted(make, SHAPES).payload.phases({}) == ("P", "Q", "P2", "Q2")


# -- peers that come later


def test_a_joining_peer_takes_over_the_q_of_the_group() -> None:
    """And then its rounds are theirs: it factorises what they factorise, the same way."""
    options = {"start_compressing_after_num_steps": 2, **RANK}
    group = peers(2, SHAPES, **options)
    rounds(group, range(5))
    (joiner,) = peers(1, SHAPES, **options)
    source, own = group[0].payload, joiner.payload
    assert not any(
        torch.equal(a, b) for a, b in zip(own.factors.qs, source.factors.qs, strict=True)
    )
    feedback = [each.clone() for each in own.factors.error_feedback]
    assert own.restore(*source.snapshot())
    assert all(torch.equal(a, b) for a, b in zip(own.factors.qs, source.factors.qs, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(own.factors.error_feedback, feedback, strict=True))
    phases = rounds([*group, joiner], range(5, 7))
    assert phases == [["P", "Q"]] * 2, "it counts the rounds that it has missed"
    for a, b in zip(own.factors.qs, source.factors.qs, strict=True):
        assert torch.equal(a, b)


def test_an_averager_serves_and_takes_over_q(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DecentralizedAverager, "get_group_bits", lambda self: "")
    source, joiner = (unstarted(RayhivePowerSGDAverager, SHAPES, **RANK) for _ in range(2))
    for q in source.payload.factors.qs:
        q.normal_()
    metadata, tensors, infos = source.get_current_state()
    assert len(infos) == len(tensors) == 3
    state = (metadata, tensors)
    monkeypatch.setattr(MeasuredAverager, "load_state_from_peers", lambda *_, **__: state)
    assert joiner.load_state_from_peers(timeout=1.0)
    for own, other in zip(joiner.payload.factors.qs, source.payload.factors.qs, strict=True):
        assert torch.equal(own, other)


def test_a_state_is_a_copy_that_later_rounds_do_not_change() -> None:
    """hivemind hands out the live tensors, which the next round changes while they are sent."""
    (peer,) = peers(1, SHAPES, **RANK)
    _, tensors = peer.payload.snapshot()
    before = [tensor.clone() for tensor in tensors]
    for q in peer.payload.factors.qs:
        q.add_(1.0)
    assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))


@pytest.mark.parametrize("what", ["nothing", "shapes", "nan"])
def test_a_state_that_does_not_fit_is_not_taken(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    averager = unstarted(RayhivePowerSGDAverager, SHAPES, **RANK)
    before = [q.clone() for q in averager.payload.factors.qs]
    tensors = {
        "shapes": [q.t() for q in before],
        "nan": [torch.full_like(q, nan) for q in before],
    }
    answer = None if what == "nothing" else ({}, tensors[what])
    monkeypatch.setattr(MeasuredAverager, "load_state_from_peers", lambda *_, **__: answer)
    assert not averager.load_state_from_peers()
    assert all(torch.equal(a, b) for a, b in zip(before, averager.payload.factors.qs, strict=True))


def test_peers_with_different_q_still_share_a_space() -> None:
    """A peer that could not download: one round is approximated worse, none is wrong."""
    group = peers(2, SHAPES, **RANK)
    for q in group[1].payload.factors.qs:
        q.normal_()
    rounds(group, range(1))
    for index in (0, 2, 3):
        assert torch.equal(gradients_of(group[0])[index], gradients_of(group[1])[index])
    mean = torch.stack([gradients(0)[0], gradients(1)[0]]).mean(0)
    owed = torch.stack([averager.payload.factors.error_feedback[0] for averager in group]).mean(0)
    torch.testing.assert_close(gradients_of(group[0])[0] + owed, mean)
