from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import interval_coverage, recommendation_certainty
from rayhive.metrics.stats import (
    Estimate,
    Time,
    censored_percentile,
    estimate,
    log_estimate,
    median_interval,
    percentile,
)

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


def test_a_log_interval_by_hand() -> None:
    found = log_estimate([1.0, 2.0, 4.0])
    assert found is not None and found.low is not None and found.high is not None
    half = 4.302652729911275 * math.log(2) / math.sqrt(3)  # s of the logarithms is log 2
    assert (found.mean, found.n) == (pytest.approx(2.0), 3)
    assert found.low == pytest.approx(2.0 * math.exp(-half), rel=1e-9)
    assert found.high == pytest.approx(2.0 * math.exp(half), rel=1e-9)


def test_a_geometric_mean_with_a_zero_is_zero_and_of_negative_values_there_is_none() -> None:
    assert log_estimate([0.0, 2.0]) == Estimate(0.0, None, None, 2)
    assert log_estimate([-1.0, 2.0]) is None
    assert log_estimate([]) is None
    assert log_estimate([3.0]) == Estimate(3.0, None, None, 1)
    assert log_estimate([1e-300, 1e300]) == Estimate(pytest.approx(1.0), 0.0, None, 2)


def test_a_median_of_six_and_more_times_has_an_interval_by_rank() -> None:
    times = [Time(float(n)) for n in range(1, 11)]
    assert median_interval(times) == (2.0, 9.0)  # 2 · P(B(10, 1/2) < 2) = 0.021
    assert median_interval(times[:6]) == (1.0, 6.0)
    late = [*times[:5], Time(5.5, censored=True)]
    assert median_interval(late) == (1.0, None)
    early = [Time(1.0, censored=True), *times[4:9]]  # it may have been 1.5, and no less than 1
    assert median_interval(early) == (1.0, None)
    assert median_interval([Time(5.5, censored=True), *times[4:9]]) == (5.0, None)
    assert median_interval([Time(0.0), *times[:4]]) == (None, None)
    few = log_estimate([1.0, 2.0, 3.0])
    assert few is not None
    assert median_interval(times[:3]) == (few.low, few.high)
    assert median_interval(late[3:]) == (None, None)
    assert median_interval([Time(2.0)] * 7) == (None, None)


@pytest.mark.parametrize(
    ("case", "n", "given", "covered"),
    [
        ("mean, normal", 3, 400, 385),
        ("geometric mean, lognormal", 5, 400, 380),
        ("restricted geometric mean, censored", 5, 400, 355),
        ("median, censored", 10, 400, 389),
        ("paired difference", 3, 400, 386),
        ("worst case over two scenarios", 3, 400, 395),
        ("regret among three rows, two scenarios", 5, 400, 396),
    ],
)
def test_the_coverage_of_the_intervals(case: str, n: int, given: int, covered: int) -> None:
    """A small version of the simulation behind the table in docs/results.md."""
    draw = interval_coverage.CASES[case]
    found = interval_coverage.coverage(draw, n, draws=400, seed=1)
    assert (found.given, found.covered) == (given, covered)


def test_rows_that_are_probably_on_the_front_mostly_are() -> None:
    unlikely, *_, likely = interval_coverage.calibration(5, studies=25, seed=1, uneven=False)
    assert unlikely[0] > 50 and unlikely[1] <= 0.05 * unlikely[0]
    assert likely[0] > 20 and likely[1] >= 0.9 * likely[0]


def test_recommendations_are_as_certain_as_they_say() -> None:
    found = recommendation_certainty.made(3, 0.2, studies=40, seed=1)
    words = {word: [m.right for m in found if m.word == word] for word in ("sure", "likely")}
    assert min(map(len, words.values())) > 5
    assert all(words["sure"]) and sum(words["likely"]) >= 0.8 * len(words["likely"])


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
