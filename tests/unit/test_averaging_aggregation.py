"""Aggregation rules against their definitions, and the effect of a single part on the result."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rayhive.averaging.aggregation import (
    RULES,
    Rule,
    centered_clipping,
    trimmed_mean,
    weighted_mean,
)
from rayhive.spec.swarm import AGGREGATIONS

ROBUST = [rule for rule in RULES.values() if rule is not None]
WEIGHTS = st.floats(0.1, 100.0)
VALUES = st.floats(-10.0, 10.0, width=32)


def test_every_choice_has_a_rule() -> None:
    assert tuple(RULES) == AGGREGATIONS
    assert RULES["mean"] is None, "the mean is added up as parts come"


@st.composite
def groups(draw: st.DrawFn, least: int, most: int = 7) -> tuple[list[float], list[torch.Tensor]]:
    count = draw(st.integers(least, most))
    weights = draw(st.lists(WEIGHTS, min_size=count, max_size=count))
    rows = draw(st.lists(st.lists(VALUES, min_size=3, max_size=3), min_size=count, max_size=count))
    return weights, [torch.tensor(row) for row in rows]


@pytest.mark.parametrize("rule", ROBUST)
@settings(max_examples=60, deadline=None)
@given(group=groups(1, 2))
def test_a_rule_for_one_or_two_parts_is_the_weighted_mean(
    rule: Rule, group: tuple[list[float], list[torch.Tensor]]
) -> None:
    weights, parts = group
    expected = sum(w * p for w, p in zip(weights, parts, strict=True)) / sum(weights)
    assert torch.allclose(rule(weights, parts), expected, atol=1e-4)
    assert torch.allclose(weighted_mean(weights, parts), expected, atol=1e-4)


@pytest.mark.parametrize("rule", ROBUST)
@settings(max_examples=60, deadline=None)
@given(group=groups(3), bad=st.floats(1e3, 1e9), at=st.integers(0, 6))
def test_one_part_of_three_or_more_has_a_bounded_effect(
    rule: Rule, group: tuple[list[float], list[torch.Tensor]], bad: float, at: int
) -> None:
    _, parts = group
    parts[at % len(parts)] = torch.full((3,), bad)
    result = rule([1.0] * len(parts), parts)
    # honest parts lie within 10 of 0 in each of 3 coordinates; a clipped one adds a radius a step
    assert float(result.abs().max()) <= 10 * math.sqrt(3) * 12


@pytest.mark.parametrize("rule", ROBUST)
@settings(max_examples=60, deadline=None)
@given(group=groups(3), weight=st.sampled_from([0.0, 1e-9]))
def test_a_part_of_negligible_weight_is_ignored(
    rule: Rule, group: tuple[list[float], list[torch.Tensor]], weight: float
) -> None:
    weights, parts = group
    stale = rule([*weights, weight], [*parts, torch.full((3,), 1e6)])
    assert torch.equal(stale, rule(weights, parts))


@settings(max_examples=60, deadline=None)
@given(group=groups(3))
def test_the_trimmed_mean_omits_the_values_at_both_ends(
    group: tuple[list[float], list[torch.Tensor]],
) -> None:
    weights, parts = group
    out = max(1, len(parts) // 5)
    for at, value in enumerate(trimmed_mean(weights, parts).tolist()):
        ordered = sorted(zip((float(part[at]) for part in parts), weights, strict=True))
        kept = ordered[out:-out]
        low, high = kept[0][0], kept[-1][0]
        assert low - 1e-4 <= value <= high + 1e-4
        if len(set(v for v, _ in ordered)) == len(ordered):  # else the order is not the only one
            expected = sum(v * w for v, w in kept) / sum(w for _, w in kept)
            assert value == pytest.approx(expected, abs=1e-4)


def test_centred_clipping_of_parts_near_each_other_is_close_to_their_mean() -> None:
    generator = torch.Generator().manual_seed(0)
    parts = [1.0 + 0.01 * torch.randn(1000, generator=generator) for _ in range(8)]
    mean = torch.stack(parts).mean(0)
    away = centered_clipping([1.0] * 8, parts) - mean
    assert float(away.norm()) < 0.05 * float((parts[0] - mean).norm())


def test_equal_parts_are_their_own_aggregate() -> None:
    part = torch.tensor([1.0, -2.0])
    for rule in ROBUST:
        assert torch.allclose(rule([1.0, 2.0, 3.0], [part] * 3), part)
