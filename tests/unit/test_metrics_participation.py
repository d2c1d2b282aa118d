"""Participation, compared with numbers by hand."""

from __future__ import annotations

import pytest

from rayhive.metrics.groups.communication import complete_rounds
from rayhive.metrics.live_capacity import live_share
from rayhive.metrics.participation import participation
from tests.fixtures.faulted import ALL, REST, Story, planned

#: Peer 1 under a fault from 3.5 s on, in the rounds that end at 4 and 5 s.
SHARE = (3 + 2 * 2 / 3) / 5


def faulted(kind: str) -> Story:
    story = Story([planned(kind=kind, heal_after_s=3.0)])
    story.rounds(1.0, 2.0, 3.0, peers=ALL)
    story.fire(3.5, 0, ["peer-1"])
    return story


def share(story: Story) -> object:
    return participation(story.timeline)


@pytest.mark.parametrize(("kind", "expected"), [("pause", 1.0), ("straggler", SHARE)])
def test_a_stopped_peer_is_not_expected_and_a_slow_one_is(kind: str, expected: float) -> None:
    story = faulted(kind)
    story.rounds(4.0, 5.0, peers=REST)
    story.finish(5.0, ALL)
    assert share(story) == pytest.approx(expected)


def test_a_killed_peer_is_not_expected_before_its_loss_is_noticed() -> None:
    story = faulted("kill")
    story.rounds(4.0, 5.0, peers=REST)
    story.lose(5.0, "peer-1")
    story.finish(5.0, REST)
    assert share(story) == 1.0


def test_a_peer_with_notice_is_expected_until_it_leaves() -> None:
    story = faulted("preempt")
    story.say(3.6, "notice", "peer-1", fault="f0", deadline_s=2.0)
    story.rounds(4.0, 5.0, peers=REST)
    story.say(5.0, "left", "peer-1", round=5, handed_over=0, lost=0)
    story.rounds(6.0, peers=REST)
    story.finish(6.0, REST)
    assert share(story) == pytest.approx((4 + 2 * 2 / 3) / 6)


def test_a_peer_that_holds_its_node_is_not_expected() -> None:
    story = Story()
    for peer in REST:
        (ready,) = story.of("peer_ready", peer)
        ready["trains"] = False
    story.rounds(1.0, 2.0, peers=["peer-1"], outcome="alone", group_size=1)
    story.lose(2.5, REST[0])
    story.rounds(3.0, peers=["peer-1"], outcome="alone", group_size=1)
    story.finish(3.0, [REST[1], "peer-1"])
    assert share(story) == 1.0
    assert live_share(story.timeline) == 1.0
    assert len(complete_rounds(story.timeline)) == 3


def test_a_joiner_is_expected_from_the_start_of_its_training() -> None:
    story = Story()
    story.rounds(1.0, 2.0, peers=ALL)
    story.spawn(2.1, "peer-3")
    story.rounds(3.0, peers=ALL)
    story.ready(3.5, "peer-3")
    story.train(3.5, "peer-3", 3)
    story.rounds(4.0, peers=ALL)
    story.rounds(5.0, peers=(*ALL, "peer-3"))
    story.finish(5.0, (*ALL, "peer-3"))
    assert share(story) == pytest.approx((4 + 3 / 4) / 5)


def test_a_step_alone_is_no_participation_beside_other_live_peers() -> None:
    story = Story()
    story.rounds(1.0, peers=ALL)
    story.rounds(2.0, peers=ALL, outcome="alone", group_size=None, waited_s=None)
    story.rounds(3.0, peers=REST)
    story.finish(3.0, ALL)
    assert share(story) == pytest.approx((1 + 0 + 2 / 3) / 3)


def test_the_last_peer_takes_part_alone() -> None:
    story = Story(peers=1)
    story.rounds(1.0, 2.0, peers=["peer-0"], outcome="alone", group_size=None, waited_s=None)
    story.rounds(3.0, peers=["peer-0"], outcome="skipped")
    story.finish(3.0, ["peer-0"])
    assert share(story) == pytest.approx(2 / 3)


def test_a_peer_that_finished_is_not_expected() -> None:
    story = Story()
    story.rounds(1.0, peers=ALL)
    story.finish(1.5, ["peer-1"])
    story.rounds(2.0, peers=REST)
    story.finish(2.0, REST)
    assert share(story) == 1.0


def test_no_rounds() -> None:
    assert share(Story()) is None
