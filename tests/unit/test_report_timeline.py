"""Timeline of a replicate as text and as a picture."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from rayhive.errors import RayhiveError
from rayhive.events import (
    Event,
    Fallback,
    FaultFailed,
    FaultFired,
    FaultHealed,
    FaultVerified,
    Left,
    Notice,
    Progress,
    Rejected,
)
from rayhive.report.page.svg import Chart
from rayhive.report.page.timeline import timeline_charts
from rayhive.report.page.write import timeline_html, write_timeline_picture
from rayhive.report.timeline_lanes import lanes, loss_points
from rayhive.report.timeline_text import event_text, throughput, timeline_lines
from tests.fixtures.faulted import ALL, REST, Story, kill_and_restart, planned
from tests.fixtures.html import Page
from tests.fixtures.logs import Log, timeline_of

# -- text --------------------------------------------------------------------------------------


def test_the_text_has_the_faults_their_proofs_and_times(tmp_path: Path) -> None:
    lines = timeline_lines(kill_and_restart().write(tmp_path))
    assert lines[0] == "story, seed 0, none, 3 peers: completed after 13.0 s (rounds)"
    story = [line for line in lines if re.match(r" +[\d.]+ s  ", line)]
    assert story == [
        "    4.50 s  f0 kill on peer-1 fires",
        "    4.60 s  f0 verified: pids gone",
        "    4.60 s  peer-1 lost: killed by signal 9",
        "    5.00 s  peer-1.1 started by f0",
        "    8.40 s  peer-1.1 loaded the state of round 7 in 0.50 s",
    ]
    # "recovered after 1.30 s" alone, as it was, reads as if peer 1 had been back then
    assert (
        "f0 kill (peer-1): verified; survivors went on after 1.30 s (longest stall 1.30 s); "
        "throughput of the live peers recovered after 1.30 s"
    ) in lines
    assert "peer-1.1: contributing 5.80 s after its start, 6.30 s after f0" in lines
    assert "committed 1,984 of 2,034 samples (goodput 97.5 %), lost 32" in lines
    assert any(line.startswith("39.0 s of peers: productive 66.5 %") for line in lines)
    assert sum(line.startswith("holds ") for line in lines) == 8


def test_recorded_invariants_are_not_checked_again(tmp_path: Path) -> None:
    story = kill_and_restart()
    end = story.events.pop()
    story.say(13.2, "invariant", name="no_orphans", ok=False, checked=3, violations=["pid 7 lives"])
    story.events.append(end)
    lines = timeline_lines(story.write(tmp_path))
    at = lines.index("VIOLATED  no_orphans (3 checked)")
    assert lines[at + 1 :] == ["          pid 7 lives"]


def test_unseen_times_are_named(tmp_path: Path) -> None:
    story = Story([planned(), planned(1, round=99)])
    story.rounds(1.0, peers=ALL)
    story.fire(1.5, 0, ["peer-1"], ok=False)
    story.finish(2.0, ALL)
    lines = timeline_lines(story.write(tmp_path))
    assert (
        "f0 kill (peer-1): NOT VERIFIED; not seen within 0.50 s: survivors went on "
        "(longest stall more than 0.50 s); recovery unknown: too few rounds before the first fault"
    ) in lines
    assert "f1 kill (round 99): did not fire" in lines
    assert any("f0 NOT VERIFIED: pids gone" in line for line in lines)


def test_the_text_of_a_replicate_that_never_trained(tmp_path: Path) -> None:
    log = Log(state="failed")
    log.of_peer = lambda peer: []  # type: ignore[method-assign]
    assert timeline_lines(log.write(tmp_path))[-1] == "It never trained."


@pytest.mark.parametrize(
    ("event", "text"),
    [
        (Left(peer="peer-1", round=3, handed_over=9, lost=0),
         "peer-1 leaves: 9 samples handed over, 0 lost"),
        (Notice(peer="peer-1", deadline_s=15.0), "peer-1 receives notice: 15 s"),
        (Notice(peer="peer-1"), "peer-1 receives notice"),
        (Rejected(peer="peer-0", offender="Qm", round=3, reason="norm"),
         "peer-0 refuses the gradients of Qm in round 3: norm"),
        (FaultFailed(fault="f2", phase="heal", error="a\nb"), "f2 FAILED in heal: a b"),
        (FaultFired(fault="f2", fault_kind="pause", effect="stopped", who=["a", "b"],
                    slip_rounds=1), "f2 pause on a, b fires, 1 rounds late"),
        (Fallback(peer="peer-0", round=3, reason="E('x')", choice="local"),
         "peer-0 applies its own gradients in round 3: E('x')"),
        (Fallback(peer="peer-0", round=3, reason="E('x')", choice="skip"),
         "peer-0 skips round 3: E('x')"),
        (Progress(peer="peer-0", computed=3), None),
    ],
)  # fmt: skip
def test_events_in_words(event: Event, text: str | None) -> None:
    assert event_text(event) == text


def test_long_proofs_are_cut() -> None:
    text = event_text(FaultVerified(fault="f0", ok=True, proof={"pids": list(range(1000))}))
    assert text is not None and text.endswith("…") and len(text) < 110


def test_throughput_is_the_samples_of_rounds_spread_over_them() -> None:
    rates = throughput(kill_and_restart().timeline, 130)  # of 0.1 s each
    assert sum(rates) * 0.1 == pytest.approx(1984)
    assert rates[5] == pytest.approx(192 / 0.9, rel=1e-5)  # the first round ends at 0.9 s
    assert rates[15] == pytest.approx(192, rel=1e-5)
    assert rates[50] == pytest.approx(128 / 1.9, rel=1e-5)


# -- picture -----------------------------------------------------------------------------------


def shapes(chart: Chart, style: str) -> list[dict[str, str | float]]:
    """Return the attributes of the shapes of a chart whose class begins with ``style``."""
    return [
        shape.attributes
        for shape in chart.shapes
        if str(shape.attributes.get("class", "")).split(" ")[-1] == style
    ]


def test_the_picture_has_loss_throughput_lanes_and_fault_windows(tmp_path: Path) -> None:
    story = kill_and_restart()
    story.evaluate(9.0, REST, loss=0.3)
    write_timeline_picture(story.write(tmp_path), tmp_path / "picture.html")
    page = Page((tmp_path / "picture.html").read_text(encoding="utf-8"))
    assert not [
        each for each in page.elements if {"src", "href"} & each.attributes.keys() - {"href"}
    ]
    labels = [
        each.attributes["aria-label"] for each in page.all("svg") if "role" in each.attributes
    ]
    assert [label.partition(".")[0] for label in labels] == ["Loss", "Throughput", "Replicas"]
    assert page.all("h1")[0].text.startswith("story, none, seed 0: completed after 13 s")


def test_a_fault_is_shaded_over_all_charts_until_throughput_is_back() -> None:
    picture = timeline_charts(kill_and_restart().timeline)
    for chart in picture.charts:
        (shaded,) = shapes(chart, "fault")
        (back,) = shapes(chart, "back")
        ends = [chart.to_x(4.5), chart.to_x(5.8)]
        width = float(shaded["width"])
        assert [shaded["x"], float(shaded["x"]) + width] == pytest.approx(ends, abs=0.2)
        assert back["x1"] == pytest.approx(ends[1], abs=0.1)
        assert shaded["height"] == pytest.approx(chart.bottom - chart.top, abs=0.2)
    (fault, rejoin) = picture.faults
    assert (fault.name, fault.what, fault.at) == ("f0", "kill on peer-1", "4.5 s")
    assert (fault.proof, fault.went_on, fault.recovered) == ("verified", "1.30 s", "1.30 s")
    assert rejoin.recovered == "contributes after 5.80 s"


def test_a_fault_is_shaded_until_it_is_healed() -> None:
    story = Story([planned(kind="pause", heal_after_s=2.0)])
    story.rounds(1.0, 2.0, peers=ALL)
    story.fire(2.0, 0, ["peer-1"])
    story.heal(4.0, 0, ["peer-1"])
    story.rounds(5.0, peers=ALL)
    story.finish(5.0, ALL)
    chart = timeline_charts(story.timeline).charts[0]
    (shaded,) = shapes(chart, "fault")
    end = float(shaded["x"]) + float(shaded["width"])
    assert end == pytest.approx(chart.to_x(4.0), abs=0.2)


def test_thousands_of_bars_are_joined() -> None:
    story = Story()
    story.rounds(*(0.5 * n for n in range(1, 506)), peers=ALL)
    story.finish(254.0, ALL)
    lane = timeline_charts(story.timeline).charts[-1]
    assert len(shapes(lane, "act-averaged")) == len(ALL)


def test_lanes_show_the_activity_of_each_replica() -> None:
    story = kill_and_restart()
    bars = lanes(story.timeline)
    assert {bar.replica for bar in bars} == set(ALL)
    mine = [bar for bar in bars if bar.replica == "peer-1"]
    assert [bar.activity for bar in mine] == ["averaged"] * 4 + ["starting"] + ["averaged"] * 3
    starting = mine[4]
    assert (starting.begin, starting.seconds) == pytest.approx((5.0, 3.4), abs=1e-5)
    ends = [bar.begin + bar.seconds for bar in mine]
    assert all(a <= b.begin + 1e-6 for a, b in zip(ends, mine[1:], strict=False))
    assert "64 samples, group of 3" in mine[0].text


def test_evaluating_is_drawn_before_the_round_that_follows() -> None:
    story = Story()
    story.rounds(1.0, peers=ALL)
    story.evaluate(1.5, ALL, loss=0.5)
    story.rounds(2.5, peers=ALL)
    bars = [bar for bar in lanes(story.timeline) if bar.replica == "peer-0"]
    assert [(bar.activity, round(bar.begin, 3), round(bar.seconds, 3)) for bar in bars] == [
        ("averaged", 0.0, 1.0), ("evaluating", 1.0, 0.5), ("averaged", 1.5, 1.0),
    ]  # fmt: skip


def test_loss_points_are_means_over_the_peers() -> None:
    story = Story()
    story.rounds(1.0, peers=ALL, loss=2.0)
    story.of("round")[0]["loss"] = 5.0
    story.evaluate(1.5, ALL, loss=0.5)
    points = loss_points(story.timeline)
    assert points["training batches"] == [(pytest.approx(0.9, abs=1e-6), 3.0)]
    assert points["held out"] == [(pytest.approx(1.5), 0.5)]


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_losses_that_are_not_finite_are_not_drawn(loss: float) -> None:
    story = Story()
    story.rounds(1.0, 2.0, peers=ALL, loss=2.0)
    story.of("round")[0]["loss"] = loss
    story.evaluate(2.5, ALL, loss=loss)
    points = loss_points(story.timeline)
    assert [value for _, value in points["training batches"]] == [2.0]
    assert points["held out"] == []
    assert "nan" not in timeline_html(story.timeline).lower().partition("<main")[2]


def test_a_picture_without_training_is_an_error() -> None:
    log = Log()
    with pytest.raises(RayhiveError, match="never trained"):
        timeline_html(timeline_of(log.spec, log.head()))


@pytest.mark.parametrize(
    ("done", "told"),
    [
        ({"failed": {}}, "f0 healed: nothing left"),
        ({"failed": {"peer-1": "no answer"}}, "f0 healed: failed peer-1 no answer"),
        ({"lives": {"peer-1": "peer-1.1"}}, "f0 healed: lives peer-1 peer-1.1"),
    ],
)
def test_a_heal_without_failures_does_not_mention_them(done: dict[str, object], told: str) -> None:
    assert event_text(FaultHealed(fault="f0", done=done)) == told
