from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayhive.metrics.stats import Estimate, Time, censored_percentile, estimate, percentile

numbers = st.floats(min_value=-1e9, max_value=1e9)


def test_an_interval_by_hand() -> None:
    found = estimate([1.0, 2.0, 3.0])
    assert found is not None and found.low is not None and found.high is not None
    half = 4.302652729911275 * 1.0 / math.sqrt(3)  # t(0.975, 2) of a printed table, s = 1
    assert (found.mean, found.n) == (2.0, 3)
    assert found.low == pytest.approx(2.0 - half, rel=1e-9)
    assert found.high == pytest.approx(2.0 + half, rel=1e-9)


def test_one_value_has_no_interval_and_no_values_have_no_mean() -> None:
    assert estimate([3]) == Estimate(3.0, None, None, 1)
    assert estimate([]) is None


def test_equal_values_keep_their_bits() -> None:
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


def test_a_percentile_independent_of_censored_times_is_known() -> None:
    times = [Time(0.1), Time(0.2), Time(0.3), Time(40.0, censored=True)]
    assert censored_percentile(times[:3], 50) == Time(0.2)
    assert censored_percentile([*times[:3], Time(0.4), times[3]], 50) == Time(0.3)
    assert censored_percentile(times, 50) == Time(pytest.approx(0.25))
    assert censored_percentile(times, 95) == Time(pytest.approx(34.045), censored=True)
    assert censored_percentile([], 50) is None


def test_nine_of_ten_censored_times_bound_the_median() -> None:
    times = [Time(0.2), *(Time(40.0 + n, censored=True) for n in range(9))]
    assert censored_percentile(times, 50) == Time(43.5, censored=True)


@given(
    st.lists(st.tuples(st.floats(0, 100), st.booleans(), st.floats(0, 100)), min_size=1),
    st.sampled_from([0, 5, 50, 95, 100]),
)
def test_a_percentile_of_censored_times_is_a_bound_of_the_true_one(drawn, percent) -> None:  # type: ignore[no-untyped-def]
    """Each time is known, or censored at the end of its observation."""
    found = censored_percentile([Time(time, censored) for time, censored, _ in drawn], percent)
    truth = percentile([time + more * cut for time, cut, more in drawn], percent)
    assert found is not None and truth is not None
    if found.censored:
        assert found.seconds <= truth + 1e-9
    else:
        assert found.seconds == pytest.approx(truth)
