"""PowerSGD's factors; a failed round changes none of them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hivemind.averaging.allreduce import AllreduceException
from hivemind.averaging.matchmaking import MatchmakingException
from hivemind.compression import CompressionInfo, NoCompression
from hivemind.optim.power_sgd_averager import PowerSGDGradientAverager

from rayhive.averaging.gradient_averager import RayhivePowerSGDAverager
from rayhive.averaging.payload_policy import GroupRound
from rayhive.averaging.powersgd_payload import PowerSGDOptions, PowerSGDPayload
from rayhive.compression.codecs.base import made
from rayhive.compression.powersgd import factors, kernels, kernels_numba
from rayhive.errors import ConfigError
from tests.unit.averaging_fakes import group_of_one, unstarted

SHAPES = [(20, 30), (7,), (12, 3, 3, 3)]


@pytest.fixture(params=[kernels, kernels_numba], autouse=True)
def how(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run every test with both implementations of the passes."""
    monkeypatch.setattr(factors, "host_passes", lambda: request.param)


class Breakable:
    """All-reduce of a lone peer that fails in the all-reduces of the phases in ``breaks``."""

    def __init__(self) -> None:
        self.breaks: list[str] = []
        self.codec: Any = NoCompression()

    async def __call__(
        self,
        phase: str,
        tensors: Sequence[torch.Tensor],
        owed: Any = None,
        exact: int = 0,
        codec: Any = None,
    ) -> float:
        if self.breaks and phase == self.breaks[0]:
            self.breaks.pop(0)
            for tensor in tensors:
                tensor.add_(7.0)  # a part of it was averaged already
            raise AllreduceException("the network is gone")
        codec = codec or self.codec
        for tensor in tensors[: len(tensors) - exact]:  # alone, the average is what one has
            info = CompressionInfo.from_tensor(tensor)
            tensor.copy_(codec.extract(codec.compress(tensor.contiguous(), info)))
        return 1.0


class Ours:
    """A peer with rayhive's policy."""

    plain = False

    def __init__(self, prefix: str = "test") -> None:
        self.allreduce = Breakable()
        self.gradients = [torch.zeros(shape) for shape in SHAPES]
        self.payload = PowerSGDPayload(
            self.gradients, PowerSGDOptions(2, 0.2), seed=prefix, device=torch.device("cpu")
        )

    @property
    def breaks(self) -> list[str]:
        return self.allreduce.breaks

    @property
    def error_feedback(self) -> list[torch.Tensor]:
        return self.payload.factors.error_feedback

    @property
    def qs(self) -> list[torch.Tensor]:
        return self.payload.factors.qs

    async def attempt(self) -> None:
        round_ = GroupRound(self.allreduce, {"own": None}, plain=self.plain)
        await self.payload.average(self.gradients, round_)


class Theirs(PowerSGDGradientAverager):
    """A peer with hivemind's averager."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.allreduce = Breakable()
        super().__init__(*args, **kwargs)
        self.gradients = list(self._averaged_tensors)

    @classmethod
    def made(cls) -> Any:
        return unstarted(cls, SHAPES, averager_rank=2, min_compression_ratio=0.2)

    @property
    def breaks(self) -> list[str]:
        return self.allreduce.breaks

    @property
    def error_feedback(self) -> list[torch.Tensor]:
        return list(self._ms)

    @property
    def qs(self) -> list[torch.Tensor]:
        return list(self._qs)

    async def _run_allreduce_inplace_(
        self, tensors: Any, group_info: Any, group_id: bytes, **_: Any
    ) -> None:
        await self.allreduce(group_id.decode().rpartition("_")[2], tensors)

    async def attempt(self) -> None:
        await self._aggregate_with_group(group_of_one(), min_vector_size=0)


def gradients(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def give(peer: Any, new: list[torch.Tensor]) -> None:
    for tensor, value in zip(peer.gradients, new, strict=True):
        tensor.copy_(value)


def run(peer: Any, new: list[torch.Tensor]) -> list[torch.Tensor]:
    """Run one step as hivemind does: again and again until it works."""
    give(peer, new)

    async def step() -> None:
        while True:
            try:
                await peer.attempt()
                return
            except (AllreduceException, MatchmakingException):
                continue

    asyncio.run(step())
    return [tensor.clone() for tensor in peer.gradients]


def state(peer: Any) -> list[torch.Tensor]:
    return [tensor.clone() for tensor in (*peer.error_feedback, *peer.qs, *peer.gradients)]


@pytest.mark.parametrize("phase", ["P", "Q"])
def test_a_failed_round_changes_nothing(phase: str) -> None:
    averager = Ours()
    run(averager, gradients(0))  # so that there is feedback to lose
    give(averager, gradients(1))
    before = state(averager)
    averager.breaks.append(phase)
    with pytest.raises(AllreduceException, match="the network is gone"):
        asyncio.run(averager.attempt())
    assert not averager.breaks
    for was, now in zip(before, state(averager), strict=True):
        assert torch.equal(was, now)


@pytest.mark.parametrize("phase", ["P", "Q"])
def test_a_retry_applies_the_gradient_once(phase: str) -> None:
    """Everything applied so far, and the feedback still owed, add up to all gradients."""
    breaking = Ours()
    steady = Ours()
    hivemind = Theirs.made()
    applied: dict[Any, Any] = {averager: 0 for averager in (breaking, steady, hivemind)}
    for seed in range(3):
        for peer in (breaking, hivemind):
            peer.breaks.extend([phase] if seed == 1 else [])
        for averager in applied:
            applied[averager] = applied[averager] + run(averager, gradients(seed))[0]
    given = sum(gradients(seed)[0] for seed in range(3))
    for averager in (breaking, steady):
        torch.testing.assert_close(applied[averager] + averager.error_feedback[0], given)
    torch.testing.assert_close(applied[breaking], applied[steady])
    # hivemind's second gradient arrives twice.
    twice = given + gradients(1)[0]
    torch.testing.assert_close(applied[hivemind] + hivemind.error_feedback[0], twice)


@pytest.mark.parametrize("size", [1e3, 1e-2, 1e-5])
def test_half_precision_factors_suit_gradients_of_any_size(size: float) -> None:
    """With P as large as the square of a gradient, half precision loses small and large ones.

    One peer has no codec, one has half precision, and one the default: no codec, but for P.
    """
    peers = [Ours(), Ours(), Ours()]
    peers[1].allreduce.codec, peers[2].plain = made("float16").build(), True
    sums = [torch.zeros(SHAPES[0]) for _ in peers]
    for _ in range(20):
        new = [gradient * size for gradient in gradients(5)]
        for total, peer in zip(sums, peers, strict=True):
            total += run(peer, new)[0]
    exact = 20 * size * gradients(5)[0]
    float32, *others = [float((total - exact).norm() / exact.norm()) for total in sums]
    assert max(others) < float32 + 0.01 < 0.5


def test_a_round_equals_hiveminds_from_the_same_q() -> None:
    ours, theirs = Ours(), Theirs.made()
    for mine, other in zip(ours.qs, theirs.qs, strict=True):
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
    monkeypatch.setattr(factors, "host_passes", lambda: kernels)
    whole, parts = Ours(), Ours()
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
    averager = Ours()
    for seed in range(3):
        run(averager, gradients(seed))
        before = [tensor.clone() for tensor in (*averager.error_feedback, *averager.qs)]
        run(averager, gradients(seed + 10))
        after = [tensor.clone() for tensor in (*averager.error_feedback, *averager.qs)]
        assert not any(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        averager.payload.factors.undo()
        for was, now in zip(before, (*averager.error_feedback, *averager.qs), strict=True):
            assert torch.equal(was, now)


def test_error_feedback_can_be_read_and_written_at_any_time() -> None:
    """It is computed when it is read, which changes nothing for later rounds."""
    asked, left_alone = Ours(), Ours()
    for seed in range(4):
        for mine, other in zip(
            run(asked, gradients(seed)), run(left_alone, gradients(seed)), strict=True
        ):
            torch.testing.assert_close(mine, other)
        assert torch.equal(asked.error_feedback[0], asked.error_feedback[0])
    for averager in (asked, left_alone):
        run(averager, gradients(9))
        averager.payload.factors.undo()
    for mine, other in zip(asked.error_feedback, left_alone.error_feedback, strict=True):
        torch.testing.assert_close(mine, other)
        assert mine.any()
    for owed in asked.error_feedback:
        owed.zero_()
    zeros = [torch.zeros(shape) for shape in SHAPES]
    assert not any(tensor.any() for tensor in run(asked, zeros)), "nothing was owed any more"


def test_peers_begin_with_the_same_q_and_leave_the_generator_alone() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    one = Ours()
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(2)
    same, other = Ours(), Ours("another run")
    for a, b, c in zip(one.qs, same.qs, other.qs, strict=True):
        assert torch.equal(a, b)
        assert not torch.equal(a, c)
    plain = [Theirs.made() for _ in range(2)]
    assert not torch.equal(plain[0].qs[0], plain[1].qs[0])


def test_bfloat16_gradients_are_factorised_in_float32() -> None:
    averager = Ours()
    half = [gradient.bfloat16() for gradient in gradients(0)]
    averager.gradients = half
    asyncio.run(averager.attempt())
    whole = run(Ours(), [g.float() for g in half])
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
