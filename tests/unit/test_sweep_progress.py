from __future__ import annotations

import io
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from rayhive.cluster.replicate.peer_table import PeerStatus, ReplicateStatus
from rayhive.errors import ClusterError
from rayhive.spec import Configuration, SweepConfig
from rayhive.spec.replicate import ReplicateSpec
from rayhive.sweep.progress import DisplayProgress, SweepProgress
from rayhive.sweep.tally import Eta, Tally, clock, figure, finished_line, trial_line
from rayhive.sweep.trial_book import TrialRecord
from tests.fixtures.logs import make_spec
from tests.unit.clock_fakes import Clock

CONFIG = SweepConfig(
    name="study",
    workload={"name": "digits"},
    objectives={"time_to_target_s": "minimize", "samples_per_s": "maximize"},
    budget={"trials": 2, "seconds_per_replicate": 30},
)
ROW = {"state": "completed", "final_loss": 0.25, "samples_per_s": 2100.4, "round_p50_s": 0.125}


def record(number: int, codec: str = "none") -> TrialRecord:
    return TrialRecord(number, Configuration(codec=codec), reported=True)


def spec(**fields: Any) -> ReplicateSpec:
    return make_spec(configuration=Configuration(codec="float16"), **fields)


class Handle:
    """A replicate that trains, or one that has ended."""

    def __init__(self, status: ReplicateStatus | None) -> None:
        self._status = status

    def status(self) -> ReplicateStatus:
        if self._status is None:
            raise ClusterError("gone")
        return self._status


def test_the_remaining_time_is_unknown_before_the_first_replicate() -> None:
    eta = Eta(4)
    assert eta.remaining_s() is None
    eta.add(None)  # a kept one of which only the end is known
    assert eta.remaining_s() is None and eta.done == 1


def test_the_remaining_time_is_the_mean_duration_times_the_rest() -> None:
    eta = Eta(5)
    eta.add(10)
    eta.add(20)
    assert eta.remaining_s() == 45
    assert eta.remaining_s(running_s=[5]) == 40
    assert eta.remaining_s(running_s=[500]) == 30  # a slow one does not make the rest negative
    assert eta.remaining_s(running_s=[5, 7], at_once=2) == (3 * 15 - 12) / 2
    eta.add(15)
    eta.add(15)
    assert eta.remaining_s(running_s=[5], at_once=4) == 10  # one is left, and runs alone
    eta.add(1)
    assert eta.remaining_s() == 0


@given(
    durations=st.lists(st.floats(0, 1e4), min_size=1, max_size=20),
    more=st.integers(0, 20),
    running=st.floats(0, 1e5),
)
def test_the_remaining_time_is_never_negative(
    durations: list[float], more: int, running: float
) -> None:
    eta = Eta(len(durations) + more)
    for seconds in durations:
        eta.add(seconds)
    left = eta.remaining_s([running])
    assert left is not None and left >= -1e-6
    assert left <= more * max(durations) + 1e-6


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "unknown"), (7.4, "7 s"), (59.6, "1 min 00 s"), (200, "3 min 20 s"),
     (3840, "1 h 04 min")],
)  # fmt: skip
def test_durations_are_readable(seconds: float | None, text: str) -> None:
    assert clock(seconds) == text


def test_the_best_of_each_objective_is_kept() -> None:
    tally = Tally(CONFIG)
    tally.trial_finished(record(0), [10.0, 500.0])
    tally.trial_finished(record(1, "float16"), [12.0, 900.0])
    tally.trial_finished(record(2), None)
    tally.trial_finished(record(3), [10.0, 900.0])  # as good is no better
    tally.trial_finished(record(4), [9.0, 950.0], "no replicate completed: diverged")
    assert {name: (value, item.number) for name, (value, item) in tally.best.items()} == {
        "time_to_target_s": (10.0, 0),
        "samples_per_s": (900.0, 1),
    }
    assert tally.trials_done == 5


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [("final_loss", 0.25, "0.25"), ("samples_per_s", 12345.6, "12,346 1/s"),
     ("round_p50_s", 0.12345, "0.1235 s")],
)  # fmt: skip
def test_figures_have_units(name: str, value: float, text: str) -> None:
    assert figure(name, value) == text


def test_lines_number_replicates_that_run_side_by_side() -> None:
    out, time = io.StringIO(), Clock()
    progress = SweepProgress(CONFIG, out, time)
    progress.began(2, 2)
    first, second, third = (spec(trial=trial, replicate=0) for trial in range(3))
    progress.replicate_started(first, adopted=False)
    time.now += 4
    progress.replicate_started(second, adopted=False)
    time.now += 6
    progress.replicate_finished(first, ROW, kept=False)
    progress.replicate_started(third, adopted=False)
    starts = [line.split(" trial")[0] for line in out.getvalue().splitlines() if " starts" in line]
    assert starts == ["[1/4]", "[2/4]", "[3/4]"]
    # one took 10 s; of three that are left, one has run for 6 s, and two run at a time
    assert out.getvalue().splitlines()[-1].endswith("(left: 12 s)")


def test_lines_show_starts_ends_and_the_remaining_time() -> None:
    out, time = io.StringIO(), Clock()
    progress = SweepProgress(CONFIG, out, time)
    progress.began(2, 2)
    progress.replicate_started(spec(), adopted=False)
    time.now += 10
    progress.replicate_status(spec(), Handle(None))
    progress.replicate_finished(spec(), ROW, kept=False)
    kept = {**ROW, "started": "2025-06-15T15:00:00Z", "ended": "2025-06-15T15:00:20Z"}
    progress.replicate_finished(spec(replicate=1), kept, kept=True)
    progress.trial_finished(record(0), [60.0, 2100.0], None)
    progress.replicate_started(spec(trial=1, attempt=1, scenario="kill-one"), adopted=True)
    time.now += 4
    failed = {"state": "failed", "stop_reason": "peer-1 died"}
    progress.replicate_finished(spec(trial=1, attempt=1, scenario="kill-one"), failed, kept=False)
    progress.trial_finished(record(1), None, "no replicate completed: invalid")
    progress.trial_finished(record(2), [60.0, 0.0], "no replicate completed: diverged")
    lines = out.getvalue().splitlines()
    assert lines[0] == "study: 2 trials of 2 replicates each"
    assert lines[1] == "[1/4] trial 0 float16 r0 starts (left: unknown)"
    assert lines[2].startswith("[1/4] trial 0 float16 r0 completed in 10 s: final_loss 0.25,")
    assert "samples_per_s 2,100 1/s" in lines[2]
    assert lines[3].startswith("[2/4] trial 0 float16 r1 completed in 20 s (kept): ")
    assert lines[4] == (
        "trial 0 done, 1 of 2: time_to_target_s missed (counts as 60 s), samples_per_s 2,100 1/s"
    )
    assert lines[5] == (
        "[3/4] trial 1 float16 r0 kill-one attempt 2 goes on (left: 30 s)"  # 2 x (10 + 20)/2
    )
    assert lines[6].endswith("failed (peer-1 died)")
    assert lines[7] == "trial 1 done, 2 of 2: failed (no replicate completed: invalid)"
    assert lines[8] == (
        "trial 2 done, 3 of 2: failed (no replicate completed: diverged), "
        "counts as time_to_target_s 60 s, samples_per_s 0 1/s"
    )


def test_a_line_every_minute_tells_how_far_a_replicate_is() -> None:
    out, time = io.StringIO(), Clock()
    progress = SweepProgress(CONFIG, out, time)
    peers = {name: PeerStatus("training", round=7 + at) for at, name in enumerate("ab")}
    status = ReplicateStatus(
        "a-run", "training", seconds=70.0, budget_seconds=2740.0, peers=peers | {"c": PeerStatus()}
    )
    for _ in range(301):
        progress.replicate_status(spec(), Handle(status))
        time.now += 0.5
    assert out.getvalue().splitlines() == 2 * [
        "trial 0 float16 r0: training, 1 min 10 s of at most 45 min 40 s, round 8, 2 peers"
    ]
    progress.replicate_status(spec(replicate=1), Handle(None))
    time.now += 60
    progress.replicate_status(spec(replicate=1), Handle(None))  # it does not answer
    time.now += 60
    progress.replicate_status(spec(replicate=1), Handle(ReplicateStatus("a-run", "placing")))
    assert out.getvalue().splitlines()[2:] == ["trial 0 float16 r1: placing"]


def test_the_display_shows_the_peers_and_the_best() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=120, color_system=None)
    peers = {
        "peer-1": PeerStatus("training", round=7, samples=400, loss=1.25),
        "peer-0": PeerStatus("lost", round=6, samples_per_s=77.7),
    }
    status = ReplicateStatus("a-run", "training", seconds=4.0, peers=peers)
    progress = DisplayProgress(CONFIG, console)
    progress.began(2, 1)
    with console.capture() as before:
        console.print(progress.render())
    assert "replicates 0/2" in before.get() and "peer" not in before.get()

    progress.replicate_started(spec(), adopted=False)
    progress.replicate_status(spec(), Handle(status))
    progress.replicate_status(spec(), Handle(None))  # the last known status stays
    progress.trial_finished(record(0, "uniform8"), [12.5, 900.0], None)
    with console.capture() as during:
        console.print(progress.render())
    lines = [line.split() for line in during.get().splitlines()]
    assert ["peer-0", "lost", "6", "0", "78"] in lines
    assert ["peer-1", "training", "7", "400", "100", "1.25"] in lines  # 400 samples in 4 s
    assert "trial 0 float16 r0: training" in during.get()
    assert ["front", "so", "far", "(1)", *CONFIG.objectives, "trial"] in lines
    assert ["uniform8", "12.5", "s", "900", "1/s", "0"] in lines

    progress.replicate_finished(spec(), ROW, kept=False)
    with console.capture() as after:
        console.print(progress.render())
    assert "replicates 1/2" in after.get() and "peer-0" not in after.get()


def test_with_one_objective_the_display_shows_the_best() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=120, color_system=None)
    config = CONFIG.model_copy(update={"objectives": {"time_to_target_s": "minimize"}})
    progress = DisplayProgress(config, console)
    progress.trial_finished(record(0, "uniform8"), [12.5], None)
    with console.capture() as shown:
        console.print(progress.render())
    assert "best time_to_target_s: 12.5 s (trial 0 uniform8)" in shown.get()
    assert trial_line(progress.tally, record(0, "uniform8"), [12.5], None).endswith(
        "12.5 s, the best so far"
    )


def test_the_front_so_far_holds_the_trials_that_no_other_dominates() -> None:
    tally = Tally(CONFIG)
    values = {0: (9.0, 50.0), 1: (8.0, 40.0), 2: (9.5, 45.0), 3: (7.0, 60.0), 4: (1.0, 10.0)}
    fronts = []
    for number, pair in values.items():
        tally.trial_finished(record(number), pair)
        fronts.append([each.number for _, each in tally.front])
    # trial 2 is worse than 0; 3 is better than all before it; 4 is the quickest
    assert fronts == [[0], [0, 1], [0, 1], [3], [3, 4]]
    assert "on the front so far (with 1 other)" in trial_line(tally, record(4), values[4], None)
    assert "so far" not in trial_line(tally, record(0), values[0], None)


def test_a_trial_that_missed_the_target_is_not_the_best_so_far() -> None:
    tally = Tally(CONFIG)
    measured = {"state": "completed", "samples_per_s": 90.0, "time_to_target_s": 3.0}
    tally.finished(spec(trial=0), measured)
    tally.finished(spec(trial=1), {**measured, "time_to_target_s": None})
    tally.finished(spec(trial=2), {**measured, "state": "diverged"})
    for number, values in enumerate([(3.0, 90.0), (1.0, 99.0), (1.0, 99.0)]):
        tally.trial_finished(record(number), values)
    assert [each.number for _, each in tally.front] == [0]
    assert {name: each.number for name, (_, each) in tally.best.items()} == {
        "time_to_target_s": 0,
        "samples_per_s": 0,
    }


def test_values_with_charges_are_told_as_such() -> None:
    tally = Tally(CONFIG, trials=1)
    measured = {"state": "completed", "samples_per_s": 90.0, "time_to_target_s": 3.0}
    tally.finished(spec(trial=0), measured)
    tally.finished(spec(trial=0, replicate=1), {**measured, "time_to_target_s": None})
    tally.trial_finished(record(0), (31.5, 90.0))
    line = trial_line(tally, record(0), (31.5, 90.0), None)
    assert "a replicate missed the target, counts as time_to_target_s 31.5 s" in line


def test_a_clock_that_was_set_back_gives_no_duration() -> None:
    tally = Tally(CONFIG)
    tally.began(1, 2)
    times = {"started": "2025-06-15T15:00:20Z", "ended": "2025-06-15T15:00:00Z"}
    assert tally.finished(spec(), {**ROW, **times}) is None
    assert tally.remaining == "unknown"


@pytest.mark.parametrize("state", ["failed", "diverged", "invalid", "lost", "pruned"])
def test_the_line_of_a_replicate_without_a_result_says_why(state: str) -> None:
    row = {"state": state, "stop_reason": "f2 (kill of peer-1 at 33 s) did not fire"}
    line = finished_line(CONFIG, spec(), row, 3.0, kept=False)
    assert line.endswith(f"{state} in 3 s (f2 (kill of peer-1 at 33 s) did not fire)")


def test_the_display_starts_and_ends_with_the_sweep() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=100, color_system=None)
    progress = DisplayProgress(CONFIG, console)
    progress.began(1, 1)
    progress.replicate_started(spec(), adopted=False)
    progress.replicate_finished(spec(), ROW, kept=False)
    progress.note("a note")
    progress.close()
    assert "trial 0 float16 r0 completed" in out.getvalue()
    assert "a note" in out.getvalue()
    assert out.getvalue().count("\x1b[?25h") == 1  # the cursor is shown again
