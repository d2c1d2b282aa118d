"""Refusals: counted once, by peer, in the table and in the timeline."""

from __future__ import annotations

from pathlib import Path

import pytest

from rayhive.metrics.aggregate import fold
from rayhive.metrics.folds import add_counts
from rayhive.metrics.groups.refusals import refusals
from rayhive.metrics.rows import timeline_row
from rayhive.report.timeline_text import timeline_lines
from tests.fixtures.faulted import ALL, Story

ROUNDS = (1.0, 2.0, 3.0, 4.0, 5.0, 6.0)


def refusing(**extra: object) -> Story:
    """Three peers of which peer-2 is refused in rounds 2-4 and 6, and peer-1's parameters once."""
    story = Story()
    story.rounds(*ROUNDS, peers=ALL)
    for peer in ALL:
        for number in (2, 3, 4, 6):
            story.say(
                float(number), "rejected", peer, round=number, offender="peer-2", reason="norm",
                norm=1e3, bound=50.0, **extra,
            )  # fmt: skip
    for peer in ALL[:2]:
        story.say(
            5.0, "rejected", peer, round=5, offender="peer-1", reason="not_finite", norm=None,
            bound=None, tensors="parameters",
        )  # fmt: skip
    story.finish(7.0, ALL)
    return story


@pytest.mark.parametrize("extra", [{"tensors": "gradients"}, {}], ids=["now", "an old log"])
def test_a_refusal_reported_by_every_member_counts_once(extra: dict[str, object]) -> None:
    story = refusing(**extra)
    row = timeline_row(story.timeline)
    assert row["rejected"] == 5
    assert row["rejected_peers"] == "peer-2 4, peer-1 1"
    assert [item.round for item in refusals(story.timeline.events)] == [2, 3, 4, 5, 6]


def test_without_refusals_the_count_is_zero() -> None:
    row = timeline_row(Story().timeline)
    assert (row["rejected"], row["rejected_peers"]) == (0, None)


def test_an_unknown_offender_keeps_its_id() -> None:
    story = refusing()
    story.say(6.5, "rejected", "peer-0", round=6, offender="12D3Koo", reason="checksum")
    assert timeline_row(story.timeline)["rejected_peers"] == "peer-2 4, 12D3Koo 1, peer-1 1"


def test_a_row_has_the_sum_over_its_replicates() -> None:
    stories = [refusing(), refusing(), Story()]
    for story in stories:
        story.say(9.0, "replicate_finished", state="completed", stop_reason="rounds")
    (row,) = fold([timeline_row(story.timeline) for story in stories])
    assert row["rejected"] == 10
    assert row["rejected_peers"] == "peer-2 8, peer-1 2"
    assert add_counts([]) is None


def test_the_timeline_joins_consecutive_rounds_of_a_peer(tmp_path: Path) -> None:
    lines = timeline_lines(refusing().write(tmp_path))
    story = [line for line in lines if "refused" in line]
    assert story == [
        "    2.00 s  the gradients of peer-2 are refused in rounds 2-4: norm",
        "    5.00 s  the parameters of peer-1 are refused in round 5: not_finite",
        "    6.00 s  the gradients of peer-2 are refused in round 6: norm",
        "refused: peer-2 4, peer-1 1 (norm 4, not_finite 1)",
    ]
