"""Begin of faults, progress of survivors without the targets, and stalls."""

from __future__ import annotations

import pytest

from rayhive.metrics.fault_impact import impacts
from tests.fixtures.faulted import ALL, REST, Story, planned
from tests.fixtures.logs import START


def seconds(value: float | None) -> object:
    """Times are differences of Unix times, which are exact to a quarter of a microsecond."""
    return pytest.approx(value, abs=1e-6)


def story_time(at: float) -> float:
    """Return the Unix time of a moment of a story [s]."""
    return START + at


@pytest.mark.parametrize("named", [True, False])
def test_the_notice_of_a_later_fault_does_not_move_the_start_of_a_pause(named: bool) -> None:
    """Peer 1 is stopped, resumes, and is preempted much later."""
    story = Story([planned(0, "pause", heal_after_s=4.0), planned(1, "preempt")])
    story.rounds(1.0, 2.0, 3.0, 4.0, peers=ALL)
    story.fire(4.5, 0, ["peer-1"])
    story.rounds(8.0, peers=REST)  # only now the others go on without it
    story.heal(8.5, 0, ["peer-1"])
    story.rounds(9.0, 10.0, 11.0, 12.0, peers=ALL)
    story.fire(12.2, 1, ["peer-1"])
    story.say(12.3, "notice", "peer-1", deadline_s=2.0, **({"fault": "f1"} if named else {}))
    story.rounds(13.0, peers=ALL)
    story.say(13.2, "left", "peer-1", round=10, handed_over=64, lost=0)
    story.rounds(14.0, 15.0, 16.0, 17.0, peers=REST)
    story.finish(17.0, REST)
    pause, preempt = impacts(story.timeline)
    assert (pause.fired, pause.detect_s) == (seconds(story_time(4.5)), seconds(7.9 - 4.5))
    assert (preempt.fired, preempt.detect_s) == (seconds(story_time(13.2)), seconds(13.9 - 13.2))


def test_a_round_with_the_target_in_its_group_is_no_progress() -> None:
    """Peer 1 dies when round 5 is averaged; the other peers report that round."""
    story = Story([planned()])
    story.rounds(1.0, 2.0, 3.0, 4.0, peers=ALL)
    story.fire(4.85, 0, ["peer-1"])
    story.lose(4.9, "peer-1")
    story.rounds(5.0, peers=REST, group=list(ALL), group_size=3)
    story.rounds(9.2, 10.2, 11.2, 12.2, peers=REST)
    story.finish(12.2, REST)
    (impact,) = impacts(story.timeline)
    assert impact.detect_s == seconds(9.1 - 4.85)  # it was 0.05: round 5, told at 4.9 s
    assert impact.recover_s == seconds(9.1 - 4.85)
    assert impact.stall is not None and impact.stall.seconds == seconds(9.1 - 4.9)
    for event in story.of("round"):
        del event["group"]  # as in older logs: the group was larger than those who report
    assert impacts(story.timeline)[0] == impact


def test_a_partition_is_not_detected_by_a_round_that_was_under_way() -> None:
    story = Story([planned(kind="partition", heal_after_s=8.0)])
    story.rounds(1.0, 2.0, 3.0, 4.0, peers=ALL)
    story.fire(4.85, 0, ["peer-1"])
    story.rounds(5.0, peers=ALL)  # averaged by all; peer 1 reports it, too
    story.rounds(9.2, 10.2, peers=REST)
    story.heal(12.85, 0, ["peer-1"])
    story.rounds(13.2, peers=ALL)
    story.finish(13.2, ALL)
    (impact,) = impacts(story.timeline)
    assert impact.detect_s == seconds(9.1 - 4.85)


def test_a_target_healed_before_progress_is_detected_by_the_heal() -> None:
    story = Story([planned(kind="pause", heal_after_s=2.0)])
    story.rounds(1.0, 2.0, 3.0, 4.0, peers=ALL)
    story.fire(4.5, 0, ["peer-1"])
    story.heal(6.5, 0, ["peer-1"])
    story.rounds(7.0, 8.0, 9.0, 10.0, peers=ALL)  # they waited for it
    story.finish(10.0, ALL)
    (impact,) = impacts(story.timeline)
    assert impact.detect_s == seconds(6.9 - 4.5)


def test_the_longest_stall_is_that_of_the_slowest_survivor() -> None:
    story = Story([planned()])
    story.rounds(1.0, 2.0, 3.0, 4.0, peers=ALL)
    story.fire(4.5, 0, ["peer-1"])
    story.lose(4.6, "peer-1")
    story.rounds(5.0, peers=("peer-0",), outcome="local", group_size=None)
    story.rounds(9.0, 10.0, peers=REST)
    story.finish(10.0, REST)
    (impact,) = impacts(story.timeline)
    assert impact.detect_s == seconds(0.4)  # of peer 0; peer 2 told its next round at 8.9 s
    assert impact.stall is not None
    assert (impact.stall.seconds, impact.stall.censored) == (seconds(4.4), False)


def test_a_survivor_under_another_fault_is_left_out_of_the_stall() -> None:
    story = Story([planned(0), planned(1, "pause", ("peer-2",), heal_after_s=20.0)])
    story.rounds(1.0, 2.0, 3.0, 4.0, peers=ALL)
    story.fire(4.5, 0, ["peer-1"])
    story.lose(4.6, "peer-1")
    story.fire(4.7, 1, ["peer-2"])
    story.rounds(6.0, 7.0, peers=("peer-0",), outcome="alone", group_size=None)
    story.finish(8.0, ["peer-0"])
    killed, paused = impacts(story.timeline)
    assert killed.stall is not None and killed.stall.seconds == seconds(1.4)
    assert paused.stall is not None and paused.stall.seconds == seconds(1.2)


def test_the_stall_of_a_pause_of_all_peers_is_theirs() -> None:
    story = Story([planned(kind="pause", who=ALL, heal_after_s=3.0)])
    story.rounds(1.0, 2.0, 3.0, 4.0, peers=ALL)
    story.fire(4.5, 0, list(ALL))
    story.heal(7.5, 0, list(ALL))
    story.rounds(8.0, 9.0, 10.0, 11.0, peers=ALL)
    story.finish(11.0, ALL)
    story.end(12.0)
    (impact,) = impacts(story.timeline)
    assert impact.stall is not None
    assert (impact.stall.seconds, impact.stall.censored) == (seconds(3.4), False)
