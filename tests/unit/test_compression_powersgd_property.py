"""No gradient is lost or counted twice, whatever happens to a round and to the swarm."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rayhive.compression.powersgd.kernels import gram_schmidt
from rayhive.compression.powersgd.shapes import matrix_dims
from tests.unit.powersgd_fakes import InMemory, Room, attempt, give, gradients_of, peers, state

#: Two matrices of one shape, a convolution, and a vector that travels as it is.
SHAPES = [(8, 6), (5,), (8, 6), (6, 2, 3, 3)]
LARGE = (0, 2, 3)
RANK = {"averager_rank": 2, "min_compression_ratio": 0.2}
PHASES = ("P", "Q")
LATER = ("P2", "Q2")
#: float32 over a few rounds, in which a sum over 64 samples may become the mean of one.
CLOSE: dict[str, float] = {"rtol": 1e-4, "atol": 5e-3}


def gradients(generator: torch.Generator) -> list[torch.Tensor]:
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


class Owed:
    """The sum over samples that a peer owes of every matrix, in float64.

    The peer's average over samples is a mean, so a gradient that it computes of ``w`` samples
    adds ``w`` times that; the factors that it puts into a round's average take ``w`` times their
    product away. Whatever the others do, the rest is its error feedback, in the weight of the
    last round that it was in.
    """

    def __init__(self, averager: InMemory) -> None:
        self.averager = averager
        self.sums = [
            torch.zeros(matrix_dims(SHAPES[index]), dtype=torch.float64) for index in LARGE
        ]
        self.weight = 1.0

    async def check(self) -> None:
        await self.averager.payload.undo_given_up()
        for total, owed in zip(
            self.sums, self.averager.payload.factors.error_feedback, strict=True
        ):
            expected = total / self.weight
            torch.testing.assert_close(owed.double().view(total.shape), expected, **CLOSE)


def put_in(room: Room, iterations: int) -> dict[int, list[torch.Tensor]]:
    """Return what every peer's factors in the last average stand for, by position, in float64."""
    number = "" if iterations == 1 else str(iterations)
    found = {}
    for position, sent in room.given.get(f"Q{number}", {}).items():
        ps = [gram_schmidt(p[None])[0].double() for p in room.mean(f"P{number}")]
        pairs = zip(ps, sent, strict=False)  # behind the Q come tensors without factors
        found[position] = [p @ q.double().T for p, q in pairs]
    return found


async def play(played: list[dict[str, Any]], iterations: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    swarm: dict[int, Owed] = {}
    for round_ in played:
        samples = {at: count for at, count in enumerate(round_["samples"]) if count is not None}
        swarm = {at: owed for at, owed in swarm.items() if at in samples}  # others died
        for at in samples.keys() - swarm.keys():
            swarm[at] = await joiner(swarm, iterations)
        own = {at: gradients(generator) for at in samples}
        for at, owed in swarm.items():
            give(owed.averager, own[at])
        trying = sorted(samples)
        for tried in round_["attempts"]:
            for owed in swarm.values():
                await (
                    owed.averager.payload.undo_given_up()
                )  # as the next round does, to compare states
            before = {at: state(swarm[at].averager) for at in trying}
            last = tried is round_["attempts"][-1]
            room = await attempt(
                [swarm[at].averager for at in trying],
                tried,
                given_up=round_["given_up"] if last else (),
                weights=[samples[at] for at in trying],
            )
            entered = put_in(room, iterations)
            failed = []
            for position, at in enumerate(trying):
                owed, weight = swarm[at], samples[at]
                if not room.succeeded[position]:
                    failed.append(at)
                    for was, now in zip(before[at], state(owed.averager), strict=True):
                        assert torch.equal(was, now)
                    continue
                if last and position in round_["given_up"]:
                    continue  # taken back
                if weight:
                    add(owed, weight, own[at], entered[position])
                if "partial" not in {tried.get((position, phase)) for phase in PHASES + LATER}:
                    applied = gradients_of(owed.averager)
                    weights = {one: samples[trying[one]] for one in entered}
                    check_average(applied, entered, weights)
            trying = failed
            if not trying:
                break
        # Those that failed apply their own gradients, and owe what they owed.
        for owed in swarm.values():
            await owed.check()


async def joiner(swarm: dict[int, Owed], iterations: int) -> Owed:
    """Return a peer that has downloaded Q, and owes nothing."""
    (averager,) = peers(1, SHAPES, num_iters_per_step=iterations, **RANK)
    for source in list(swarm.values())[:1]:
        for own, new in zip(
            averager.payload.factors.qs, source.averager.payload.factors.qs, strict=True
        ):
            own.copy_(new)
    return Owed(averager)


def add(owed: Owed, weight: float, own: list[torch.Tensor], put: list[torch.Tensor]) -> None:
    """Note that a peer computed gradients, and that its factors entered an average."""
    for total, index, contributed in zip(owed.sums, LARGE, put, strict=True):
        total += weight * (own[index].double().view(total.shape) - contributed)
    owed.weight = weight


def check_average(
    applied: list[torch.Tensor], entered: dict[int, list[torch.Tensor]], weights: dict[int, float]
) -> None:
    """Hold what a peer applied against the weighted mean of the contributions of all peers."""
    for at, index in enumerate(LARGE):
        total = sum(weights[one] * put[at] for one, put in entered.items())
        mean = total / (sum(weights.values()) or 1.0)
        torch.testing.assert_close(applied[index].double().view(mean.shape), mean, **CLOSE)


troubles = st.dictionaries(
    st.tuples(st.integers(0, 2), st.sampled_from(PHASES + LATER)),
    st.sampled_from(["before", "after", "hang", "partial"]),
    max_size=3,
)
#: Samples of a peer in a round; None while it is dead. After that comes another one.
counts = st.one_of(st.none(), st.just(0), st.integers(1, 64))
rounds = st.fixed_dictionaries(
    {
        "samples": st.tuples(st.integers(1, 64), counts, counts),
        "attempts": st.lists(st.one_of(st.just({}), troubles), min_size=1, max_size=3),
        "given_up": st.lists(st.integers(0, 2), max_size=2),
    }
)


@settings(max_examples=60, deadline=None)
@given(
    played=st.lists(rounds, min_size=1, max_size=6),
    iterations=st.integers(1, 2),
    seed=st.integers(0, 2**31),
)
def test_contributions_and_error_feedback_add_up_to_all_samples(
    played: list[dict[str, Any]], iterations: int, seed: int
) -> None:
    """Weights that change, joins, deaths, and rounds that fail in any phase or are given up.

    With the weights w, the feedback M that is in the weight v of an earlier round, and the
    product C of P and the peer's own Q, each peer that is in a round keeps
    w C + w M' = v M + w g, and every peer applies the mean of C with the weights w.
    """
    asyncio.run(play(played, iterations, seed))


@settings(max_examples=40, deadline=None)
@given(
    samples=st.lists(st.lists(st.integers(1, 64), min_size=1, max_size=3), min_size=1, max_size=8),
    seed=st.integers(0, 2**31),
)
def test_a_round_applies_and_owes_the_gradients_of_all_samples(
    samples: list[list[int]], seed: int
) -> None:
    """The swarm as a whole: W a + sum of w M' = sum of v M + sum of w g, with W the sum of w.

    Peers come and go; a peer that is not in a round keeps its error feedback.
    """
    generator = torch.Generator().manual_seed(seed)
    swarm = peers(3, SHAPES, **RANK)
    sums = [torch.zeros(3, *SHAPES[index], dtype=torch.float64) for index in LARGE]
    for weights in samples:
        group = swarm[: len(weights)]
        own = [gradients(generator) for _ in group]
        for averager, new in zip(group, own, strict=True):
            give(averager, new)
        assert all(asyncio.run(attempt(group, weights=weights)).succeeded)
        w = torch.tensor(weights, dtype=torch.float64).view(-1, 1, 1)
        applied = gradients_of(group[0])
        for at, index in enumerate(LARGE):
            shape = (len(group), *SHAPES[index])
            owed = torch.stack(
                [averager.payload.factors.error_feedback[at].double() for averager in group]
            )
            after = (w * owed.flatten(1).unsqueeze(1)).view(shape)
            computed = torch.stack([new[index].double() for new in own])
            computed = (w * computed.flatten(1).unsqueeze(1)).view(shape).sum(0)
            kept = sums[at][: len(group)].sum(0)
            total = w.sum() * applied[index].double() + after.sum(0)
            scale = float(w.sum()) + float(kept.abs().max())
            torch.testing.assert_close(total, kept + computed, rtol=0, atol=1e-5 * scale)
            sums[at][: len(group)] = after


@pytest.mark.parametrize("what", ["before", "after", "hang", "partial"])
@pytest.mark.parametrize("phase", PHASES)
def test_each_kind_of_trouble_has_its_effect(what: str, phase: str) -> None:
    """Otherwise the property above would hold trivially: failing peers and continuing ones."""
    group = peers(3, SHAPES, **RANK)
    for averager, seed in zip(group, range(3), strict=True):
        give(averager, gradients(torch.Generator().manual_seed(seed)))
    room = asyncio.run(attempt(group, {(1, phase): what}))
    harmless = what == "partial" and phase == "Q"
    # A peer that leaves before P is averaged is missed there, by all; later, in Q, which is used.
    missed = what == "before" and phase == "P"
    assert room.succeeded == [not missed, harmless, not missed]


def test_peers_agree_bit_for_bit_when_nothing_happens() -> None:
    group = peers(3, SHAPES, **RANK)
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        for averager in group:
            give(averager, gradients(generator))
        asyncio.run(attempt(group))
        first, *others = [
            gradients_of(averager) + averager.payload.factors.qs for averager in group
        ]
        for other in others:
            assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_a_partial_p_fails_the_round_and_the_retry_is_clean() -> None:
    """Applied, a P of one's own would have mixed with Q that belong to another."""
    group, steady = peers(2, SHAPES, **RANK), peers(2, SHAPES, **RANK)
    own = [gradients(torch.Generator().manual_seed(seed)) for seed in range(2)]
    for team in (group, steady):
        for averager, new in zip(team, own, strict=True):
            give(averager, new)
    troubled = asyncio.run(attempt(group, {(0, "P"): "partial", (1, "P"): "partial"}))
    assert troubled.succeeded == [False, False]
    assert troubled.phases == ["P"], "no peer goes on to Q"
    for team in (group, steady):
        assert asyncio.run(attempt(team)).succeeded == [True, True]
    for one, other in zip(group, steady, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(state(one), state(other), strict=True))


def test_a_partial_q_costs_accuracy_for_one_round_only() -> None:
    """Both stand in one space afterwards: P is averaged before it is used."""
    group = peers(2, SHAPES, **RANK)
    generator = torch.Generator().manual_seed(3)
    for trouble in ({(0, "Q"): "partial"}, {}):
        for averager in group:
            give(averager, gradients(generator))
        asyncio.run(attempt(group, trouble))
        same = [
            torch.equal(a, b)
            for a, b in zip(group[0].payload.factors.qs, group[1].payload.factors.qs, strict=True)
        ]
        assert all(same) == (not trouble)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("method", ["gram_schmidt", "qr"])
def test_values_that_are_not_finite_affect_one_round_only(value: float, method: str) -> None:
    group = peers(2, SHAPES, orthogonalisation=method, **RANK)
    generator = torch.Generator().manual_seed(1)
    for bad in (False, True, False):
        own = [gradients(generator) for _ in group]
        if bad:
            own[1][0][3, 2] = value
        before = [state(averager)[: 2 * len(LARGE)] for averager in group]
        for averager, new in zip(group, own, strict=True):
            give(averager, new)
        assert asyncio.run(attempt(group)).succeeded == [True, True]
        for averager, was in zip(group, before, strict=True):
            after = gradients_of(averager)
            finite = [bool(tensor.isfinite().all()) for tensor in after]
            assert finite == [not bad, True, True, True]
            if bad:
                assert after[0].isnan().all(), "as when gradients are averaged as they are"
                for at in (0, len(LARGE)):  # feedback and Q of this matrix
                    assert torch.equal(was[at], state(averager)[at])
            assert all(tensor.isfinite().all() for tensor in state(averager)[: 2 * len(LARGE)])


def test_a_gradient_of_zeros_does_not_kill_the_factors() -> None:
    """hivemind's Q becomes zero with it, and every later P: that gradient never moves again."""
    (averager,) = peers(1, SHAPES, **RANK)
    before = [q.clone() for q in averager.payload.factors.qs]
    give(averager, [torch.zeros(shape) for shape in SHAPES])
    asyncio.run(attempt([averager]))
    assert all(torch.equal(a, b) for a, b in zip(before, averager.payload.factors.qs, strict=True))
    give(averager, gradients(torch.Generator().manual_seed(0)))
    asyncio.run(attempt([averager]))
    assert all(tensor.abs().sum() > 0 for tensor in gradients_of(averager))
