"""Nothing is lost and nothing is applied twice, whatever happens to a round."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.powersgd_fakes import InMemory, attempt, give, gradients_of, peers, state

#: Two matrices of one shape, a convolution, and a vector that travels as it is.
SHAPES = [(8, 6), (5,), (8, 6), (6, 2, 3, 3)]
LARGE = (0, 2, 3)
RANK = {"averager_rank": 2, "min_compression_ratio": 0.2}
PHASES = ("PHASE_P", "PHASE_Q")
LATER = ("PHASE_P2", "PHASE_Q2")


def gradients(generator: torch.Generator) -> list[torch.Tensor]:
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


class Ledger:
    """What a peer was given and what it has applied, of every matrix, in float64."""

    def __init__(self, averager: InMemory) -> None:
        self.averager = averager
        self.balance = [torch.zeros(SHAPES[index], dtype=torch.float64) for index in LARGE]

    def add(self, tensors: list[torch.Tensor], sign: int) -> None:
        for total, index in zip(self.balance, LARGE, strict=True):
            total.add_(tensors[index].double(), alpha=sign)

    async def check(self) -> None:
        await self.averager._take_back()
        for balance, owed in zip(self.balance, self.averager._ms, strict=True):
            torch.testing.assert_close(owed.double(), balance, rtol=0, atol=2e-4)


async def play(group: list[InMemory], rounds: list[dict[str, Any]], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    ledgers = [Ledger(averager) for averager in group]
    for played in rounds:
        own = [gradients(generator) for _ in group]
        for ledger, new in zip(ledgers, own, strict=True):
            give(ledger.averager, new)
            ledger.add(new, 1)
        trying = list(range(len(group)))
        for tried in played["attempts"]:
            for averager in group:
                await averager._take_back()  # as the next round does, to compare states
            before = {at: state(group[at]) for at in trying}
            given_up = played["given_up"] if tried is played["attempts"][-1] else ()
            room = await attempt([group[at] for at in trying], tried, given_up=given_up)
            succeeded = dict(zip(trying, room.succeeded, strict=True))
            for position, at in enumerate(trying):
                if succeeded[at] and position in given_up:
                    continue  # neither a failure nor a success: see below
                if succeeded[at]:
                    ledgers[at].add(gradients_of(group[at]), -1)
                else:
                    for was, now in zip(before[at], state(group[at]), strict=True):
                        assert torch.equal(was, now)
            late = {at for position, at in enumerate(trying) if position in given_up}
            trying = [at for at in trying if not succeeded[at] or at in late]
            if not trying:
                break
        for at in trying:  # the trainer applies its own gradient
            ledgers[at].add(own[at], -1)
        for ledger in ledgers:
            await ledger.check()


troubles = st.dictionaries(
    st.tuples(st.integers(0, 2), st.sampled_from(PHASES + LATER)),
    st.sampled_from(["before", "after", "hang", "partial"]),
    max_size=3,
)
rounds = st.fixed_dictionaries(
    {
        "attempts": st.lists(troubles, min_size=1, max_size=3),
        "given_up": st.lists(st.integers(0, 2), max_size=2),
    }
)


@settings(max_examples=60, deadline=None)
@given(
    count=st.integers(1, 3),
    played=st.lists(rounds, min_size=1, max_size=6),
    iterations=st.integers(1, 2),
    seed=st.integers(0, 2**31),
)
def test_what_was_applied_and_what_is_owed_add_up_to_all_gradients(
    count: int, played: list[dict[str, Any]], iterations: int, seed: int
) -> None:
    """Over rounds that fail in any phase, for any peer, are cancelled, retried or given up."""
    group = peers(count, SHAPES, num_iters_per_step=iterations, **RANK)
    asyncio.run(play(group, played, seed))


@pytest.mark.parametrize("what", ["before", "after", "hang", "partial"])
@pytest.mark.parametrize("phase", PHASES)
def test_each_trouble_is_what_its_name_says(what: str, phase: str) -> None:
    """Else the property above would hold of nothing: who fails, and who goes on."""
    group = peers(3, SHAPES, **RANK)
    for averager, seed in zip(group, range(3), strict=True):
        give(averager, gradients(torch.Generator().manual_seed(seed)))
    room = asyncio.run(attempt(group, {(1, phase): what}))
    harmless = what == "partial" and phase == "PHASE_Q"
    # A peer that leaves before P is averaged is missed there, by all; later, in Q, which is used.
    missed = what == "before" and phase == "PHASE_P"
    assert room.succeeded == [not missed, harmless, not missed]


def test_peers_agree_bit_for_bit_when_nothing_happens() -> None:
    group = peers(3, SHAPES, **RANK)
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        for averager in group:
            give(averager, gradients(generator))
        asyncio.run(attempt(group))
        first, *others = [gradients_of(averager) + averager._qs for averager in group]
        for other in others:
            assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_a_partial_p_fails_the_round_and_the_retry_is_clean() -> None:
    """Applied, a P of one's own would have mixed with Q that belong to another."""
    group, steady = peers(2, SHAPES, **RANK), peers(2, SHAPES, **RANK)
    own = [gradients(torch.Generator().manual_seed(seed)) for seed in range(2)]
    for team in (group, steady):
        for averager, new in zip(team, own, strict=True):
            give(averager, new)
    troubled = asyncio.run(attempt(group, {(0, "PHASE_P"): "partial", (1, "PHASE_P"): "partial"}))
    assert troubled.succeeded == [False, False]
    assert troubled.phases == ["PHASE_P"], "nobody goes on to Q"
    for team in (group, steady):
        assert asyncio.run(attempt(team)).succeeded == [True, True]
    for one, other in zip(group, steady, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(state(one), state(other), strict=True))


def test_a_partial_q_costs_accuracy_for_one_round_only() -> None:
    """Both stand in one space afterwards: P is averaged before it is used."""
    group = peers(2, SHAPES, **RANK)
    generator = torch.Generator().manual_seed(3)
    for trouble in ({(0, "PHASE_Q"): "partial"}, {}):
        for averager in group:
            give(averager, gradients(generator))
        asyncio.run(attempt(group, trouble))
        same = [torch.equal(a, b) for a, b in zip(group[0]._qs, group[1]._qs, strict=True)]
        assert all(same) == (not trouble)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("method", ["gram_schmidt", "qr"])
def test_what_is_not_finite_passes_and_leaves_nothing_behind(value: float, method: str) -> None:
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
    before = [q.clone() for q in averager._qs]
    give(averager, [torch.zeros(shape) for shape in SHAPES])
    asyncio.run(attempt([averager]))
    assert all(torch.equal(a, b) for a, b in zip(before, averager._qs, strict=True))
    give(averager, gradients(torch.Generator().manual_seed(0)))
    asyncio.run(attempt([averager]))
    assert all(tensor.abs().sum() > 0 for tensor in gradients_of(averager))
