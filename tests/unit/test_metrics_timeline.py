from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rayhive.errors import RayhiveError
from rayhive.events import Event
from rayhive.metrics.groups.convergence import evaluations
from rayhive.metrics.logs import read_timelines
from rayhive.metrics.rows import read_attempts, replicate_row, timeline_row
from tests.fixtures.logs import Log, make_spec, timeline_of, write_events


def test_an_evaluation_point_is_the_mean_of_the_peers() -> None:
    log = Log()
    points = evaluations(timeline_of(log.spec, log.events()))
    assert [point.round for point in points] == [2, 4, 4]  # the last one is the final one
    first = points[0]
    assert first.values["loss"] == pytest.approx(1.01)
    assert first.values["accuracy"] == 0.8
    assert (first.samples, first.clock_s) == (256, 2.6)


def test_committed_samples_up_to_a_round() -> None:
    log = Log(rounds={(2, 1): {"outcome": "local"}, (3, 0): {"outcome": "skipped"}})
    timeline = timeline_of(log.spec, log.events())
    assert [timeline.committed(until) for until in (0, 1, 2, 3, 4, None)] == [
        0, 128, 256, 320, 448, 448,
    ]  # fmt: skip


def test_a_log_without_its_end_is_unfinished(tmp_path: Path) -> None:
    folder = Log(state=None).write(tmp_path)
    row = replicate_row(folder)
    assert row["state"] == "unfinished"
    assert row["stop_reason"] is None
    assert row["ended"] is None
    assert row["rounds"] == 4  # what there is is told


def test_a_folder_with_only_a_spec_is_unfinished(tmp_path: Path) -> None:
    (tmp_path / "spec.json").write_text(make_spec(trial=7).model_dump_json())
    row = replicate_row(tmp_path)
    assert (row["trial"], row["state"], row["rounds"], row["goodput"]) == (
        7, "unfinished", None, None,
    )  # fmt: skip


def test_events_without_a_spec_file_are_sufficient(tmp_path: Path) -> None:
    folder = Log().write(tmp_path)
    with_spec = replicate_row(folder)
    (folder / "spec.json").unlink()
    assert replicate_row(folder) == with_spec


def test_a_folder_without_spec_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RayhiveError, match="spec of the replicate cannot be read"):
        replicate_row(tmp_path)
    (tmp_path / "spec.json").write_text('{"study": 1}')
    with pytest.raises(RayhiveError, match="not a replicate's spec"):
        replicate_row(tmp_path)


def test_several_attempts_in_one_log_are_separate_timelines(tmp_path: Path) -> None:
    folder = tmp_path / "r0-none"
    for attempt, state in enumerate((None, "completed", "stopped")):
        log = Log(
            spec=make_spec(attempt=attempt), state=state, seconds=(1.0,) * (attempt + 2),
            started=100.0 * attempt,
        )  # fmt: skip
        write_events(folder, log.events())
    assert [timeline.state for timeline in read_timelines(folder)] == [
        "unfinished",
        "completed",
        "stopped",
    ]
    row = replicate_row(folder)
    assert (row["attempt"], row["rounds"]) == (1, 3)


def test_rotated_logs_are_attempts(tmp_path: Path) -> None:
    folder = Log(spec=make_spec(attempt=0), seconds=(1.0,) * 5).write(tmp_path)
    (folder / "events.jsonl").rename(folder / "events.attempt-0.jsonl")
    assert replicate_row(folder)["rounds"] == 5  # the next one has not begun
    budget = make_spec().budget.model_copy(update={"trials": 99})  # the study was prolonged
    Log(spec=make_spec(attempt=1, budget=budget), state=None).write(tmp_path)
    assert (replicate_row(folder)["attempt"], replicate_row(folder)["rounds"]) == (0, 5)
    Log(spec=make_spec(attempt=1, budget=budget), state="failed").write(tmp_path)
    attempts = list(read_attempts(folder))
    assert [attempt.row["state"] for attempt in attempts] == ["completed", "unfinished", "failed"]
    assert len({attempt.identity for attempt in attempts}) == 1
    assert replicate_row(folder)["state"] == "failed"


def test_attempts_in_different_trials_share_an_identity(tmp_path: Path) -> None:
    logs = [
        Log(spec=make_spec(trial=1)),
        Log(spec=make_spec(trial=2, attempt=1)),
        Log(spec=make_spec(trial=3, replicate=1)),
    ]
    found = [next(read_attempts(log.write(tmp_path))) for log in logs]
    assert found[0].identity == found[1].identity != found[2].identity
    assert found[0].rank < found[1].rank


@st.composite
def merges(draw: st.DrawFn) -> list[Event]:
    """Draw an order of the events that keeps the order of each peer's own."""
    log = Log(rounds={(2, 0): {"outcome": "partial", "fraction": 0.5}})
    peers = [log.of_peer(peer) for peer in range(2)]
    order = draw(st.permutations([peer for peer in range(2) for _ in peers[peer]]))
    sources = [iter(events) for events in peers]
    return [*log.head(), *(next(sources[peer]) for peer in order), *log.tail()]


@given(merges())
@settings(max_examples=30, deadline=None)
def test_the_order_of_merging_changes_no_column(events: list[Event]) -> None:
    log = Log(rounds={(2, 0): {"outcome": "partial", "fraction": 0.5}})
    expected = timeline_row(timeline_of(log.spec, log.events()))
    assert timeline_row(timeline_of(log.spec, events)) == expected


@given(st.integers(min_value=1), st.booleans())
@settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_a_torn_last_line_is_ignored(tmp_path: Path, cut: int, finished: bool) -> None:
    run = tmp_path / f"{cut}-{finished}"
    folder = Log(state="completed" if finished else None).write(run)
    path = folder / "events.jsonl"
    whole = path.read_bytes()
    last = whole.rstrip(b"\n").rfind(b"\n") + 1
    path.write_bytes(whole[:last])
    expected = replicate_row(folder)
    length = len(whole) - 1 - last
    path.write_bytes(whole[: last + 1 + cut % length])
    assert replicate_row(folder) == expected
