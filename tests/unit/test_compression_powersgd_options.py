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
from hivemind.optim.power_sgd_averager import PowerSGDGradientAverager
from hivemind.utils.math import orthogonalize_

from rayhive.averaging.averager import PHASE_NAMES
from rayhive.averaging.averagers import RayhivePowerSGDAverager
from rayhive.averaging.filtered_averager import STALE_WEIGHT
from rayhive.averaging.matchmaking import TRACE, StepTrace
from rayhive.averaging.powersgd_averager import STEP, TransactionalPowerSGD, _device
from rayhive.compression.payload import payload
from rayhive.compression.powersgd.orthogonalise import METHODS
from rayhive.compression.powersgd.shapes import (
    MAX_ITERATIONS,
    ORTHOGONALISATIONS,
    factor_rank,
    phase_names,
)
from rayhive.errors import ConfigError
from tests.unit.compression_fakes import group_of_one, unstarted
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
        assert phases == [f"PHASE_{name}" for name in phase_names(iterations)]
        mean = torch.stack([gradients(0)[0], gradients(1)[0]]).mean(0)
        errors.append(float((gradients_of(group[0])[0] - mean).norm()))
    assert errors[0] > errors[1] > errors[2]


def test_the_first_iteration_has_hiveminds_names() -> None:
    assert phase_names() == ("P", "Q")
    assert phase_names(3) == ("P", "Q", "P2", "Q2", "P3", "Q3")
    for name in phase_names(MAX_ITERATIONS):
        assert PHASE_NAMES[f"PHASE_{name}".encode()] == name


@pytest.mark.parametrize("gather", [int, lambda number: [number, False]], ids=["alone", "listed"])
def test_rounds_are_dense_until_the_group_has_reached_the_number(gather: Any) -> None:
    """All members use the gathered number; the count of one that joins would be another."""
    old, joined = peers(2, SHAPES, start_compressing_after_num_steps=3, **RANK)
    dense, factors = [[""]], [["PHASE_P", "PHASE_Q"]]
    for number, expected in ((1, dense), (3, dense), (4, factors), (200, factors)):
        seeds, gathered = range(number, number + 1), gather(number)
        assert rounds([old, joined], seeds, gathered=gathered) == expected
        if number <= 3:
            given = [gradients(100 * number + peer)[0] for peer in range(2)]
            torch.testing.assert_close(gradients_of(old)[0], torch.stack(given).mean(0))
            assert all(not owed.any() for owed in old._ms)


def test_without_a_number_a_peer_counts_its_own_rounds() -> None:
    group = peers(2, SHAPES, start_compressing_after_num_steps=2, **RANK)
    assert rounds(group, range(4)) == [[""], [""], *[["PHASE_P", "PHASE_Q"]] * 2]


def test_a_failed_dense_round_changes_nothing_either() -> None:
    group = peers(2, SHAPES, start_compressing_after_num_steps=2, **RANK)
    for averager in group:
        give(averager, gradients(0))
    before = state(group[0])
    room = asyncio.run(attempt(group, {(0, ""): "after", (1, ""): "after"}))
    assert room.succeeded == [False, False]
    assert all(torch.equal(a, b) for a, b in zip(before, state(group[0]), strict=True))


def test_matrices_of_one_shape_do_not_meet() -> None:
    """They are multiplied in one stack, and come out as each would by itself."""
    (together,) = peers(1, SHAPES, **RANK)
    rounds([together], range(3))
    for at, index in enumerate((0, 2, 3)):
        (alone,) = peers(1, [SHAPES[index]], **RANK)
        (fresh,) = peers(1, SHAPES, **RANK)
        alone._qs[0].copy_(fresh._qs[at])
        for seed in range(3):
            give(alone, [gradients(100 * seed)[index]])
            asyncio.run(attempt([alone]))
        torch.testing.assert_close(alone._ms[0], together._ms[at])
        torch.testing.assert_close(alone._qs[0], together._qs[at])


def test_gradients_with_other_strides_are_averaged_alike() -> None:
    """channels_last, for one: cutting such a tensor into parts is an error in hivemind."""
    (usual,), (other,) = peers(1, SHAPES, **RANK), peers(1, SHAPES, **RANK)
    tensors = list(other._averaged_tensors)
    tensors[3] = tensors[3].to(memory_format=torch.channels_last)
    other._averaged_tensors = tuple(tensors)
    for averager in (usual, other):
        rounds([averager], range(2))
    for one, same in zip(state(usual), state(other), strict=True):
        torch.testing.assert_close(one, same)


def test_what_rounding_takes_from_half_precision_is_owed() -> None:
    (averager,) = peers(1, SHAPES, **RANK)
    averager._averaged_tensors = tuple(t.bfloat16() for t in averager._averaged_tensors)
    total = torch.zeros(SHAPES[0])
    for seed in range(4):
        given = gradients(seed)[0].bfloat16().float()
        give(averager, gradients(seed))
        asyncio.run(attempt([averager]))
        total += given - gradients_of(averager)[0].float()
    torch.testing.assert_close(averager._ms[0], total, rtol=0, atol=1e-5)


class Sending(RayhivePowerSGDAverager):
    """A peer without company that keeps the P it sent."""

    async def _run_allreduce_inplace_(
        self, tensors: Any, group_info: Any, group_id: bytes, **_: Any
    ) -> None:
        if group_id.endswith(b"PHASE_P"):
            self.sent = [tensor.clone() for tensor in tensors]


@pytest.mark.parametrize("why", ["corrupt", "stale", "no samples"])
def test_a_peer_that_does_not_count_keeps_its_error_feedback(why: str) -> None:
    """It applies the others' average; its feedback neither enters the average nor changes."""
    averager = unstarted(Sending, SHAPES, **RANK)
    for seed, excluded in enumerate([False, True, False, True, True, False]):
        before, qs = [owed.clone() for owed in averager._ms], [q.clone() for q in averager._qs]
        large = [gradient for gradient in gradients(seed) if gradient.ndim > 1]
        weight = {"stale": STALE_WEIGHT}.get(why, 0.0) if excluded else 1.0
        TRACE.set(StepTrace(excluded=excluded and why == "corrupt"))
        ended = {"done": lambda: True, "cancelled": lambda: False, "exception": lambda: None}
        STEP.set(SimpleNamespace(weight=weight, **ended))  # type: ignore[arg-type]
        give(averager, gradients(seed))
        asyncio.run(
            TransactionalPowerSGD._aggregate_with_group(
                averager, group_of_one(), min_vector_size=0, weight=weight
            )
        )
        applied = [gradient for gradient in gradients_of(averager) if gradient.ndim > 1]
        assert all(gradient.any() for gradient in applied)
        rows = zip(averager.sent, averager._ms, before, large, qs, applied, strict=True)
        for p, owed, was, new, q, mean in rows:
            entered = new if excluded else was + new
            torch.testing.assert_close(p, entered.reshape(len(p), -1) @ q, rtol=1e-4, atol=1e-4)
            if excluded:
                assert torch.equal(owed, was)
            else:  # alone, the own factors are the group's
                torch.testing.assert_close(owed, was + new - mean)
    TRACE.set(None)
    STEP.set(None)


# -- options and bytes


def test_ranks_are_clipped_to_the_smaller_side() -> None:
    shapes = [(3, 20), (20, 2), (9, 9), (2, 2, 9)]
    assert [factor_rank(shape, 4) for shape in shapes] == [3, 2, 4, 4]
    (averager,) = peers(1, SHAPES, averager_rank=2, min_compression_ratio=0.0)
    assert [tuple(q.shape) for q in averager._qs] == [(10, 2), (10, 2), (9, 2)]


@pytest.mark.parametrize("iterations", [1, 3])
def test_the_prediction_knows_iterations_and_dense_rounds(iterations: int) -> None:
    options = {"num_iters_per_step": iterations, "start_compressing_after_num_steps": 2}
    group = peers(2, SHAPES, **options, **RANK)
    for number in (2, 3):
        for averager in group:
            give(averager, gradients(0))
        room = asyncio.run(attempt(group, gathered=number))
        assert all(room.succeeded)
        predicted = payload(
            SHAPES, powersgd_rank=2, min_compression_ratio=0.2, round_number=number, **options
        )
        names = [(PHASE_NAMES[phase.encode()], sizes) for phase, sizes in room.sent]
        assert names == [(phase.name, phase.elements) for phase in predicted.phases]
        assert predicted.bytes_per_transfer == 4 * sum(sum(sizes) for _, sizes in room.sent)
    assert payload(SHAPES, powersgd_rank=2, round_number=1) == payload(SHAPES, powersgd_rank=2)
    assert payload(SHAPES, powersgd_rank=2, round_number=2, **options).phases == (
        payload(SHAPES).phases
    )


def test_all_mistakes_are_told_at_once() -> None:
    wrong = {
        "averager_rank": 0,
        "min_compression_ratio": -1.0,
        "num_iters_per_step": MAX_ITERATIONS + 1,
        "start_compressing_after_num_steps": -1,
        "orthogonalisation": "gram_shmidt",
        "device": "gpu",
    }
    with pytest.raises(ConfigError) as caught:
        unstarted(RayhivePowerSGDAverager, SHAPES, **wrong)
    problems = {problem.key: problem for problem in caught.value.problems}
    assert set(problems) == {"powersgd_rank", *wrong} - {"averager_rank"}
    assert problems["orthogonalisation"].nearest == "gram_schmidt"
    with pytest.raises(ConfigError, match="num_iters_per_step"):
        payload(SHAPES, powersgd_rank=1, num_iters_per_step=0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without CUDA")
def test_a_device_that_is_not_there_is_refused() -> None:
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
    asked: str | None, where: list[str], multiplied: str
) -> None:
    """Unless it is said otherwise, or they are in several places."""
    parameters: Any = [SimpleNamespace(device=torch.device(name)) for name in where]
    assert _device(asked, parameters) == torch.device(multiplied)


def test_the_options_arrive_through_a_factory() -> None:
    make = partial(RayhivePowerSGDAverager, averager_rank=2, num_iters_per_step=2, device="cpu")
    assert unstarted(make, SHAPES)._phases == ("P", "Q", "P2", "Q2")


# -- peers that come later


def test_a_joiner_takes_over_the_q_that_the_others_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """And then its rounds are theirs: it factorises what they factorise, the same way."""
    options = {"start_compressing_after_num_steps": 2, **RANK}
    group = peers(2, SHAPES, **options)
    rounds(group, range(5))
    (joiner,) = peers(1, SHAPES, **options)
    assert not any(torch.equal(a, b) for a, b in zip(joiner._qs, group[0]._qs, strict=True))
    monkeypatch.setattr(InMemory, "get_group_bits", lambda self: "")
    metadata, tensors, infos = group[0].get_current_state()
    assert len(infos) == len(tensors) == 3
    monkeypatch.setattr(
        DecentralizedAverager, "load_state_from_peers", lambda self, **_: (metadata, tensors)
    )
    owed = [m.clone() for m in joiner._ms]
    assert joiner.load_state_from_peers(timeout=1.0)
    assert all(torch.equal(a, b) for a, b in zip(joiner._qs, group[0]._qs, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(joiner._ms, owed, strict=True))
    phases = rounds([*group, joiner], range(5, 7))
    assert phases == [["PHASE_P", "PHASE_Q"]] * 2, "it counts the rounds that it has missed"
    for a, b in zip(joiner._qs, group[0]._qs, strict=True):
        assert torch.equal(a, b)


def test_a_state_is_a_copy_that_later_rounds_do_not_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """hivemind hands out the live tensors, which the next round changes while they are sent."""
    monkeypatch.setattr(DecentralizedAverager, "get_group_bits", lambda self: "")
    theirs = unstarted(PowerSGDGradientAverager, SHAPES, **RANK)
    (ours,) = peers(1, SHAPES, **RANK)
    for averager, same in ((ours, True), (theirs, False)):
        _, tensors, _ = averager.get_current_state()
        before = [tensor.clone() for tensor in tensors]
        for q in averager._qs:
            q.add_(1.0)
        assert torch.equal(tensors[0], before[0]) == same


@pytest.mark.parametrize("what", ["nothing", "shapes", "nan"])
def test_a_state_that_does_not_fit_is_not_taken(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (averager,) = peers(1, SHAPES, **RANK)
    before = [q.clone() for q in averager._qs]
    tensors = {
        "shapes": [q.t() for q in before],
        "nan": [torch.full_like(q, nan) for q in before],
    }
    answer = None if what == "nothing" else ({}, tensors[what])
    monkeypatch.setattr(DecentralizedAverager, "load_state_from_peers", lambda self, **_: answer)
    assert not averager.load_state_from_peers()
    assert all(torch.equal(a, b) for a, b in zip(before, averager._qs, strict=True))


def test_peers_with_different_q_still_share_a_space() -> None:
    """A peer that could not download: one round is approximated worse, none is wrong."""
    group = peers(2, SHAPES, **RANK)
    for q in group[1]._qs:
        q.normal_()
    rounds(group, range(1))
    for index in (0, 2, 3):
        assert torch.equal(gradients_of(group[0])[index], gradients_of(group[1])[index])
    mean = torch.stack([gradients(0)[0], gradients(1)[0]]).mean(0)
    owed = torch.stack([averager._ms[0] for averager in group]).mean(0)
    torch.testing.assert_close(gradients_of(group[0])[0] + owed, mean)
