"""Classes of the peers' time: expected values by hand, and their sum for torn logs."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayhive.columns import group_columns
from rayhive.metrics.groups.badput import time_spent
from rayhive.metrics.rows import timeline_row
from rayhive.spec import Configuration
from tests.fixtures.faulted import ALL, REST, Story, kill_and_restart, planned
from tests.fixtures.logs import START, Log, make_spec, timeline_of

TIME = [column.name for column in group_columns("time")]
CLASSES = TIME[1:]


def spent(story: Story) -> dict[str, float]:
    """Return the seconds of each non-zero class, named without prefix and unit."""
    row = timeline_row(story.timeline)
    named = {name.removeprefix("badput_").removesuffix("_s"): row[name] for name in CLASSES}
    return {name: pytest.approx(v, abs=1e-5) for name, v in named.items() if v and v > 1e-5}


def three(*ends: float, faults: Sequence[str] = ("kill",), **fields: object) -> Story:
    story = Story([planned(n, kind, round=9) for n, kind in enumerate(faults)])
    story.rounds(*ends, peers=ALL, **fields)
    return story


def test_rounds_are_split_by_the_durations_in_their_events() -> None:
    story = three(1.0, 2.0)
    story.finish(2.0, ALL)
    assert spent(story) == {
        "matchmaking": 6 * (0.05 + 0.02),
        "averaging": 6 * (0.15 + 0.06),
        "productive": 6 * (0.7 + 0.02),
    }


def test_a_death_and_a_replacement() -> None:
    story = kill_and_restart()
    peer_rounds = 4 * 3 + 5 * 2 + 3 * 3
    expected = {
        "down": 8.4 - 4.6 - 0.5,  # loading the state is told apart
        "state_transfer": 0.5,
        "retry": 0.6,  # what it computed since its last transition died with it
        "matchmaking": peer_rounds * 0.07,
        "averaging": peer_rounds * 0.21,
    }
    expected["productive"] = 3 * 13.0 - sum(expected.values())
    assert spent(story) == expected
    assert timeline_row(story.timeline)["peer_seconds"] == pytest.approx(39.0)


def test_a_stopped_peer_stalls() -> None:
    story = three(1.0, faults=["pause"])
    story.fire(1.2, 0, ["peer-1"])
    story.heal(3.2, 0, ["peer-1"])
    story.rounds(4.0, peers=ALL)
    story.finish(4.0, ALL)
    assert spent(story)["stalled"] == 2.0


def test_computing_for_a_skipped_round_is_a_retry() -> None:
    story = three(1.0)
    story.rounds(2.0, peers=ALL, outcome="skipped", waited_s=None, averaging_s=0.2)
    story.finish(2.0, ALL)
    assert spent(story)["retry"] == 3 * (0.2 + 0.7)


def test_a_failed_averaging_is_a_retry_and_the_computing_is_not() -> None:
    story = three(1.0)
    story.rounds(2.0, peers=ALL, outcome="local", waited_s=None, averaging_s=0.2)
    story.finish(2.0, ALL)
    assert spent(story)["retry"] == 3 * 0.2


def test_failed_attempts_before_a_successful_one_are_retries() -> None:
    story = three(1.0)
    story.rounds(3.0, peers=ALL, waited_s=1.2, retries=1, accumulating_s=0.7)
    story.finish(3.0, ALL)
    assert spent(story)["retry"] == 3 * 1.0


def test_evaluation_is_no_badput() -> None:
    story = three(1.0)
    story.evaluate(1.5, ALL, loss=0.5)
    story.rounds(2.5, peers=ALL, accumulating_s=1.2)  # the peer's stopwatch does not stand still
    story.finish(2.5, ALL)
    found = spent(story)
    assert found["evaluation"] == 1.5
    assert found["productive"] == 6 * 0.72


def test_unexplained_time_is_stalled() -> None:
    story = three(1.0)
    story.rounds(3.0, peers=ALL, accumulating_s=0.7)
    story.finish(3.0, ALL)
    assert spent(story)["stalled"] == 3 * 1.0


def test_computing_before_a_state_is_loaded_is_a_retry() -> None:
    story = three(1.0)
    story.say(2.0, "state_loaded", "peer-1", seconds=0.4, round_before=1, round_of_state=1, round=1)
    story.rounds(3.0, peers=ALL, accumulating_s=0.7)  # since the state was there
    story.finish(3.0, ALL)
    found = spent(story)
    assert found["state_transfer"] == 0.4
    assert found["retry"] == 0.6
    assert found["stalled"] == 2 * 1.0


def test_samples_kept_while_stepping_out_are_productive() -> None:
    story = three(1.0)
    load = {"seconds": 0.4, "round_before": 1, "round_of_state": 1, "round": 1, "kept": 32}
    story.say(2.0, "state_loaded", "peer-1", **load, lost=0)
    story.say(2.0, "stepped_in", "peer-1", round_before=1, round=1, seconds=0.5)
    story.rounds(3.0, peers=ALL, accumulating_s=0.7)  # since the state was there
    story.finish(3.0, ALL)
    found = spent(story)
    assert found["state_transfer"] == 0.4
    assert "retry" not in found
    assert found["stalled"] == pytest.approx(2 * 1.0 + 0.5)


@pytest.mark.parametrize(
    ("handed_over", "lost", "retry", "productive"),
    [(32, 0, None, 0.6), (0, 32, 0.6, 0.0), (24, 8, 0.15, 0.45), (0, 0, None, 0.0)],
)
def test_a_departure_keeps_the_samples_that_were_handed_over(
    handed_over: int, lost: int, retry: float | None, productive: float
) -> None:
    story = three(1.0, faults=["preempt"])
    story.say(1.6, "left", "peer-1", round=1, handed_over=handed_over, lost=lost)
    story.rounds(2.0, peers=REST)
    story.finish(2.0, REST)
    found = spent(story)
    assert found.get("retry") == retry
    assert found["productive"] == 5 * 0.72 + productive
    assert found["down"] == 0.4


def test_a_joiner_counts_from_its_first_spawn() -> None:
    story = three(1.0)
    story.join(1.5, 2.5, "peer-3", seconds=0.25)
    story.rounds(2.0, peers=ALL)
    story.rounds(3.0, peers=(*ALL, "peer-3"), accumulating_s=0.2)
    story.finish(3.0, (*ALL, "peer-3"))
    assert timeline_row(story.timeline)["peer_seconds"] == pytest.approx(3 * 3.0 + 1.5)
    found = spent(story)
    assert (found["down"], found["state_transfer"]) == (0.75, 0.25)


def test_a_peer_that_finishes_first_stalls() -> None:
    story = three(1.0)
    story.finish(1.0, ["peer-0"])
    story.rounds(2.0, peers=("peer-1", "peer-2"))
    story.finish(2.0, ["peer-1", "peer-2"])
    assert spent(story)["stalled"] == 1.0


def test_with_delays_only_late_results_are_waited_for() -> None:
    story = Story([planned()], configuration=Configuration(delay="gradients"))
    story.rounds(1.0, 2.0, peers=ALL, accumulating_s=0.9, background_s=0.25)
    story.finish(2.0, ALL)
    assert spent(story) == {"averaging": 6 * 0.25, "productive": 6 * 0.75}


def test_a_replicate_that_never_trained_has_no_times() -> None:
    row = timeline_row(timeline_of(Log().spec, Log().head()))
    assert [row[name] for name in TIME] == [None] * len(TIME)


@given(st.data())
@settings(max_examples=30, deadline=None)
def test_classes_add_up_for_incomplete_logs(data: st.DataObject) -> None:
    story = kill_and_restart()
    keep = data.draw(
        st.lists(st.booleans(), min_size=len(story.events), max_size=len(story.events))
    )
    shift = data.draw(st.lists(st.floats(-3, 3), min_size=4, max_size=4))
    clocks = dict(zip((*ALL, "peer-1.1"), shift, strict=True))  # of machines that disagree
    events = [
        {**event, "t": event["t"] + clocks.get(event["peer"], 0.0)}
        for event, kept in zip(story.events, keep, strict=True)
        if kept
    ]
    timeline = timeline_of(story.spec, events)
    if timeline.span is not None:
        classes, total = time_spent(timeline)
        assert all(seconds >= 0 for seconds in classes.values())
        assert set(classes) <= set(CLASSES)
        assert math.isclose(sum(classes.values()), total, rel_tol=1e-9, abs_tol=1e-6)


@pytest.mark.parametrize(("baseline", "productive"), [(None, 4.5), ("ddp", 5.0)])
def test_the_round_of_a_baseline_begins_after_the_evaluation(
    baseline: str | None, productive: float
) -> None:
    """Each round counts 2.5 s of samples; the evaluation of 0.5 s is part of it in a swarm only."""
    spec = make_spec(baseline=baseline, trial=None if baseline else 0)
    computed = {
        (n, 0): {"accumulating_s": 2.5, "waited_s": 0.0, "averaging_s": 0.0} for n in (1, 2)
    }
    log = Log(spec, losses=(), seconds=(2.5, 3.0), rounds=computed)
    events = [event for event in (*log.head(), *log.of_peer(0)) if event["kind"] != "state_round"]
    moments = {"training_started": 0.0, "round": 2.5, "transition": 2.5, "peer_finished": 6.0}
    for event in events:
        late = 3.5 if event.get("round") == 2 and event["kind"] != "peer_finished" else 0.0
        event["t"] = START + 5.0 + moments.get(event["kind"], 2.6 + late) + late
    shares, _ = time_spent(timeline_of(spec, sorted(events, key=lambda event: event["t"])))
    assert shares["evaluation_s"] == pytest.approx(0.5)
    assert shares["productive_s"] == pytest.approx(productive + 0.02, abs=0.1)
