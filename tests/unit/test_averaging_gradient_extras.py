"""Extra tensors in the rounds of gradients: their averages, their bytes, and their failures."""

from __future__ import annotations

import asyncio
import dataclasses
import math
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hivemind.averaging.allreduce import AveragingMode
from hivemind.averaging.matchmaking import MatchmakingException
from hivemind.utils import MSGPackSerializer
from hypothesis import given, settings
from hypothesis import strategies as st

from rayhive.averaging.averager import MeasuredAverager
from rayhive.averaging.gradient_averager import RayhiveGradientAverager, RayhivePowerSGDAverager
from rayhive.averaging.gradient_extras import GradientExtras, averageable
from rayhive.averaging.group_formation import NoOtherPeers
from rayhive.averaging.member_data import MemberData
from rayhive.averaging.payload_policy import STALE_WEIGHT
from rayhive.averaging.round_filter import detached
from rayhive.averaging.steps import StepTrace
from rayhive.compression.payload import payload
from rayhive.optim.parameter_rounds import period_of
from rayhive.registry import CODECS
from tests.unit.averaging_fakes import announced_group, unstarted
from tests.unit.meeting import LIMIT, Meeting, take_part

SHAPES = [(70, 50), (11,), (40, 30)]
#: A variance, a mean, and a matrix that PowerSGD would factorise if it were a gradient.
EXTRAS = [(64,), (7,), (40, 40)]
WEIGHTS = {"a": 3, "b": 12, "c": 33}
CODEC_NAMES = [name for name in CODECS.names() if CODECS.get(name).available()]
THRESHOLD = 500
RANK = {"averager_rank": 2, "min_compression_ratio": 0.3}


class Peer:
    """A peer with gradients and extra tensors of its own, in an averager without a process."""

    def __init__(self, seed: int, samples: int, rank: bool = False, **options: Any) -> None:
        generator = torch.Generator().manual_seed(seed)
        drawn = partial(torch.randn, generator=generator)
        self.own = [drawn(shape).abs() * 100 for shape in EXTRAS]
        kind: Any = RayhivePowerSGDAverager if rank else RayhiveGradientAverager
        options = {**options, **(RANK if rank else {})}
        self.averager = unstarted(kind, SHAPES, extra_tensors=self.own, **options)
        for parameter in self.averager.parameters:
            parameter.grad = drawn(parameter.shape)
        self.averager.accumulate_grads_(samples)
        self.averager.load_accumulators_into_averager_()

    @property
    def shared(self) -> list[torch.Tensor]:
        """Return all averaged tensors of the averager, with the extra tensors at the end."""
        with self.averager.get_tensors() as tensors:
            return list(tensors)

    async def meet(self, meeting: Meeting, name: str, **options: Any) -> None:
        await take_part(meeting, name, self.averager.rounds.payload, self.shared, **options)

    def take(self) -> list[torch.Tensor]:
        self.averager.extras.arrived = True
        self.averager.take_extras()
        return self.own


def swarm(**options: Any) -> dict[str, Peer]:
    return {name: Peer(seed, WEIGHTS[name], **options) for seed, name in enumerate(WEIGHTS)}


def codec(name: str) -> Any:
    return CODECS.get(name)().build(THRESHOLD if name == "size_adaptive" else None)


def run(peers: dict[str, Peer], codec: Any, **options: Any) -> Meeting:
    async def together() -> Meeting:
        meeting = Meeting(WEIGHTS, codec)
        meetings = (peer.meet(meeting, name, **options) for name, peer in peers.items())
        await asyncio.wait_for(asyncio.gather(*meetings), LIMIT)
        return meeting

    return asyncio.run(together())


def means(peers: dict[str, Peer]) -> list[torch.Tensor]:
    """Return the mean of each extra tensor over the samples of all peers."""
    total = sum(WEIGHTS.values())
    weighted = ([own.double() * WEIGHTS[n] / total for own in p.own] for n, p in peers.items())
    return [torch.stack(column).sum(0) for column in zip(*weighted, strict=True)]


@pytest.mark.parametrize("feedback", [False, True])
@pytest.mark.parametrize("rank", [False, True])
@pytest.mark.parametrize("name", CODEC_NAMES)
def test_no_codec_touches_extra_tensors(name: str, rank: bool, feedback: bool) -> None:
    """They are the mean over samples on every peer, to the bit the same, in the bytes foretold."""
    peers = swarm(rank=rank, error_feedback=feedback)
    expected = means(peers)
    meeting = run(peers, codec(name))
    found = [peer.take() for peer in peers.values()]
    for first, *others in zip(*found, strict=True):
        assert all(torch.equal(first, other) for other in others)
    for mean, own in zip(expected, found[0], strict=True):
        torch.testing.assert_close(own.double(), mean, rtol=1e-6, atol=1e-6)
    foretold = payload(
        SHAPES,
        codec=name,
        threshold=THRESHOLD if name == "size_adaptive" else None,
        powersgd_rank=2 if rank else None,
        min_compression_ratio=0.3 if rank else None,
        peers=len(WEIGHTS),
        extras=EXTRAS,
    )
    if foretold.exact:
        assert meeting.sent_bytes == 2 * (len(WEIGHTS) - 1) * foretold.bytes_per_transfer


def test_each_fragment_takes_the_extra_tensors_along() -> None:
    peers = swarm(fragments=2)
    expected, gradients = means(peers), peers["a"].shared[: len(SHAPES)]
    before = [gradient.clone() for gradient in gradients]
    run(peers, codec("none"))
    moved = [not torch.equal(was, now) for was, now in zip(before, gradients, strict=True)]
    assert any(moved) and not all(moved)
    for mean, own in zip(expected, peers["a"].take(), strict=True):
        torch.testing.assert_close(own.double(), mean, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("rank", "phase"), [(False, "dense"), (True, "P"), (True, "Q")])
def test_a_failed_round_changes_no_extra_tensor(rank: bool, phase: str) -> None:
    peers = swarm(rank=rank)
    expected = means(peers)
    before = {name: [own.clone() for own in peer.own] for name, peer in peers.items()}
    with pytest.raises(RuntimeError, match="the network is gone"):
        run(peers, codec("uniform8"), fails=phase)
    for name, peer in peers.items():
        peer.averager.take_extras()
        sent = peer.shared[len(SHAPES) :]
        for was, own, shared in zip(before[name], peer.own, sent, strict=True):
            assert torch.equal(was, own) and torch.equal(was, shared)
    run(peers, codec("uniform8"))
    for mean, own in zip(expected, peers["c"].take(), strict=True):
        torch.testing.assert_close(own.double(), mean, rtol=1e-6, atol=1e-6)


def average(tensors: list[torch.Tensor], value: float) -> None:
    """Let an average of extra tensors come out of a round."""
    averager = unstarted(RayhiveGradientAverager, SHAPES, extra_tensors=tensors)
    averager.load_accumulators_into_averager_()
    with averager.get_tensors() as shared:
        for own, copy in zip(tensors, shared[len(SHAPES) :], strict=True):
            assert (copy.dtype, copy.device.type) == (torch.float32, "cpu")
            assert torch.equal(copy, own.float().cpu())
            copy.fill_(value)
    averager.extras.arrived = True
    averager.take_extras()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_extra_tensors_of_any_type_are_averaged_in_float32(dtype: torch.dtype) -> None:
    own = [torch.ones(3, dtype=dtype), torch.ones((), dtype=dtype), torch.ones(0, dtype=dtype)]
    average(own, 1.5)
    assert [each.tolist() for each in own] == [[1.5] * 3, 1.5, []]
    assert [each.dtype for each in own] == [dtype] * 3


# -- averages that arrive late ---------------------------------------------------------------------

#: Value when it was sent, value now, and the average.
values = st.floats(0, 1e6, width=32)
triples = st.lists(st.tuples(values, values, values), min_size=1, max_size=8)


def late(sent: list[float], now: list[float], average: list[float]) -> torch.Tensor:
    own = torch.zeros(len(sent))
    extras = GradientExtras([own])
    extras.delayed = True
    own.copy_(torch.tensor(sent))
    extras.load()
    own.copy_(torch.tensor(now))
    extras.shared[0].copy_(torch.tensor(average))
    extras.take()
    assert not extras.arrived
    return own


@settings(max_examples=200, deadline=None)
@given(triples)
def test_late_averages_keep_what_batches_changed(rows: list[tuple[float, float, float]]) -> None:
    sent, now, average = (list(column) for column in zip(*rows, strict=True))
    found = late(sent, now, average).tolist()
    for was, is_, mean, new in zip(sent, now, average, found, strict=True):
        assert min(is_, mean) <= new <= max(is_, mean), "a variance stays a variance"
        if was == is_:
            assert new == mean
        if was == mean:
            assert new == pytest.approx(is_, rel=1e-6, abs=0.1 * 2**-17 * max(was, 1))


def test_a_late_average_moves_a_value_by_as_much_as_it_moved_the_one_that_was_sent() -> None:
    assert late([1.0, 5.0], [3.0, 2.0], [9.0, 1.0]).tolist() == [9.0, 1.0]  # not past the average
    assert late([1.0, 5.0], [0.5, 6.0], [2.0, 3.0]).tolist() == [1.5, 4.0]


def test_a_value_that_is_not_finite_becomes_the_average() -> None:
    found = late([1.0, 1.0, 1.0], [math.nan, math.inf, -math.inf], [3.0, 4.0, 5.0])
    assert found.tolist() == [3.0, 4.0, 5.0]


# -- values that are not finite, and groups without samples ----------------------------------------


def norm(averager: Any) -> float:
    """Return the norm that an averager announces of its tensors."""
    gathered = MemberData(None, 0, MSGPackSerializer.dumps(1)).dumps()
    data = MemberData.loads(asyncio.run(averager.rounds.announced(gathered)))
    found = detached(data.content)[1]
    assert found is not None
    return found.norm


def test_extra_tensors_do_not_count_in_the_outlier_filter() -> None:
    plain, peer = Peer(0, 3), Peer(0, 3)
    for tensor in peer.shared[len(SHAPES) :]:
        tensor.fill_(1e30)
    assert norm(peer.averager) == norm(plain.averager)


@pytest.mark.parametrize("broken", [("b",), ("a", "b", "c")])
def test_statistics_that_are_not_finite_stop_no_round_and_heal(broken: tuple[str, ...]) -> None:
    """A peer whose statistics overflowed enters with its last average, and takes the new one."""
    peers = swarm()
    run(peers, codec("uniform8"))
    last = [own.clone() for own in peers["a"].take()]
    for name, peer in peers.items():
        peer.take()
        if name in broken:
            peer.own[0][3], peer.own[1][:] = math.inf, math.nan
        peer.averager.load_accumulators_into_averager_()
        assert math.isfinite(norm(peer.averager))
    run(peers, codec("uniform8"))
    for peer in peers.values():
        for own, was in zip(peer.take(), last, strict=True):
            torch.testing.assert_close(own, was)


def test_masks_are_left_to_each_peer() -> None:
    masks = [torch.full((3, 3), value) for value in (-math.inf, torch.finfo(torch.float32).min)]
    statistics = torch.ones(4)
    assert [averageable(each) for each in (*masks, torch.arange(3), statistics)] == [
        False, False, False, True,
    ]  # fmt: skip
    assert averageable(torch.zeros(0))
    extras = [*masks, statistics]
    assert [id(each) for each in period_of("auto", "mean", extra_tensors=extras)[1]] == [
        id(statistics)
    ]


def weight_of(averager: Any, group: Any, weight: float, monkeypatch: pytest.MonkeyPatch) -> float:
    """Return the weight with which a peer enters the all-reduce of a group."""
    given: list[float] = []

    async def allreduce(self: Any, *_: Any, **options: Any) -> None:
        given.append(options["weight"])
        raise RuntimeError("the network is gone")

    monkeypatch.setattr(MeasuredAverager, "_run_allreduce_inplace_", allreduce)
    averager.cancellations = SimpleNamespace(send=lambda *_: None)
    with pytest.raises(MatchmakingException, match="the network is gone"):
        asyncio.run(averager.rounds.run(averager, group, StepTrace(), weight=weight))
    return given[0]


def test_a_peer_without_samples_has_a_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    """The average over no samples would be 0, which is no variance."""
    group = announced_group(1.0, 1.0)
    assert weight_of(Peer(0, 3).averager, group, 0.0, monkeypatch) == STALE_WEIGHT
    assert weight_of(Peer(0, 3).averager, group, 3.0, monkeypatch) == 3.0
    plain = unstarted(RayhiveGradientAverager, SHAPES)
    assert weight_of(plain, group, 0.0, monkeypatch) == 0.0


def test_a_refused_peer_and_auxiliary_ones_have_nothing_to_average() -> None:
    group = announced_group(math.nan, 1.0)
    alone = MemberData.loads(group.gathered[1])
    reducer = dataclasses.replace(alone, mode=AveragingMode.AUX.value).dumps()
    group = dataclasses.replace(group, gathered=(group.gathered[0], reducer))
    averager = Peer(0, 3).averager
    with pytest.raises(NoOtherPeers):
        asyncio.run(averager.rounds.run(averager, group, StepTrace(), weight=3.0))


def test_an_averager_that_loads_in_a_way_of_its_own_gets_no_extra_tensors() -> None:
    class Own(RayhiveGradientAverager):
        def load_accumulators_into_averager_(self) -> None:
            """Load nothing."""

    class Other(RayhiveGradientAverager):
        """Nothing of its own."""

    extras = [torch.ones(3)]
    found = [
        period_of("auto", "mean", extra_tensors=extras, grad_averager_factory=each)
        for each in (Own, Other)
    ]
    assert found == [(1, []), (None, extras)]
