"""Refusals of a group, derived from the announcements of its members."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hivemind.averaging.partition import BannedException
from hivemind.utils import MSGPackSerializer

from rayhive.averaging.aggregation import RULES, Rule, SteadyReducer
from rayhive.averaging.member_data import MemberData
from rayhive.averaging.outlier_filter import (
    LEANING,
    LEAST_LEAN,
    NORM_FACTOR,
    REMEMBERED,
    Announcement,
    OutlierFilter,
    directions,
    judge,
)
from rayhive.averaging.round_filter import LARGE, announced, attached, detached
from rayhive.averaging.tensor_summary import Sketcher, cosine, norm_of
from rayhive.spec import OutlierFilterRule
from rayhive.spec.swarm import OUTLIER_FILTERS


def said(*norms: float, usual: float | None = None) -> dict[int, Announcement]:
    return {peer: Announcement(norm, usual) for peer, norm in enumerate(norms)}


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("others", [(1.0,), (1.0, 2.0, 0.5), ()])
@pytest.mark.parametrize("rule", OUTLIER_FILTERS)
def test_norms_that_are_not_finite_are_refused(
    bad: float, others: tuple[float, ...], rule: OutlierFilterRule
) -> None:
    refused = judge(said(bad, *others), rule)
    assert refused.keys() == {0} and refused[0].reason == "not_finite"


@pytest.mark.parametrize(
    ("norms", "usual", "refused"),
    [
        ((1000.0, 1.0, 1.2, 0.9), None, {0}),
        ((1000.0, 1.0), None, {0}),
        ((1000.0, 1.0), 1.0, {0}),
        ((1000.0, 900.0, 1.0, 1.1), None, {0, 1}),
        ((1000.0, 900.0), 1.0, set()),  # all grow
        ((1000.0, 900.0, 1.0), 1.0, set()),  # the median has grown
        ((10.0, 1.0), None, set()),
        ((0.6, 0.01), None, set()),  # sixty times as large, and honest
        ((10.0, 0.0, 0.0, 0.0), None, set()),  # the others have computed nothing yet
        ((10.0, 0.0), 1.0, set()),
        ((1000.0, 0.0), 1.0, {0}),
        ((0.0, 0.0), None, set()),
        ((5.0,), None, set()),
    ],
)
def test_norms_far_above_the_usual_one_are_refused(
    norms: tuple[float, ...], usual: float | None, refused: set[int]
) -> None:
    found = judge(said(*norms, usual=usual))
    assert set(found) == refused
    for peer, refusal in found.items():
        assert refusal.reason == "norm" and refusal.norm == norms[peer]
        assert refusal.bound is not None and refusal.bound < norms[peer]


def test_the_bound_is_a_multiple_of_the_usual_norm() -> None:
    assert not judge(said(NORM_FACTOR * 0.99, 1.0, 1.0))
    assert judge(said(NORM_FACTOR * 1.01, 1.0, 1.0))


def test_a_usual_norm_that_is_not_finite_is_ignored() -> None:
    announced = {
        0: Announcement(1000.0, math.inf),
        1: Announcement(1.0, 1.0),
        2: Announcement(1.0, 1.0),
    }
    assert set(judge(announced)) == {0}


# -- what a peer remembers -------------------------------------------------------------------------


def rounds_of(
    filters: list[OutlierFilter], norms: Callable[[int], Sequence[float]], rounds: int
) -> list[dict[int, Any]]:
    """Run rounds without a network; return the refused peers of each."""
    verdicts = []
    for number in range(rounds):
        each = zip(filters, norms(number), strict=True)
        announced = {
            peer: f.announce([torch.tensor([norm])]) for peer, (f, norm) in enumerate(each)
        }
        verdicts.append(filters[0].judge(announced))
        assert all(f.judge(announced).keys() == verdicts[-1].keys() for f in filters), "one verdict"
        for peer, each_filter in enumerate(filters):
            each_filter.learn(announced, peer)
    return verdicts


def refused_rounds(verdicts: list[dict[int, Any]], peer: int) -> list[int]:
    return [number for number, verdict in enumerate(verdicts) if peer in verdict]


def test_two_peers_with_very_different_norms_are_both_accepted() -> None:
    verdicts = rounds_of([OutlierFilter(), OutlierFilter()], lambda _: (0.01, 0.6), 200)
    assert not any(verdicts)


@pytest.mark.parametrize("peers", [2, 3, 4])
@pytest.mark.parametrize("factor", [150.0, 1e4])
def test_a_change_of_scale_that_lasts_is_accepted_soon(peers: int, factor: float) -> None:
    def norms(number: int) -> list[float]:
        return [factor if number >= 20 else 1.0, *[1.0] * (peers - 1)]

    verdicts = rounds_of([OutlierFilter() for _ in range(peers)], norms, 60)
    assert refused_rounds(verdicts, 0) == list(range(20, 20 + REMEMBERED // 2 + 1))
    assert not any(refused_rounds(verdicts, peer) for peer in range(1, peers))


@pytest.mark.parametrize("peers", [2, 3, 4])
@pytest.mark.parametrize("begins", [0, 1, 5, 30])
def test_a_gradient_a_thousand_times_too_large_is_refused_whenever_it_comes(
    peers: int, begins: int
) -> None:
    def norms(number: int) -> list[float]:
        wobble = 1.5 ** (number % 5 - 2)
        return [wobble * (1000.0 if begins <= number < begins + 3 else 1.0), *[1.0] * (peers - 1)]

    verdicts = rounds_of([OutlierFilter() for _ in range(peers)], norms, 50)
    assert refused_rounds(verdicts, 0) == [begins, begins + 1, begins + 2]


def test_norms_that_all_grow_or_shrink_together_are_accepted() -> None:
    for factor in (0.2, 3.0):
        verdicts = rounds_of(
            [OutlierFilter() for _ in range(3)],
            lambda n, f=factor: [f**n, 2 * f**n, 0.5 * f**n],
            20,
        )
        assert not any(verdicts)


def test_a_joining_peer_starts_with_the_usual_norm_of_its_group() -> None:
    filters = [OutlierFilter() for _ in range(3)]
    rounds_of(filters, lambda _: (1.0, 2.0, 0.5), 30)
    filters.append(OutlierFilter())
    # it has computed nothing at first, is 60 times as large as the others, and broken once
    norms = [0.0, 60.0, 60.0, 60_000.0, *[60.0] * 10]
    verdicts = rounds_of(filters, lambda n: (1.0, 2.0, 0.5, norms[n]), len(norms))
    assert refused_rounds(verdicts, 3) == [3]
    assert not any(refused_rounds(verdicts, peer) for peer in range(3))


def test_a_peer_without_contributing_company_is_never_refused() -> None:
    verdicts = rounds_of([OutlierFilter(), OutlierFilter()], lambda n: (10.0**n, 0.0), 6)
    assert not refused_rounds(verdicts[:3], 0), "nothing said what is usual"


def test_norms_that_are_not_finite_are_not_remembered() -> None:
    filters = [OutlierFilter(), OutlierFilter()]
    rounds_of(filters, lambda n: (math.nan if n % 2 else 1.0, 1.0), 40)
    assert filters[0].announce([torch.ones(1)]).usual == 1.0


@pytest.mark.parametrize(("rule", "refused"), [("norm", False), ("direction", True)])
def test_the_direction_of_an_honest_outlier_is_refused_by_option_only(
    rule: OutlierFilterRule, refused: bool
) -> None:
    """At a shared optimum the gradients of peers with different data sum to zero."""
    gradients = [torch.tensor([1.0, side]) for side in (0.3, 0.0, -0.3)]
    gradients.append(-torch.stack(gradients).sum(0))
    filters, verdicts = [OutlierFilter(rule) for _ in range(4)], []
    for _ in range(2 * LEANING):
        announced = {p: f.announce([gradients[p]]) for p, f in enumerate(filters)}
        verdicts.append(filters[0].judge(announced))
        for peer, each in enumerate(filters):
            each.learn(announced, peer)
    assert refused_rounds(verdicts, 3) == (list(range(LEANING, 2 * LEANING)) if refused else [])


@pytest.mark.parametrize("content", [7, [7, True], None, {"a": 1}, []], ids=str)
def test_an_announcement_is_sent_with_the_gathered_data(content: Any) -> None:
    gathered = MSGPackSerializer.dumps(content)
    announcement = Announcement(2.5, None, b"sketch")
    assert detached(attached(gathered, announcement)) == (gathered, announcement)
    assert detached(gathered) == (gathered, None)


@pytest.mark.parametrize("elements", [3, LARGE])
def test_an_announced_norm_is_that_of_one_step(elements: int) -> None:
    member = MemberData(None, 0, MSGPackSerializer.dumps([7]), steps=200)
    summed = 200 * torch.randn(elements, generator=torch.Generator().manual_seed(0))
    data = asyncio.run(announced(OutlierFilter("direction"), member.dumps(), [summed]))
    assert MemberData.loads(data).steps == 200
    _, announcement = detached(MemberData.loads(data).content)
    one = OutlierFilter("direction").announce([summed / 200])
    assert announcement is not None and announcement.norm == pytest.approx(one.norm, 1e-4)
    sketches = [
        torch.tensor(np.frombuffer(each.sketch, np.float16)) for each in (announcement, one)
    ]
    torch.testing.assert_close(*sketches, rtol=0, atol=2e-3)


def test_a_fast_peer_with_many_local_steps_is_accepted() -> None:
    filters = [OutlierFilter(), OutlierFilter()]
    told = [one.announce([torch.ones(9) * n], n) for one, n in zip(filters, (1, 500), strict=True)]
    assert not judge(dict(enumerate(told)))


def test_a_norm_that_overflows_half_precision_is_finite() -> None:
    assert norm_of([torch.full((4,), 6e4, dtype=torch.float16)]) == pytest.approx(12e4)


SIZES = [(70, 100), (5000,), (3,)]


def tensors(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in SIZES]


def test_sketches_keep_norms_and_angles() -> None:
    sketcher = Sketcher([tensor.numel() for tensor in tensors(0)])
    ratios, angles = [], []
    for seed in range(0, 60, 2):
        a, b = tensors(seed), tensors(seed + 1)
        near = [x + y for x, y in zip(a, b, strict=True)]  # cosine 0.71 with each
        ratios.append(float(sketcher(a).norm()) / norm_of(a))
        angles.append(cosine(sketcher(a), sketcher(near)))
        assert torch.allclose(sketcher(near), sketcher(a) + sketcher(b), atol=1e-2)
        assert cosine(sketcher(a), -sketcher(a)) == pytest.approx(-1)
    assert sum(ratios) / len(ratios) == pytest.approx(1, abs=0.05)
    assert sum(angles) / len(angles) == pytest.approx(0.5**0.5, abs=0.05)


def test_directions_show_the_peer_with_the_opposite_gradient() -> None:
    sketcher = Sketcher([1000])
    common = torch.ones(1000)
    announced = {}
    for peer, sign in enumerate((1, 1, 1, -1)):
        noise = torch.randn(1000, generator=torch.Generator().manual_seed(peer))
        own = [sign * (common + 0.5 * noise)]
        direction = sketcher(own) / norm_of(own)
        announced[peer] = Announcement(norm_of(own), None, direction.half().numpy().tobytes())
    found = directions(announced)
    assert found[3] < -0.7 and min(found[peer] for peer in range(3)) > 0.3
    assert directions({0: announced[0], 1: announced[3], 2: Announcement(0.0)}) == {}, (
        "of two, which?"
    )


@pytest.mark.parametrize(
    ("leans", "refused"),
    [
        ((0.3, 0.2, -0.1), set()),
        ((0.3, 0.2, LEAST_LEAN - 0.01), {2}),
        ((0.3, None, LEAST_LEAN - 0.01), {2}),
        ((-0.5, -0.5), set()),
        ((0.3, 0.3, -0.5, -0.5), set()),  # undecidable which half is wrong
    ],
)
def test_a_minority_with_a_lasting_opposite_direction_is_refused(
    leans: tuple[float | None, ...], refused: set[int]
) -> None:
    announced = {peer: Announcement(1.0, 1.0, b"", lean) for peer, lean in enumerate(leans)}
    assert not judge(announced), "honest peers whose data differ lean so, too"
    found = judge(announced, "direction")
    assert set(found) == refused
    assert all((r.reason, r.lean) == ("direction", leans[peer]) for peer, r in found.items())


# -- reducers, and senders whose parts do not match their announcements ----------------------------


def average(parts: list[torch.Tensor], weights: list[float], **settings: Any) -> list[Any]:
    async def body() -> list[Any]:
        reducer = SteadyReducer((parts[0].shape,), len(parts))
        for name, value in settings.items():
            setattr(reducer, name, value)

        async def send(at: int) -> Any:
            try:
                return await reducer.accumulate_part(at, 0, parts[at], weights[at])
            except BannedException:
                reducer.on_sender_failed(at)
                return None

        results = await asyncio.gather(*map(send, range(len(parts))))
        return [*results, reducer.refused]

    return asyncio.run(body())


def test_a_reducer_refuses_parts_that_are_not_finite_and_averages_the_rest() -> None:
    parts = [torch.tensor([1.0, math.nan]), torch.tensor([2.0, 2.0]), torch.tensor([4.0, 4.0])]
    first, second, third, refused = average(parts, [1.0, 1.0, 3.0])
    assert first is None and refused == {0}
    assert second.tolist() == third.tolist() == [3.5, 3.5]


@pytest.mark.parametrize("sent", [0.0, math.nan, 1e9])
def test_an_excluded_sender_is_answered_and_does_not_count(sent: float) -> None:
    parts = [torch.full((2,), sent), torch.full((2,), 2.0)]
    first, second, refused = average(parts, [5.0, 1.0], excluded=frozenset({0}))
    assert first.tolist() == second.tolist() == [2.0, 2.0] and not refused


def test_an_average_without_weight_is_zero() -> None:
    first, second, _ = average([torch.ones(2), torch.ones(2)], [0.0, 0.0])
    assert first.tolist() == second.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("rule", [rule for rule in RULES.values() if rule is not None])
def test_a_rule_gets_the_counted_parts_and_every_sender_its_result(rule: Rule) -> None:
    values = [1.0, 1.1, 0.9, 1e6, math.nan]
    parts = [torch.full((2,), value) for value in values]
    excluded = frozenset({4})
    *answers, refused = average(parts, [1.0, 2.0, 1.0, 1.0, 1.0], rule=rule, excluded=excluded)
    expected = rule([1.0, 2.0, 1.0, 1.0], parts[:4])
    assert all(torch.equal(answer, expected) for answer in answers) and not refused
    assert 0.9 <= expected[0] <= 1.2, "the one that is far off has no say"
