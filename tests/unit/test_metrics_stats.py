from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayhive.metrics.stats import Estimate, estimate, percentile

numbers = st.floats(min_value=-1e9, max_value=1e9)


def test_an_interval_by_hand() -> None:
    found = estimate([1.0, 2.0, 3.0])
    assert found is not None and found.low is not None and found.high is not None
    half = 4.302652729911275 * 1.0 / math.sqrt(3)  # t(0.975, 2) of a printed table, s = 1
    assert (found.mean, found.n) == (2.0, 3)
    assert found.low == pytest.approx(2.0 - half, rel=1e-9)
    assert found.high == pytest.approx(2.0 + half, rel=1e-9)


def test_one_value_has_no_interval_and_none_has_no_mean() -> None:
    assert estimate([3]) == Estimate(3.0, None, None, 1)
    assert estimate([]) is None


def test_values_that_agree_keep_their_bits() -> None:
    third = 4000 / 3
    assert estimate([third] * 7) == Estimate(third, third, third, 7)


@given(st.lists(numbers, min_size=2, max_size=12), st.randoms())
def test_the_mean_lies_in_its_interval_and_order_does_not_matter(values, random) -> None:  # type: ignore[no-untyped-def]
    found = estimate(values)
    assert found is not None and found.low is not None and found.high is not None
    assert found.low <= found.mean <= found.high
    random.shuffle(values)
    assert estimate(values) == found


@pytest.mark.parametrize(
    ("values", "percent", "expected"),
    [
        ([], 50, None),
        ([7.0], 95, 7.0),
        ([3.0, 1.0], 50, 2.0),
        ([1.0, 2.0, 3.0, 4.0, 5.0], 95, 4.8),
        ([1.0, 2.0], 0, 1.0),
        ([1.0, 2.0], 100, 2.0),
    ],
)
def test_percentiles(values: list[float], percent: float, expected: float | None) -> None:
    assert percentile(values, percent) == pytest.approx(expected)


@given(st.lists(numbers, min_size=1, max_size=30), st.floats(min_value=0, max_value=100))
def test_percentiles_agree_with_numpy(values: list[float], percent: float) -> None:
    import numpy as np

    expected = np.percentile(values, percent, method="linear")
    assert percentile(values, percent) == pytest.approx(expected, rel=1e-9, abs=1e-6)
