"""PowerSGD's factors, and what a failed round leaves behind: nothing."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from hivemind.averaging.matchmaking import MatchmakingException
from hivemind.optim.power_sgd_averager import PowerSGDGradientAverager

from rayhive.averaging.averagers import RayhivePowerSGDAverager
from rayhive.averaging.powersgd_averager import TransactionalPowerSGD
from rayhive.compression.powersgd import factors, kernels
from rayhive.compression.powersgd.kernels import TorchPasses
from rayhive.compression.powersgd.kernels_numba import CompiledPasses
from rayhive.errors import ConfigError
from tests.unit.compression_fakes import group_of_one, unstarted

SHAPES = [(20, 30), (7,), (12, 3, 3, 3)]
OPTIONS = {"averager_rank": 2, "min_compression_ratio": 0.2}


@pytest.fixture(params=[TorchPasses, CompiledPasses], autouse=True)
def how(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways to pass over dense matrices have to do."""
    monkeypatch.setattr(factors, "host_passes", lambda: request.param)


class Breakable:
    """Averages with nobody, and fails in the all-reduces that it is told to."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.breaks: list[str] = []
        super().__init__(*args, **kwargs)

    async def _run_allreduce_inplace_(
        self, tensors: Any, group_info: Any, group_id: bytes, **_: Any
    ) -> None:
        for tensor in tensors:
            tensor.mul_(1.0)  # alone, the average is what one has
        if self.breaks and group_id.endswith(self.breaks[0].encode()):
            self.breaks.pop(0)
            for tensor in tensors:
                tensor.add_(7.0)  # a part of it was averaged already
            raise RuntimeError("the network is gone")


class Ours(Breakable, TransactionalPowerSGD):
    pass


class Theirs(Breakable, PowerSGDGradientAverager):
    pass


def gradients(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def run(averager: Any, new: list[torch.Tensor]) -> list[torch.Tensor]:
    """Run one step as hivemind does: again and again until it works."""
    with torch.no_grad(), averager.get_tensors() as tensors:
        for tensor, value in zip(tensors, new, strict=True):
            tensor.copy_(value)

    async def step() -> None:
        while True:
            try:
                await averager._aggregate_with_group(group_of_one(), min_vector_size=0)
                return
            except MatchmakingException:
                continue

    asyncio.run(step())
    with averager.get_tensors() as tensors:
        return [tensor.clone() for tensor in tensors]


def state(averager: Any) -> list[torch.Tensor]:
    with averager.get_tensors() as tensors:
        return [tensor.clone() for tensor in (*averager._ms, *averager._qs, *tensors)]


@pytest.mark.parametrize("phase", ["PHASE_P", "PHASE_Q"])
def test_a_failed_round_changes_nothing(phase: str) -> None:
    averager = unstarted(Ours, SHAPES, **OPTIONS)
    run(averager, gradients(0))  # so that there is feedback to lose
    with torch.no_grad(), averager.get_tensors() as tensors:
        for tensor, value in zip(tensors, gradients(1), strict=True):
            tensor.copy_(value)
    before = state(averager)
    averager.breaks = [phase]
    with pytest.raises(MatchmakingException, match="the network is gone"):
        asyncio.run(averager._aggregate_with_group(group_of_one(), min_vector_size=0))
    assert not averager.breaks
    for was, now in zip(before, state(averager), strict=True):
        assert torch.equal(was, now)


@pytest.mark.parametrize("phase", ["PHASE_P", "PHASE_Q"])
def test_a_retry_applies_the_gradient_once(phase: str) -> None:
    """Everything applied so far, and the feedback still owed, add up to all gradients."""
    breaking = unstarted(Ours, SHAPES, **OPTIONS)
    steady = unstarted(Ours, SHAPES, **OPTIONS)
    hivemind = unstarted(Theirs, SHAPES, **OPTIONS)
    applied: dict[Any, Any] = {averager: 0 for averager in (breaking, steady, hivemind)}
    for seed in range(3):
        breaking.breaks = [phase] if seed == 1 else []
        hivemind.breaks = [phase] if seed == 1 else []
        for averager in applied:
            applied[averager] = applied[averager] + run(averager, gradients(seed))[0]
    given = sum(gradients(seed)[0] for seed in range(3))
    for averager in (breaking, steady):
        torch.testing.assert_close(applied[averager] + averager._ms[0], given)
    torch.testing.assert_close(applied[breaking], applied[steady])
    # hivemind's second gradient arrives twice.
    twice = given + gradients(1)[0]
    torch.testing.assert_close(applied[hivemind] + hivemind._ms[0], twice)


def test_it_computes_what_hivemind_computes_from_the_same_q() -> None:
    ours, theirs = unstarted(Ours, SHAPES, **OPTIONS), unstarted(Theirs, SHAPES, **OPTIONS)
    for mine, other in zip(ours._qs, theirs._qs, strict=True):
        other.copy_(mine)
    for seed in range(3):
        new = gradients(seed)
        for mine, other in zip(run(ours, new), run(theirs, new), strict=True):
            torch.testing.assert_close(mine, other)
    for mine, other in zip(state(ours), state(theirs), strict=True):
        torch.testing.assert_close(mine, other)


@pytest.mark.parametrize("block", [1, 31, 90, 2**30])
def test_the_size_of_blocks_changes_nothing(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Row by row, a few rows with some left over, or a whole matrix at once."""
    monkeypatch.setattr(factors, "host_passes", lambda: TorchPasses)
    whole, parts = unstarted(Ours, SHAPES, **OPTIONS), unstarted(Ours, SHAPES, **OPTIONS)
    for seed in range(4):
        new = gradients(seed)
        expected = run(whole, new)
        with monkeypatch.context() as patch:
            patch.setattr(kernels, "BLOCK", block)
            for mine, other in zip(run(parts, new), expected, strict=True):
                torch.testing.assert_close(mine, other)
    for mine, other in zip(state(parts), state(whole), strict=True):
        torch.testing.assert_close(mine, other)


def test_the_last_round_can_be_undone_bit_by_bit() -> None:
    averager = unstarted(Ours, SHAPES, **OPTIONS)
    for seed in range(3):
        run(averager, gradients(seed))
        before = [tensor.clone() for tensor in (*averager._ms, *averager._qs)]
        run(averager, gradients(seed + 10))
        after = [tensor.clone() for tensor in (*averager._ms, *averager._qs)]
        assert not any(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        averager._factors.undo()
        for was, now in zip(before, (*averager._ms, *averager._qs), strict=True):
            assert torch.equal(was, now)


def test_what_is_owed_can_be_read_and_written_at_any_time() -> None:
    """It is put together only when somebody asks, which changes nothing for later rounds."""
    asked, left_alone = unstarted(Ours, SHAPES, **OPTIONS), unstarted(Ours, SHAPES, **OPTIONS)
    for seed in range(4):
        for mine, other in zip(
            run(asked, gradients(seed)), run(left_alone, gradients(seed)), strict=True
        ):
            torch.testing.assert_close(mine, other)
        assert torch.equal(asked._ms[0], asked._ms[0])
    for averager in (asked, left_alone):
        run(averager, gradients(9))
        averager._factors.undo()
    for mine, other in zip(asked._ms, left_alone._ms, strict=True):
        torch.testing.assert_close(mine, other)
        assert mine.any()
    for owed in asked._ms:
        owed.zero_()
    zeros = [torch.zeros(shape) for shape in SHAPES]
    assert not any(tensor.any() for tensor in run(asked, zeros)), "nothing was owed any more"


def test_peers_begin_with_the_same_q_and_leave_the_generator_alone() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    one = unstarted(RayhivePowerSGDAverager, SHAPES, **OPTIONS)
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(2)
    same = unstarted(RayhivePowerSGDAverager, SHAPES, **OPTIONS)
    other = unstarted(RayhivePowerSGDAverager, SHAPES, **OPTIONS, prefix="another run")
    for a, b, c in zip(one._qs, same._qs, other._qs, strict=True):
        assert torch.equal(a, b)
        assert not torch.equal(a, c)
    plain = [unstarted(PowerSGDGradientAverager, SHAPES, **OPTIONS) for _ in range(2)]
    assert not torch.equal(plain[0]._qs[0], plain[1]._qs[0])


def test_bfloat16_gradients_are_factorised_in_float32() -> None:
    averager = unstarted(Ours, SHAPES, **OPTIONS)
    half = [gradient.bfloat16() for gradient in gradients(0)]
    averager._averaged_tensors = tuple(half)
    asyncio.run(averager._aggregate_with_group(group_of_one(), min_vector_size=0))
    whole = run(unstarted(Ours, SHAPES, **OPTIONS), [g.float() for g in half])
    torch.testing.assert_close(half[0].float(), whole[0], rtol=0.02, atol=0.02)


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"averager_rank": 0}, "powersgd_rank"),
        ({"averager_rank": 1, "min_compression_ratio": -0.1}, "min_compression_ratio"),
    ],
)
def test_ranks_and_ratios_out_of_range_are_refused(options: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        unstarted(RayhivePowerSGDAverager, SHAPES, **options)
