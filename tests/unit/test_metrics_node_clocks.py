"""Rows of a replicate whose nodes have wrong clocks, against the same with right ones."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rayhive.api.recorded import trace
from rayhive.cli.recorded import clock_lines
from rayhive.columns import Row
from rayhive.metrics.clocks import on_one_clock
from rayhive.metrics.folds import parse_times
from rayhive.metrics.rows import replicate_row, timeline_row
from rayhive.report.render import results_text
from tests.fixtures.faulted import Story, kill_and_restart

REPLICAS = ("peer-0", "peer-1", "peer-2")
#: Columns made of differences between times of different processes.
COMPARED = {
    f"{time}_{end}"
    for time in ("detect", "stall", "recover", "rejoin")
    for end in ("s", "p50_s", "p95_s")
}
#: Columns that divide the wall time between those times.
WALL = {"live_share", "peer_seconds", "productive_s", "evaluation_s"}
#: Seconds by which times differ that are sums of Unix times.
ROUNDING = 1e-5


def skewed(wrong: Mapping[str, float], boots: Mapping[str, str] | None = None) -> Story:
    """Return a kill and a restart, where each replica's node has a clock that is wrong.

    Args:
        wrong: Replica -> its clock less the supervisor's [s].
        boots: Replica -> boot of its node's kernel; the supervisor's is ``home``.
    """
    story = kill_and_restart()
    for event in story.events:
        replica = str(event["peer"]).partition(".")[0]
        if event["kind"] == "peer_spawned":
            event["node"] = f"node-of-{replica}"
            if boots:
                event["boot"] = boots[replica]
        elif event["kind"] == "replicate_started" and boots:
            event["boot"] = "home"
        elif event["kind"] != "peer_lost":
            event["t"] += wrong.get(replica, 0.0)
    return story


def row_of(story: Story) -> Row:
    return timeline_row(on_one_clock(story.timeline))


def numbers(row: Row, name: str) -> Sequence[float]:
    """Return the times in a cell that holds one or several."""
    value = row[name]
    if isinstance(value, str):
        return [time.seconds for time in parse_times([value])]
    return [] if value is None else [float(value)]


def seconds(limit: float) -> st.SearchStrategy[float]:
    return st.floats(-limit, limit, allow_nan=False)


@settings(max_examples=25, deadline=None)
@given(st.tuples(seconds(1e5), seconds(50.0), seconds(3.0)))
@example((0.0, 30.0, -7.0))
@example((0.3, 0.2, 0.0))
def test_wrong_clocks_change_no_row_beyond_its_uncertainty(wrong: tuple[float, ...]) -> None:
    right, row = row_of(skewed({})), row_of(skewed(dict(zip(REPLICAS, wrong, strict=True))))
    error = float(row["clock_uncertainty_s"] or 0.0)
    assert 0 < error <= 1.0 + ROUNDING
    largest = max(map(abs, wrong))
    assert abs(float(row["clock_correction_s"] or 0.0) - largest) <= error + ROUNDING
    for name in COMPARED:
        found, expected = numbers(row, name), numbers(right, name)
        assert len(found) == len(expected) > 0
        for a, b in zip(found, expected, strict=True):
            assert abs(a - b) <= error + ROUNDING, name
    apart = COMPARED | WALL | {"clock_correction_s", "clock_uncertainty_s"}
    rest = {name for name in right if name not in apart and not name.startswith("badput")}
    assert {name: row[name] for name in rest} == {name: right[name] for name in rest}


def test_without_the_correction_the_times_are_wrong() -> None:
    right, raw = row_of(skewed({})), timeline_row(skewed(dict.fromkeys(REPLICAS, 30.0)).timeline)
    assert numbers(raw, "detect_p50_s")[0] != pytest.approx(
        numbers(right, "detect_p50_s")[0], abs=1.0
    )


@settings(max_examples=25, deadline=None)
@given(st.tuples(seconds(0.4), seconds(0.4), seconds(0.4)))
def test_clocks_of_one_kernel_are_never_corrected(late: tuple[float, ...]) -> None:
    story = skewed(dict(zip(REPLICAS, late, strict=True)), dict.fromkeys(REPLICAS, "home"))
    row = row_of(story)
    assert row == timeline_row(story.timeline)
    assert (row["clock_correction_s"], row["clock_uncertainty_s"]) == (0.0, 0.0)


def test_nodes_of_one_kernel_share_an_offset() -> None:
    boots = {"peer-0": "home", "peer-1": "far", "peer-2": "far"}
    clocks = on_one_clock(skewed({"peer-1": 40.0, "peer-2": 40.0}, boots).timeline).clocks
    assert clocks is not None
    assert clocks.offsets["node-of-peer-0"].seconds == 0
    assert clocks.offsets["node-of-peer-1"] == clocks.offsets["node-of-peer-2"]
    assert clocks.offsets["node-of-peer-1"].seconds == pytest.approx(40.0, abs=0.5)


def test_a_failure_is_known_before_the_peers_end() -> None:
    """The outcome is written, then the peers are asked to stop: it bounds no clock."""
    story = skewed({})
    story.events.pop()
    story.say(12.95, "outcome", state="failed", stop_reason="peer-1: lost")
    story.end(14.0, "failed")
    row = row_of(story)
    assert row["clock_correction_s"] == 0


def test_rows_of_a_folder_are_corrected(tmp_path: Path) -> None:
    story = skewed({"peer-1": 50.0, "peer-2": -9.0})
    row = replicate_row(story.write(tmp_path))
    assert row == row_of(story)
    assert row["clock_correction_s"] == pytest.approx(50.0, abs=1.0)


def test_the_table_says_that_clocks_were_corrected(tmp_path: Path) -> None:
    skewed({"peer-1": 50.0}).write(tmp_path / "skewed")
    skewed({}).write(tmp_path / "right")
    text = " ".join(results_text(tmp_path / "skewed", columns=["detect_p50_s"]).split())
    assert re.search(r"Clocks of nodes differed by up to (49\.\d|50) s: times are corrected", text)
    assert "Clocks" not in results_text(tmp_path / "right", columns=["detect_p50_s"])


def test_logs_that_name_no_nodes_have_no_clocks() -> None:
    story = skewed({})
    story.events = [event for event in story.events if event["kind"] != "peer_spawned"]
    row = row_of(story)
    assert (row["clock_correction_s"], row["clock_uncertainty_s"]) == (None, None)


def test_a_trace_says_whether_clocks_were_corrected(tmp_path: Path) -> None:
    home = dict.fromkeys(REPLICAS, "home")
    words = {"right": "may all be equal", "skewed": "(corrected)", "home": "of a common kernel"}
    stories = {"right": skewed({}), "skewed": skewed({"peer-1": 50.0}), "home": skewed({}, home)}
    for name, story in stories.items():
        _, clocks = trace(story.write(tmp_path / name))
        assert words[name] in next(clock_lines(clocks))
