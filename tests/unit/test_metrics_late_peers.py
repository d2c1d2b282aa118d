"""Numbers of peers that end, join or load a state at other times than the rest."""

from __future__ import annotations

import pytest

from rayhive.metrics.fault_impact import impacts
from rayhive.metrics.groups.convergence import evaluations
from rayhive.metrics.rows import timeline_row
from rayhive.spec import Configuration
from tests.fixtures.faulted import ALL, REST, STATE_BYTES, Story, planned

FOUR = tuple(f"peer-{n}" for n in range(4))


def pause_of_an_evaluation(story: Story, names: tuple[str, ...], clock_s: float) -> None:
    """Say at 8 s that the peers evaluated for four seconds at a training clock."""
    values = {"loss": 0.5, "accuracy": 0.5}
    for name in names:
        story._evaluated[name] += 4.0
        story.say(
            8.0, "evaluation", name, round=4, samples=0, clock_s=clock_s, values=values, final=False
        )
        story._went_on[name] = 8.0


def test_the_last_evaluations_are_those_of_all_peers() -> None:
    """Two peers evaluate after their last round and end; the third ends in an earlier one."""
    story = Story([planned(kind="pause", heal_after_s=1.0)])
    story.rounds(1.0, 2.0, peers=ALL)
    story.fire(2.2, 0, ["peer-1"])
    story.rounds(3.5, 4.5, peers=REST)
    story.evaluate(5.0, REST, loss=0.05)
    story.finish(5.0, REST)
    story.heal(5.1, 0, ["peer-1"])
    story.round = 2
    story.evaluate(5.8, ["peer-1"], loss=0.65, final=True)
    story.finish(5.8, ["peer-1"])
    story.end(6.0)
    timeline = story.timeline
    regular, last = evaluations(timeline)
    assert (regular.round, last.round) == (4, 4)
    assert timeline_row(timeline)["final_loss"] == pytest.approx((0.05 + 0.05 + 0.65) / 3)


def test_a_last_evaluation_that_was_undone_does_not_count() -> None:
    story = Story([planned()], baseline="elastic", trial=None)
    story.rounds(1.0, 2.0, 3.0, 4.0, 5.0, peers=ALL)
    story.evaluate(6.0, ["peer-0"], loss=0.9, final=True)
    story.finish(6.0, ["peer-0"])
    names = ["peer-1", "peer-2"]
    for name in names:
        story.say(
            8.0, "rolled_back", name, round_before=5, round=4, group=names, seconds=1.5,
            load_s=0.1, lost=64,
        )  # fmt: skip
        story._went_on[name] = 8.0
    story.round = 4
    story.rounds(9.0, peers=names)
    story.evaluate(10.0, names, loss=0.1, final=True)
    story.finish(10.0, names)
    story.end(11.0)
    assert timeline_row(story.timeline)["final_loss"] == pytest.approx(0.1)


def test_the_clock_of_a_joiner_stands_still_while_the_others_evaluate() -> None:
    story = Story([planned()])
    story.rounds(1.0, 2.0, 3.0, 4.0, peers=ALL)
    pause_of_an_evaluation(story, ALL, 4.0)
    story.join(5.0, 7.9, "peer-3")
    story.rounds(9.0, 10.0, peers=FOUR)
    story.finish(10.0, FOUR)
    story.end(11.0)
    # ten seconds less four, and 0.1 s that the joiner counted before these had ended
    assert story.timeline.clock_s == pytest.approx(6.1)


def test_a_joiner_goes_on_from_the_clock_of_an_earlier_one() -> None:
    story = Story([planned(who=ALL)])
    story.rounds(1.0, 2.0, peers=ALL)
    story.join(1.2, 2.0, "peer-3")
    story.rounds(3.0, peers=FOUR)
    for name in ALL:
        story.lose(3.5, name)
    story.rounds(4.0, peers=("peer-3",))
    pause_of_an_evaluation(story, ("peer-3",), 2.0)
    story.join(6.0, 8.5, "peer-0.1")
    story.rounds(9.0, 10.0, peers=("peer-3", "peer-0.1"))
    story.finish(10.0, ("peer-3", "peer-0.1"))
    story.end(11.0)
    assert story.timeline.clock_s == pytest.approx(6.0)


@pytest.mark.parametrize("loads", [False, True])
def test_rounds_in_pairs_are_not_lost_with_a_loaded_state(loads: bool) -> None:
    configuration = Configuration(local_steps=4, group_size=2, outer_momentum=0.5)
    story = Story([planned(kind="pause", who=("peer-3",))], 4, configuration=configuration)
    pairs = [((0, 1), (2, 3)), ((0, 2), (1, 3)), ((0, 3), (1, 2))]
    for number in range(1, 10):
        for pair in pairs[number % 3]:
            story.round = number - 1
            story.rounds(float(number), peers=[FOUR[n] for n in pair])
    story.fire(9.2, 0, ["peer-3"])
    story.heal(9.5, 0, ["peer-3"])
    if loads:
        story.say(
            9.8, "state_loaded", "peer-3", round_before=9, round_of_state=9, round=9, seconds=0.1,
            received_bytes=STATE_BYTES, lost=0,
        )  # fmt: skip
    story.finish(10.0, FOUR)
    story.end(11.0)
    row = timeline_row(story.timeline)
    assert (row["samples_lost"], row["goodput"]) == (0, 1.0)
    assert story.timeline.committed() == 4 * 9 * 64


@pytest.mark.parametrize("trains_on", [False, True])
def test_recovery_under_a_partition_is_that_of_the_remaining_peers(trains_on: bool) -> None:
    half, other = FOUR[:2], FOUR[2:]
    story = Story([planned(kind="partition", who=other, heal_after_s=20.0)], peers=4)
    story.rounds(1.0, 2.0, 3.0, 4.0, 5.0, peers=FOUR)
    story.fire(5.5, 0, list(other))
    slow = [5.5 + 1.8 * n for n in range(1, 9)]  # 56 % of the throughput before
    story.rounds(*slow, peers=half)
    if trains_on:
        story.round = 5
        story.rounds(*(end + 0.3 for end in slow), peers=other)
    story.heal(20.5, 0, list(other))
    for name in FOUR:
        story._went_on[name] = 20.5
    story.round = 13
    story.rounds(22.0, 23.0, 24.0, 25.0, 26.0, peers=FOUR)
    story.finish(26.0, FOUR)
    story.end(27.0)
    (impact,) = impacts(story.timeline)
    assert impact.recover_s == pytest.approx(16.4, abs=1e-5)


def test_recovery_without_a_baseline_is_unknown_and_not_censored() -> None:
    story = Story([planned(0, kind="straggler")])
    story.rounds(1.0, 2.0, peers=ALL)
    story.fire(2.5, 0, ["peer-1"])
    story.rounds(*map(float, range(3, 20)), peers=ALL)
    story.finish(20.0, ALL)
    story.end(21.0)
    row = timeline_row(story.timeline)
    assert (row["recover_s"], row["recover_p50_s"], row["censored"]) == (None, None, 0)
    assert row["detect_p50_s"] == pytest.approx(0.4)


@pytest.mark.parametrize("second", [False, True])
def test_a_later_return_to_a_checkpoint_does_not_change_an_earlier_fault(second: bool) -> None:
    faults = [planned(0), planned(1)] if second else [planned(0)]
    story = Story(faults, baseline="elastic", trial=None)

    def go_back(at: float, names: tuple[str, ...]) -> None:
        for name in names:
            story.say(
                at, "rolled_back", name, round_before=story.round, round=10, group=list(names),
                seconds=2.0, load_s=0.1, lost=0,
            )  # fmt: skip
            story._went_on[name] = at
        story.round = 10

    story.rounds(*map(float, range(1, 11)), peers=ALL)
    story.fire(10.5, 0, ["peer-1"])
    story.lose(10.6, "peer-1")
    go_back(13.0, REST)
    story.rounds(*map(float, range(14, 21)), peers=REST)
    if second:
        story.fire(20.5, 1, [REST[1]])
        story.lose(20.6, REST[1])
        go_back(24.0, REST[:1])
        story.rounds(*map(float, range(25, 35)), peers=REST[:1])
    story.finish(35.0, REST[:1] if second else REST)
    story.end(36.0)
    first, *others = impacts(story.timeline)
    assert (first.detect_s, first.recover_s) == (
        pytest.approx(3.4, abs=1e-5),
        pytest.approx(3.4, abs=1e-5),
    )
    assert first.stall is not None and first.stall.seconds == pytest.approx(3.4, abs=1e-5)
    assert [impact.detect_s for impact in others] == [pytest.approx(4.4, abs=1e-5)] * second
