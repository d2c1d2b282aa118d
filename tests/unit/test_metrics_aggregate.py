from __future__ import annotations

import math

import pytest

from rayhive.columns import Row
from rayhive.metrics.aggregate import fold, is_censored, objectives_known
from rayhive.metrics.rows import timeline_row
from rayhive.metrics.stats import log_estimate
from rayhive.spec import Configuration
from tests.fixtures.logs import Log, make_spec, timeline_of


def rows(*logs: Log) -> list[Row]:
    return [timeline_row(timeline_of(log.spec, log.events())) for log in logs]


def replicates(count: int, **fields: object) -> list[Log]:
    return [Log(spec=make_spec(replicate=number), **fields) for number in range(count)]  # type: ignore[arg-type]


def test_replicates_become_a_mean_with_an_interval() -> None:
    logs = replicates(2)
    logs[1].losses = (1.0, 0.7)
    (row,) = fold(rows(*logs))
    assert (row["n"], row["n_failed"], row["n_timed_out"]) == (2, 0, 0)
    assert row["final_loss"] == pytest.approx(0.61)
    half = 12.706204736432095 * 0.1  # t(0.975, 1) · s / √2 with s = 0.1 · √2
    assert row["final_loss_low"] == pytest.approx(0.61 - half)
    assert row["final_loss_high"] == pytest.approx(0.61 + half)
    assert row["rounds"] == 8
    assert row["rounds_complete"] == 8
    assert row["reached"] == 2
    assert (row["payload_bytes_per_round_low"], row["payload_bytes_per_round_high"]) == (4000, 4000)


def test_equal_measured_values_have_no_interval() -> None:
    """Both replicates reach the target at the same evaluation, at 4.1 s, by chance."""
    (row,) = fold(rows(*replicates(2)))
    for name in ("time_to_target_s", "samples_to_target", "samples_per_s", "goodput"):
        assert row[name] is not None
        assert (row[f"{name}_low"], row[f"{name}_high"]) == (None, None)
    for name in ("payload_bytes_per_round", "gradient_compression_ratio"):
        assert row[f"{name}_low"] == row[name] == row[f"{name}_high"]


def test_equal_bytes_are_exact_only_if_they_match_the_prediction() -> None:
    (estimated,) = fold(rows(*replicates(2, exact=False)))
    (wrong,) = fold(rows(*replicates(2, rounds={(2, 1): {"sent_bytes": 1}})))
    for row in (estimated, wrong):
        assert row["payload_bytes_per_round"] is not None
        assert row["payload_bytes_per_round_low"] is None


@pytest.mark.parametrize("state", ["diverged", "failed", "invalid"])
def test_a_failed_replicate_counts_as_missing_the_target(state: str) -> None:
    """One replicate of five reached the target; the other four missed it or failed."""
    failing, missing = replicates(5), replicates(5)
    for log in failing[1:]:
        log.state = state
    for log in missing[1:]:
        log.accuracies = (0.1, 0.2)
    for logs in (failing, missing):
        (row,) = fold(rows(*logs))
        assert row["reached"] == 1
        assert is_censored(row, "time_to_target_s")
        assert not objectives_known(row, ["time_to_target_s"])
    (row,) = fold(rows(*failing))  # infinite times, cut at the one time that is known
    assert (row["time_to_target_s"], row["time_to_target_s_low"]) == (4.1, None)
    (row,) = fold(rows(*missing))  # 4.1 s, and four times of more than 4.5 s
    assert row["time_to_target_s"] == pytest.approx((4.1 * 4.5**4) ** 0.2)


def test_an_objective_is_unknown_with_a_failed_replicate() -> None:
    logs = replicates(5)
    for log in logs[1:]:
        log.state = "diverged"
    (row,) = fold(rows(*logs))
    assert row["final_loss"] == pytest.approx(0.51)
    assert not objectives_known(row, ["final_loss"])
    (row,) = fold(rows(*replicates(5)))
    assert objectives_known(row, ["final_loss"])


def test_a_failed_replicate_leaves_no_convergence_penalty() -> None:
    logs = replicates(3)
    logs[2].state = "failed"
    found = rows(*logs)
    for row in found:
        row["convergence_penalty"] = 512
    (row,) = fold(found)
    assert row["convergence_penalty"] is None


def test_one_replicate_has_no_interval() -> None:
    (row,) = fold(rows(*replicates(1)))
    assert row["samples_per_s"] == 512 / 4.5
    assert row["samples_per_s_low"] is None
    assert row["samples_per_s_high"] is None


@pytest.mark.parametrize("state", ["diverged", "failed", "invalid", "something new"])
def test_failed_replicates_are_counted_and_enter_no_mean(state: str) -> None:
    logs = replicates(3)
    logs[1].state = state
    logs[1].losses = (9.0, 9.0)
    (row,) = fold(rows(*logs))
    assert (row["n"], row["n_failed"]) == (2, 1)
    assert row["final_loss"] == pytest.approx(0.51)
    assert row["rounds"] == 8


def test_a_configuration_with_only_failed_replicates_keeps_its_row() -> None:
    early = Log(state="failed")
    row = timeline_row(timeline_of(early.spec, [*early.head(), *early.tail()]))
    (folded,) = fold([row])
    assert (folded["n"], folded["n_failed"]) == (0, 1)
    assert folded["configuration"] == "none"
    assert folded["data"] is None
    assert folded["final_loss"] is None and folded["rounds"] is None


def test_a_replicate_without_data_column_belongs_to_the_same_row() -> None:
    early = Log(spec=make_spec(replicate=1), state="failed")
    failed = timeline_row(timeline_of(early.spec, [*early.head(), *early.tail()]))
    (row,) = fold([failed, *rows(Log())])
    assert (row["n"], row["n_failed"], row["data"]) == (1, 1, "real")


def test_timed_out_replicates_stay_in_the_means_and_are_counted() -> None:
    logs = replicates(2)
    logs[1].state = "timed_out"
    logs[1].losses = (1.0, 0.7)
    (row,) = fold(rows(*logs))
    assert (row["n"], row["n_timed_out"]) == (2, 1)
    assert row["final_loss"] == pytest.approx(0.61)


@pytest.mark.parametrize("state", ["stopped", None])
def test_stopped_and_unfinished_replicates_are_left_out(state: str | None) -> None:
    assert fold(rows(Log(state=state))) == []


def test_times_to_the_target_are_cut_at_the_shortest_miss() -> None:
    found = rows(*replicates(4))
    times = [(2.0, 9.0), (8.0, 9.0), (None, 5.0), (None, 6.0)]
    for row, (time, trained) in zip(found, times, strict=True):
        row["time_to_target_s"], row["trained_s"] = time, trained
        row["reached"] = time is not None
    (row,) = fold(found)
    restricted = log_estimate([2.0, 5.0, 5.0, 5.0])  # 8 s is after the end of the third
    assert restricted is not None
    assert row["time_to_target_s"] == restricted.mean == pytest.approx(250**0.25)
    assert row["time_to_target_s_low"] == restricted.low
    assert row["time_to_target_s_high"] == restricted.high
    assert is_censored(row, "time_to_target_s")


@pytest.mark.parametrize("state", ["failed", "lost"])
def test_a_failed_replicate_never_reaches_the_target_and_a_lost_one_counts_nowhere(
    state: str,
) -> None:
    found = rows(*replicates(3))
    for row, time in zip(found, (2.0, 8.0, 1.0), strict=True):
        row["time_to_target_s"] = time
    found[2]["state"] = state
    (row,) = fold(found)
    times = [2.0, 8.0, 8.0] if state == "failed" else [2.0, 8.0]
    assert row["time_to_target_s"] == pytest.approx(math.prod(times) ** (1 / len(times)))
    assert is_censored(row, "time_to_target_s") == (state == "failed")


def test_rates_have_the_geometric_mean_with_an_interval_on_a_log_scale() -> None:
    found = rows(*replicates(3))
    for row, rate in zip(found, (50.0, 100.0, 200.0), strict=True):
        row["samples_per_s"] = rate
    (row,) = fold(found)
    factor = math.exp(4.302652729911275 * math.log(2) / math.sqrt(3))  # t(0.975, 2), s = log 2
    assert row["samples_per_s"] == pytest.approx(100)
    assert row["samples_per_s_low"] == pytest.approx(100 / factor)
    assert row["samples_per_s_high"] == pytest.approx(100 * factor)


def test_differences_to_the_twin_have_intervals() -> None:
    found = rows(*replicates(3))
    for row, value in zip(found, (1.0, 2.0, 3.0), strict=True):
        row["loss_delta"], row["convergence_penalty"] = value / 100, 100 * value
    (row,) = fold(found)
    half = 4.302652729911275 / math.sqrt(3)
    assert row["loss_delta_low"] == pytest.approx(0.02 - half / 100)
    assert row["convergence_penalty_high"] == pytest.approx(200 + 100 * half)


def test_a_median_of_recoveries_has_an_interval_over_the_replicates() -> None:
    found = rows(*replicates(3))
    for row, text in zip(found, ("1.0 2.0 4.0", "4.0", "8.0"), strict=True):
        row["recover_s"] = text
    (row,) = fold(found)
    own = log_estimate([2.0, 4.0, 8.0])  # each replicate's own median
    assert own is not None
    assert row["recover_p50_s"] == 4.0
    assert (row["recover_p50_s_low"], row["recover_p50_s_high"]) == (own.low, own.high)
    found[1]["recover_s"] = ">4.0"
    (row,) = fold(found)
    assert row["recover_p50_s_low"] is None


def test_a_missed_target_leaves_no_convergence_penalty() -> None:
    found = rows(*replicates(3))
    for row, penalty in zip(found, (512, 768, 640), strict=True):
        row["convergence_penalty"] = penalty
    (row,) = fold(found)
    assert row["convergence_penalty"] == 640
    found[2]["convergence_penalty"] = None  # it missed the target
    (row,) = fold(found)
    assert row["convergence_penalty"] is None


def test_the_time_to_a_target_that_no_replicate_reached_is_none() -> None:
    (row,) = fold(rows(*replicates(2, accuracies=(0.1, 0.2))))
    assert row["reached"] == 0
    assert row["time_to_target_s"] is None


def test_the_worst_distance_and_every_mismatch_stay_visible() -> None:
    logs = replicates(2)
    logs[1].rounds = {(2, 1): {"sent_bytes": 1}}
    first, second = rows(*logs)
    second["weights_distance_max"] = 0.5
    (row,) = fold([first, second])
    assert row["weights_distance_max"] == 0.5
    assert row["payload_matches"] is False


def test_texts_are_kept_where_equal_and_joined_where_not() -> None:
    first, second = rows(*replicates(2))
    second["hardware"] = "another machine"
    second["started"], second["ended"] = "2024-01-01T00:00:00Z", "2024-01-02T00:00:00Z"
    (row,) = fold([first, second])
    assert row["git_revision"] == "abc1234"
    assert row["hardware"] == "2 x x86_64; another machine"
    assert row["started"] == "2024-01-01T00:00:00Z"
    assert row["ended"] == "2025-06-15T15:07:40Z"


def test_scenarios_are_never_folded_together() -> None:
    logs = [Log(), Log(spec=make_spec(scenario="kill-one"))]
    assert [row["scenario"] for row in fold(rows(*logs))] == ["none", "kill-one"]
    assert len(fold(rows(*logs), by=["codec"])) == 2


def test_by_folds_over_all_other_settings() -> None:
    configurations = [
        Configuration(codec="float16"),
        Configuration(codec="float16", powersgd_rank=4, min_compression_ratio=0.5, delay="state"),
        Configuration(),
    ]
    logs = [
        Log(spec=make_spec(trial=trial, configuration=configuration))
        for trial, configuration in enumerate(configurations)
    ]
    float16, none = fold(rows(*logs), by=["codec"])
    assert (float16["codec"], float16["n"]) == ("float16", 2)
    assert float16["delay"] == "none; state"
    assert float16["powersgd_rank"] is None  # 4 and none at all: there is no one number
    assert (none["codec"], none["n"]) == ("none", 1)
    assert len(fold(rows(*logs))) == 3


@pytest.mark.parametrize("name", ["clock_uncertainty_s", "state_transfer_bytes", "samples_lost"])
def test_an_unknown_value_makes_a_bound_or_a_sum_unknown(name: str) -> None:
    found = rows(*replicates(2))
    for row, value in zip(found, (3, 4), strict=True):
        row[name] = value
    (known,) = fold(found)
    assert known[name] == (4 if name == "clock_uncertainty_s" else 7)
    found[1][name] = None
    assert fold(found)[0][name] is None
