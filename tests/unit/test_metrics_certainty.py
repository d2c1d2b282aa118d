"""Paired differences, adjusted tests, probabilities of the front, and intervals of the worst."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from scipy import stats

from rayhive.columns import FoldedRow, Replicates, Row
from rayhive.metrics.groups.pareto import Pareto, separable
from rayhive.metrics.posterior import _of_model, front_probabilities, posterior
from rayhive.metrics.seeds import differences, holm, seed_values
from rayhive.metrics.worst import regret_bounds, worst_bounds

LOSS = {"final_loss": "minimize"}


def folded(name: str, scenario: str = "none", **columns: Sequence[float | None]) -> FoldedRow:
    """Return a row of replicates with the seeds 0, 1, … and these values."""
    count = len(next(iter(columns.values())))
    ran: list[Row] = [
        {"seed": n, "state": "completed", "payload_matches": True, "trained_s": 100.0}
        | {column: values[n] for column, values in columns.items()}
        for n in range(count)
    ]
    row = FoldedRow(Replicates(ran, ran))
    row |= {"configuration": name, "scenario": scenario, "n": count, "n_failed": 0}
    row |= {"reached": count, "workload": "digits", "peers": 2, "link": None}
    for column, values in columns.items():
        row[column] = float(np.mean([value or 0.0 for value in values]))
    return row


def test_paired_differences_and_p_values_are_those_of_the_paired_t_test() -> None:
    a, b = [0.5, 0.9, 0.7, 0.65], [0.52, 0.97, 0.75, 0.8]
    values = seed_values([folded("a", final_loss=a), folded("b", final_loss=b)], "final_loss")
    found = differences(values, 0)
    expected = stats.ttest_rel(a, b)
    interval = expected.confidence_interval()
    assert found.pairs.tolist() == [4, 4]
    assert found.p_values()[1] == pytest.approx(expected.pvalue)
    assert found.mean[1] - found.half_widths()[1] == pytest.approx(interval.low)
    assert found.mean[1] + found.half_widths()[1] == pytest.approx(interval.high)


def test_pairing_removes_what_the_seed_does_to_both() -> None:
    rows = [folded("a", final_loss=[1.0, 2.0, 3.0]), folded("b", final_loss=[1.1, 2.11, 3.1])]
    pair = differences(seed_values(rows, "final_loss"), 0)
    assert pair.half_widths()[1] == pytest.approx(4.302652729911275 * 0.01 / 3)
    assert pair.p_values()[1] < 0.01


def test_times_are_compared_as_logarithms_and_cut_alike() -> None:
    rows = [
        folded("a", time_to_target_s=[2.0, 4.0]),
        folded("b", time_to_target_s=[1.0, None]),
    ]
    rows[1].replicates.ran[1]["trained_s"] = 3.0
    values = seed_values(rows, "time_to_target_s")
    assert np.exp(values.values).tolist() == [[2.0, pytest.approx(3)], [1.0, pytest.approx(3)]]


def test_seeds_that_only_one_row_has_are_left_out_of_the_difference() -> None:
    rows = [folded("a", final_loss=[1.0, 2.0, 5.0]), folded("b", final_loss=[0.5, 1.7])]
    found = differences(seed_values(rows, "final_loss"), 0)
    assert (found.pairs[1], found.mean[1]) == (2, pytest.approx(0.4))


def test_equal_differences_are_certain_only_of_exact_columns() -> None:
    rows = [
        folded("a", final_loss=[2.0, 3.0], payload_bytes_per_round=[9.0, 9.0]),
        folded("b", final_loss=[1.0, 2.0], payload_bytes_per_round=[8.0, 8.0]),
    ]
    assert math.isnan(differences(seed_values(rows, "final_loss"), 0).p_values()[1])
    assert differences(seed_values(rows, "payload_bytes_per_round"), 0).p_values()[1] == 0.0


def test_holm_by_hand() -> None:
    found = holm(np.array([0.01, np.nan, 0.04, 0.03, 0.5]))
    assert found[[0, 2, 3, 4]].tolist() == pytest.approx([0.04, 0.09, 0.09, 0.5])
    assert math.isnan(found[1])


def test_rows_are_separable_in_both_directions_after_the_adjustment() -> None:
    rows = [
        folded("a", final_loss=[1.0, 1.1, 1.2, 1.15]),
        folded("b", final_loss=[1.01, 1.08, 1.22, 1.14]),
        folded("c", final_loss=[2.0, 2.11, 2.2, 2.16]),
    ]
    apart = separable(rows, ["final_loss"])
    assert apart.tolist() == [[False, False, True], [False, False, True], [True, True, False]]
    Pareto().rank(rows, LOSS, ())
    assert [row["not_separable"] for row in rows] == [1, 1, 0]
    assert [row["not_separable_from"] for row in rows] == ["b", "a", None]


def test_the_probability_of_two_rows_is_that_of_the_t_distribution() -> None:
    a, b = [1.0, 1.2, 1.1, 1.3], [1.05, 1.22, 1.2, 1.29]
    shares = front_probabilities([folded("a", final_loss=a), folded("b", final_loss=b)], LOSS)
    t = stats.ttest_rel(b, a).statistic
    assert shares is not None and sum(shares) == pytest.approx(1)
    assert shares[0] == pytest.approx(stats.t.cdf(t, 3), abs=0.02)


def test_what_the_seed_does_to_all_rows_does_not_count() -> None:
    rows = [folded("a", final_loss=[1.0, 9.0, 5.0]), folded("b", final_loss=[1.1, 9.12, 5.1])]
    shares = front_probabilities(rows, LOSS)
    assert shares is not None and shares[0] > 0.99


def test_a_row_that_lacks_a_seed_is_compared_at_the_others() -> None:
    """Its mean is far lower, for want of the seed at which every row is high."""
    rows = [folded("a", final_loss=[1.0, 2.0, 9.0]), folded("b", final_loss=[1.05, 2.052])]
    shares = front_probabilities(rows, LOSS)
    assert shares is not None and shares[0] > 0.97
    found = posterior(rows, LOSS)
    assert found.centre[0, 0] - found.centre[1, 0] == pytest.approx(-0.051)


def test_the_model_of_rows_with_all_seeds_is_that_of_their_means() -> None:
    generator = np.random.default_rng(3)
    cells = generator.normal(size=(4, 5, 2)) + np.arange(5)[None, :, None]
    there = np.ones((4, 5), bool)
    centre, residuals, freedom, root = _of_model(cells, there)
    cells[3, 4], there[3, 4] = np.nan, False  # least squares, whose means are those of the model
    means, _, less, roots = _of_model(cells, there)
    assert (freedom, less) == (12, 11) and residuals.shape == (20, 2)
    # of complete rows differences are those of their means, with the error of the complete design
    assert means[0] - means[1] == pytest.approx(centre[0] - centre[1])
    contrast = roots[0] - roots[1]
    assert contrast @ contrast == pytest.approx(2 * root[0] ** 2)
    # of the row that lacks a seed, what the other rows have at that seed stands in for it
    other = cells[:3, 4].mean(axis=0) - cells[:3, :4].mean(axis=(0, 1))
    assert means[3] == pytest.approx(cells[3, :4].mean(axis=0) + other / 5)


@pytest.mark.parametrize("factor", [2.0, 3.0])
def test_equal_factors_are_equal_in_spite_of_rounding(factor: float) -> None:
    samples = [1280.0, 2560.0, 3840.0]
    rows = [
        folded("a", samples_to_target=samples, trained_s=[9.0] * 3),
        folded("b", samples_to_target=[factor * each for each in samples], trained_s=[9.0] * 3),
    ]
    assert math.isnan(differences(seed_values(rows, "samples_to_target"), 0).p_values()[1])
    assert front_probabilities(rows, {"samples_to_target": "minimize"}) is None


def test_a_row_that_is_best_in_one_objective_is_on_the_front() -> None:
    objectives = {"final_loss": "minimize", "samples_per_s": "maximize"}
    rows = [
        folded("quick", final_loss=[2.0, 2.1], samples_per_s=[100.0, 104.0]),
        folded("good", final_loss=[1.0, 1.12], samples_per_s=[50.0, 51.0]),
        folded("neither", final_loss=[2.5, 2.64], samples_per_s=[40.0, 42.0]),
    ]
    shares = front_probabilities(rows, objectives)
    assert shares is not None
    assert min(shares[:2]) > 0.95 and shares[2] < 0.05
    assert shares == front_probabilities(rows, objectives)  # the same draws every time


@pytest.mark.parametrize(
    "values", [[[1.0], [2.0]], [[1.0, 1.0], [2.0, 2.0]]], ids=["single", "equal"]
)
def test_without_a_spread_there_is_no_probability(values: list[list[float]]) -> None:
    rows = [folded(str(n), final_loss=each) for n, each in enumerate(values)]
    assert front_probabilities(rows, LOSS) is None
    Pareto().rank(rows, LOSS, ())
    assert [row["pareto"] for row in rows] == [True, False]


def test_the_interval_of_the_worst_is_that_of_the_worst_bounds() -> None:
    calm, kill = [1.0, 1.1, 1.2], [2.0, 2.5, 2.1]
    group = [folded("a", final_loss=calm), folded("a", "kill", final_loss=kill)]
    low, high = worst_bounds(group, "final_loss", 1.0)
    ends = [
        stats.t.interval(1 - 0.05 / 2, 2, np.mean(each), stats.sem(each)) for each in (calm, kill)
    ]
    assert (low, high) == (
        pytest.approx(max(end[0] for end in ends)),
        pytest.approx(max(end[1] for end in ends)),
    )
    group[0] = folded("a", final_loss=[1.0])
    assert worst_bounds(group, "final_loss", 1.0) == (None, None)


def test_the_interval_of_the_regret_is_that_of_the_paired_difference() -> None:
    a, b = [1.0, 2.0, 3.0], [0.5, 1.6, 2.55]
    groups = [[folded("a", final_loss=a)], [folded("b", final_loss=b)]]
    found = regret_bounds(groups, "final_loss", 1.0)
    pairs = stats.ttest_rel(a, b).confidence_interval(1 - 0.05 / 2)
    assert found[0] == (pytest.approx(pairs.low), pytest.approx(pairs.high))
    assert found[1] == (0.0, 0.0)
    assert regret_bounds(groups[:1], "final_loss", 1.0) == [(None, None)]


@pytest.mark.parametrize(("name", "sign"), [("time_to_target_s", 1.0), ("samples_per_s", -1.0)])
def test_the_interval_of_a_regret_on_a_log_scale_covers_the_difference(
    name: str, sign: float
) -> None:
    better, worse = [10.0, 20.0, 30.0], [20.5, 40.0, 61.0]
    good, bad = (better, worse) if sign > 0 else (worse, better)
    groups = [[folded("bad", **{name: bad})], [folded("good", **{name: good})]]
    low, high = regret_bounds(groups, name, sign)[0]
    truth = abs(float(stats.gmean(bad)) - float(stats.gmean(good)))
    assert low is not None and high is not None
    assert 0 < low < truth < high
