"""Recommendation of a configuration: the rule, its certainty, and what is left out."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from rayhive.columns import Row
from rayhive.metrics.rows import timeline_row
from rayhive.report.recommendation import LEAD, SURE, recommendations
from rayhive.report.results import Results
from rayhive.spec import Configuration
from tests.fixtures.logs import Log, make_spec, timeline_of

TIME, BYTES = "time_to_target_s", "payload_bytes_per_sample"
OBJECTIVES = {TIME: "minimize", BYTES: "minimize"}
CODECS = ("none", "float16", "uniform8")


def replicate(codec: str, seed: int, **values: Any) -> Row:
    """Return the row of a replicate with some values replaced."""
    spec = make_spec(configuration=Configuration(codec=codec), replicate=seed)
    return {**timeline_row(timeline_of(spec, Log(spec).events())), **values}


def results(
    times: Mapping[str, Sequence[float | None]],
    sizes: Mapping[str, float],
    objectives: Mapping[str, str] = OBJECTIVES,
    **values: Any,
) -> Results:
    """Return results with a time for each codec and seed, and bytes for each codec."""
    rows = [
        replicate(
            codec, seed, **{TIME: time, BYTES: sizes[codec], "reached": time is not None}, **values
        )
        for codec, found in times.items()
        for seed, time in enumerate(found)
    ]
    return Results("study", objectives, tuple(rows))


def test_within_the_margin_of_the_fastest_the_cheapest_is_chosen() -> None:
    # 1.05 is within 10 % of the best, 1.2 is not; the replicates leave no doubt
    times = {"none": [1.0, 2.001], "float16": [1.05, 2.1], "uniform8": [1.2, 2.4]}
    (advice,) = recommendations(results(times, {"none": 4.0, "float16": 2.0, "uniform8": 1.0}))
    assert advice.row is not None and advice.row["codec"] == "float16"
    assert advice.certainty == 1.0 and advice.paired and advice.seeds == 2
    against = {each.row["codec"]: each.against for each in advice.candidates}
    assert against["none"][TIME].value == pytest.approx(1.05, rel=1e-3)
    assert against["none"][BYTES].value == pytest.approx(0.5)
    assert against["uniform8"][BYTES].certain


def test_a_single_objective_is_decided_by_its_best_value() -> None:
    times = {"none": [1.0, 2.0], "float16": [1.05, 2.1], "uniform8": [1.2, 2.4]}
    sizes = dict.fromkeys(CODECS, 1.0)
    (fastest,) = recommendations(results(times, sizes, {TIME: "minimize"}))
    (slowest,) = recommendations(results(times, sizes, {TIME: "maximize"}))
    assert fastest.row is not None and fastest.row["codec"] == "none"
    assert slowest.row is not None and slowest.row["codec"] == "uniform8"


def test_chance_that_all_configurations_share_does_not_lower_the_certainty() -> None:
    times = {"none": [1.0, 1.1, 0.9], "float16": [1.5, 1.7, 1.4]}
    sizes = {"none": 1.0, "float16": 1.0}
    (calm,) = recommendations(results(times, sizes))
    seeds = (1.0, 3.0, 0.2)  # a factor of each seed
    shared = {c: [t * f for t, f in zip(v, seeds, strict=True)] for c, v in times.items()}
    (wild,) = recommendations(results(shared, sizes))
    assert calm.certainty == wild.certainty
    assert calm.certainty is not None and calm.certainty > SURE


def test_equal_configurations_are_not_told_apart() -> None:
    noise = list(itertools.permutations([1.0, 1.3, 1.7]))
    times = {codec: noise[n] for n, codec in enumerate(CODECS)}
    (advice,) = recommendations(results(times, dict.fromkeys(CODECS, 1.0), {TIME: "minimize"}))
    assert advice.certainty is not None and advice.certainty < LEAD
    assert {each.row["codec"] for each in advice.possible} == set(CODECS)
    shares = [each.share for each in advice.candidates if each.share is not None]
    assert sum(shares) == pytest.approx(1.0)


def test_replicates_that_agree_in_everything_give_no_certainty() -> None:
    found = results({"none": [1.0, 1.0], "float16": [2.0, 2.0]}, {"none": 1.0, "float16": 1.0})
    (advice,) = recommendations(found)
    assert advice.row is not None and advice.row["codec"] == "none"
    assert advice.certainty is None


def test_one_replicate_gives_a_choice_without_certainty() -> None:
    found = results({"none": [1.0], "float16": [2.0]}, {"none": 1.0, "float16": 1.0})
    (advice,) = recommendations(found)
    assert advice.row is not None and advice.row["codec"] == "none"
    assert advice.certainty is None and advice.candidates[1].share is None
    assert advice.candidates[1].against[TIME].low is None


def test_replicates_without_common_seeds_are_compared_without_pairs() -> None:
    found = results({"none": [1.0, 1.1], "float16": [3.0, 3.3]}, {"none": 1.0, "float16": 1.0})
    rows = [{**row, "seed": n} for n, row in enumerate(found.rows)]
    (advice,) = recommendations(Results("study", OBJECTIVES, tuple(rows)))
    assert not advice.paired and advice.certainty is not None and advice.certainty > LEAD


def test_rows_without_all_objectives_are_named_and_not_chosen() -> None:
    times = {"none": [2.0, 2.1], "float16": [1.0, None], "uniform8": [None, None]}
    (advice,) = recommendations(results(times, dict.fromkeys(CODECS, 1.0)))
    assert advice.row is not None and advice.row["codec"] == "none"
    assert [(row["codec"], reason) for row, reason in advice.left_out] == [
        ("float16", "1 of 2 replicates reached the target"),
        ("uniform8", "0 of 2 replicates reached the target"),
    ]
    assert advice.certainty is None  # nothing to compare it with


def test_failed_replicates_and_missing_values_have_a_reason() -> None:
    found = results({"none": [1.0, 2.0]}, {"none": 1.0})
    failed = [{**row, "state": "failed"} if row["seed"] else row for row in found.rows]
    (advice,) = recommendations(Results("study", OBJECTIVES, tuple(failed)))
    assert [reason for _, reason in advice.left_out] == ["1 of 2 replicates failed"]
    lacking = [{**row, BYTES: None} for row in found.rows]
    (advice,) = recommendations(Results("study", OBJECTIVES, tuple(lacking)))
    assert [reason for _, reason in advice.left_out] == [f"{BYTES} not recorded of every replicate"]
    assert advice.row is None and advice.candidates == ()


def test_every_set_of_conditions_has_its_own_recommendation() -> None:
    sizes = {"none": 1.0, "float16": 1.0}
    fast = results(
        {"none": [1.0, 1.1], "float16": [2.0, 2.2]}, sizes, link="fast: 100 Mbit/s, 1 ms"
    )
    slow = results({"none": [9.0, 9.9], "float16": [4.0, 4.4]}, sizes, link="slow: 5 Mbit/s, 1 ms")
    found = recommendations(Results("study", OBJECTIVES, (*fast.rows, *slow.rows)))
    chosen = {each.conditions["link"]: each.row["codec"] for each in found if each.row is not None}
    assert chosen == {"fast: 100 Mbit/s, 1 ms": "none", "slow: 5 Mbit/s, 1 ms": "float16"}


def test_objectives_that_are_not_positive_are_compared_by_difference() -> None:
    found = results({"none": [1.0, 1.0], "float16": [1.0, 1.0]}, {"none": 1.0, "float16": 1.0})
    losses = {("none", 0): -1.0, ("none", 1): -1.5, ("float16", 0): 0.5, ("float16", 1): 0.0}
    rows = [{**row, "final_loss": losses[str(row["codec"]), row["seed"]]} for row in found.rows]
    (advice,) = recommendations(Results("study", {"final_loss": "minimize"}, tuple(rows)))
    ratio = advice.candidates[1].against["final_loss"]
    assert not ratio.relative and ratio.value == -1.5


def test_without_objectives_nothing_is_recommended() -> None:
    found = results({"none": [1.0]}, {"none": 1.0})
    assert recommendations(Results("study", {}, found.rows)) == []


def test_the_spread_of_large_values_does_not_hide_differences_of_small_ones() -> None:
    # bytes vary by a tenth, which of the largest is a hundred times what tells the others apart
    noise = {"none": (1.1, 0.9, 1.0), "float16": (1.0, 1.05, 0.95), "uniform8": (0.97, 1.0, 1.03)}
    sizes = {"none": 3000.0, "float16": 60.0, "uniform8": 30.0}
    rows = [
        replicate(codec, seed, **{TIME: 1.0 + 0.001 * seed * n, BYTES: sizes[codec] * factor})
        for n, codec in enumerate(CODECS)
        for seed, factor in enumerate(noise[codec])
    ]
    (advice,) = recommendations(Results("study", OBJECTIVES, tuple(rows)))
    assert advice.row is not None and advice.row["codec"] == "uniform8"
    assert advice.certainty is not None and advice.certainty > SURE
    against = {each.row["codec"]: each.against[BYTES] for each in advice.candidates}
    assert against["float16"].relative and against["float16"].certain
    assert against["float16"].value == pytest.approx(0.5, rel=0.01)
