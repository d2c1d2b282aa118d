"""Traces of every format: read to the last row, folded onto few replicas, replayed as faults."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rayhive.errors import ConfigError
from rayhive.faults.library import plan_of
from rayhive.faults.traces.formats import TRACE_FORMATS
from rayhive.faults.traces.trace import SHIPPED, Step, Trace, assemble, fold, read_trace
from rayhive.spec import Budget, SwarmConfig
from rayhive.spec.fault_plan import FaultPlan
from tests.unit.test_fault_plans import write

pytestmark = pytest.mark.usefixtures("fakes")
G4DN = SHIPPED / "bamboo" / "g4dn-trace.csv"
PARCAE = SHIPPED / "parcae" / "trace_ll_10_11.txt"

COUNTS = "2024-03-01, 23:59:00, 4\n2024-03-02, 00:01:00, 2\n2024-03-02, 00:00:00, 3\n\n"
SAMPLES = {
    "bamboo": "0,add,a\n60000,add,b\n60000, remove ,a\n",
    "live-counts": COUNTS,
    "parcae": '[0, "add", {"nodes": ["a", "b"]}]\n[60000, "no-op", {"nodes": []}]\n'
    '[120000, "remove", {"nodes": ["a"]}]\n',
    "skypilot": '{"metadata": {"gap_seconds": 300}, "data": [4, 4, 1, 2]}',
}


def trace_of(folder: Path, text: str, format: str | None = None) -> Trace:
    path = folder / "trace"
    path.write_text(text)
    return read_trace(path, format)


def refused(folder: Path, text: str, format: str | None = None) -> dict[str, str]:
    with pytest.raises(ConfigError) as caught:
        trace_of(folder, text, format)
    return {problem.key: problem.allowed for problem in caught.value.problems}


def levels(trace: Trace) -> list[tuple[float, int]]:
    return [(step.t_s, step.live) for step in trace.steps]


def peak(trace: Trace) -> int:
    return max(step.live for step in trace.steps)


def accounted(trace: Trace, rows: int) -> None:
    """Check that every row is in a step or was skipped for a reason, and in one only."""
    counted = Counter(row for step in trace.steps for row in step.rows)
    counted.update(list(trace.skipped))
    assert counted == Counter(range(1, rows + 1))


def test_every_format_has_a_sample() -> None:
    assert set(SAMPLES) == set(TRACE_FORMATS.names())


@pytest.mark.parametrize("name", sorted(SAMPLES))
def test_a_format_is_recognised_by_its_content(tmp_path: Path, name: str) -> None:
    trace = trace_of(tmp_path, SAMPLES[name])
    assert trace.format == name
    assert trace_of(tmp_path, SAMPLES[name], name).steps == trace.steps
    others = [other for other in SAMPLES if other != name]
    for other in others:
        assert refused(tmp_path, SAMPLES[name], other)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("bamboo", [(0, 1), (60, 1)]),
        ("live-counts", [(0, 4), (60, 3), (120, 2)]),
        ("parcae", [(0, 2), (60, 2), (120, 1)]),
        ("skypilot", [(0, 4), (300, 4), (600, 1), (900, 2)]),
    ],
)
def test_times_begin_with_zero(
    tmp_path: Path, name: str, expected: list[tuple[float, int]]
) -> None:
    assert levels(trace_of(tmp_path, SAMPLES[name])) == expected


def test_the_traces_that_come_with_rayhive_are_read_to_the_last_row() -> None:
    g4dn, parcae = read_trace(G4DN), read_trace(PARCAE)
    accounted(g4dn, len(G4DN.read_text().splitlines()))
    accounted(parcae, len(PARCAE.read_text().splitlines()))
    assert (g4dn.format, peak(g4dn), g4dn.peak_s, g4dn.steps[-1].live) == ("bamboo", 24, 420, 5)
    assert (parcae.format, peak(parcae), len(parcae.steps)) == ("parcae", 18, 60)
    assert (parcae.steps[-1].live, parcae.length_s) == (14, 3540)
    assert not g4dn.warnings and not parcae.warnings
    removed = sum(step.removed for step in g4dn.steps)
    bulk = sum(step.removed for step in g4dn.steps if step.removed > 1)
    assert removed / (g4dn.length_s / 3600) == pytest.approx(7.0, abs=0.15)
    assert bulk / removed == pytest.approx(0.58, abs=0.01)
    for folder in ("bamboo", "parcae"):
        assert "Permission is hereby granted" in (SHIPPED / folder / "LICENSE").read_text()


@given(seed=st.integers(0, 10**6))
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_rows_out_of_order_are_sorted_with_a_warning(tmp_path: Path, seed: int) -> None:
    rows = G4DN.read_text().splitlines()
    shuffled = random.Random(seed).sample(rows, len(rows))
    trace = trace_of(tmp_path, "\n".join(shuffled))
    assert levels(trace) == levels(read_trace(G4DN))
    accounted(trace, len(rows))
    (warning,) = trace.warnings
    named = [int(number) for number in warning.partition("rows ")[2].split(", ")]
    times = [int(row.split(",")[0]) for row in shuffled]
    assert named == [n for n in range(1, len(rows) + 1) if times[n - 1] < max(times[:n])]


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ("0,add,a\n5,ad,b\n\n7,remove,a,b\nx\n", {"row 2", "row 4", "row 5"}),
        ("0,add,a\n0,add,a\n", {"row 2"}),
        ("0,add,a\n5,remove,b\n-5,remove,a\n", {"row 3"}),
        ("0,add,a\n5,remove,b\n", {"row 2"}),
        ("0,add,a\n5,remove,a\n6,remove,a\n", {"row 3"}),
        ("0,add,a\nnan,remove,a\n", {"row 2"}),
        (
            '[0, "add", {"nodes": ["a"]}]\n[1, "add", {}]\n[2]\n{"a": 1}\n',
            {f"row {n}" for n in "234"},
        ),
        ('[0, "add", {"nodes": ["a"]}]\n[1, "no-op", {"nodes": ["a"]}]\n', {"row 2"}),
        ('[0, "add", {"nodes": ["a"]}]\n[NaN, "remove", {"nodes": ["a"]}]\n', {"row 2"}),
        ('[0, "add", {"nodes": ["a"]}]\n[1e999, "remove", {"nodes": ["a"]}]\n', {"row 2"}),
        ("2024-01-01, 00:00:00, 3\n2024-13-01, 00:00:00, 3\n", {"row 2"}),
        ("2024-01-01, 00:00:00, 3\n2024-01-01, 25:00:00, 3\n", {"row 2"}),
        ("2024-01-01, 00:00:00, 3\n2024-01-01, 01:00:00, -3\ntime, day, n\n", {"row 2", "row 3"}),
        (
            '{"metadata": {"gap_seconds": 300}, "data": [3, -1, true, 2.5, "2"]}',
            {f"row {n}" for n in "2345"},
        ),
        ('{"metadata": {"gap_seconds": 0}, "data": [3]}', {"row 1"}),
        ('{"metadata": {}, "data": [3]}', {"row 1"}),
        ('{"metadata": {"gap_seconds": 3}, "data": 4}', {"row 1"}),
    ],
)  # fmt: skip
def test_rows_that_cannot_be_read_are_refused_by_their_numbers(
    tmp_path: Path, text: str, rows: set[str]
) -> None:
    assert set(refused(tmp_path, text)) == rows


def test_a_file_of_another_kind_is_refused_with_the_formats(tmp_path: Path) -> None:
    for text in ("", "hello\n", "{}", "0,add\n"):
        (allowed,) = refused(tmp_path, text).values()
        assert all(name in allowed for name in TRACE_FORMATS.names())
    assert "one of bamboo" in refused(tmp_path, "0,add,a\n", "banboo")["format"]
    assert "with a live node" in refused(tmp_path, "2024-01-01, 00:00:00, 0\n")["file"]


def test_a_row_without_content_is_skipped_with_a_reason(tmp_path: Path) -> None:
    trace = trace_of(tmp_path, "date, time, live_count\n" + COUNTS)
    assert trace.skipped == {1: "a header", 5: "blank"}
    accounted(trace, 5)
    assert trace.warnings[0].endswith("sorted by time: row 4")


def test_of_two_counts_at_one_instant_the_last_counts_with_a_warning(tmp_path: Path) -> None:
    trace = trace_of(tmp_path, "2024-01-01, 00:00:00, 3\n2024-01-01, 00:00:00, 2\n")
    assert levels(trace) == [(0, 2)]
    assert trace.warnings[0].endswith("rows 1, 2 have the same time; row 2 counts")
    accounted(trace, 2)


def replayed(folder: Path, trace: str, seed: int, peers: int, **fields: Any) -> FaultPlan:
    """Return the plan of a trace without compression unless ``fields`` say otherwise."""
    (folder / "trace").write_text(trace)
    plan = {"trace": {"file": "trace", "compression": 1, **fields}}
    return plan_of(
        write(folder, plan),
        seed=seed,
        peers=peers,
        swarm=SwarmConfig(peers=peers),
        budget=Budget(seconds_per_replicate=10**6),
    )


def live_replicas(plan: FaultPlan, t_s: float) -> int:
    """Return how many replicas live under a plan, at and after what happens at a time."""
    live = plan.peers
    for fault in plan.faults:
        at = fault.at.seconds or 0.0
        if fault.kind == "join":
            live += len(fault.who) * (at <= t_s)
            continue
        gone = round(at + fault.args.get("notice_s", 0.0), 3)
        back = None if fault.heal_after_s is None else round(at + fault.heal_after_s, 3)
        live -= len(fault.who) * (gone <= t_s and (back is None or t_s < back))
    return live


def never_twice_at_once(plan: FaultPlan) -> None:
    """Check that no slot is told of its end before it has come back."""
    free: dict[str, float] = {f"peer-{number}": 0.0 for number in range(plan.peers)}
    for fault in plan.faults:
        for slot in fault.who:
            at = fault.at.seconds or 0.0
            if fault.kind == "join":
                assert slot not in free
                free[slot] = at
            else:
                assert at >= free[slot] - 1e-6, fault
                heal = fault.heal_after_s
                free[slot] = float("inf") if heal is None else at + heal


churn = st.lists(
    st.tuples(st.integers(0, 30), st.integers(0, 12), st.integers(0, 12)), min_size=1, max_size=25
)


@given(
    first=st.integers(1, 20),
    changes=churn,
    peers=st.integers(1, 9),
    notice=st.sampled_from([None, 0.0, 2.0]),
    scale=st.sampled_from(["peak", "start"]),
    seed=st.integers(0, 99),
)
@settings(
    max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_a_plan_keeps_as_many_peers_as_the_folded_trace(
    tmp_path: Path,
    first: int,
    changes: list[tuple[int, int, int]],
    peers: int,
    notice: float | None,
    scale: str,
    seed: int,
) -> None:
    """Nodes come and go in any number, also in one instant, also all of them."""
    living = [f"n{number}" for number in range(first)]
    rows = [f"0,add,{node}" for node in living]
    t_ms, number = 0, first
    for gap, added, removed in changes:
        t_ms += 1000 * gap
        gone, living = living[:removed], living[removed:]
        rows += [f"{t_ms + 1000},remove,{node}" for node in gone]
        new = [f"n{number + index}" for index in range(added)]
        number += added
        living += new
        rows += [f"{t_ms + 1000},add,{node}" for node in new]
        t_ms += 1000
    text = "\n".join(rows)
    with_notice: dict[str, Any] = {"remove": "kill"} if notice is None else {"notice_s": notice}
    plan = replayed(tmp_path, text, seed, peers, scale=scale, start_s=0, **with_notice)
    trace = read_trace(tmp_path / "trace")
    base = peak(trace) if scale == "peak" else first
    for step in trace.steps:
        expected = max(1, (2 * peers * step.live + base) // (2 * base))
        assert live_replicas(plan, step.t_s) == expected, (step, plan.faults)
    assert plan.joins == tuple(range(peers, peers + len(plan.joins)))
    assert scale == "start" or not plan.joins
    never_twice_at_once(plan)


@pytest.mark.parametrize("peers", [2, 3, 4, 8, 24, 40])
@pytest.mark.parametrize("file", [G4DN, PARCAE])
def test_the_shipped_traces_fold_onto_any_number(file: Path, peers: int, tmp_path: Path) -> None:
    trace = read_trace(file)
    plan = replayed(
        tmp_path, file.read_text(), 1, peers, compression=60, notice_s=2.0, steady_s=5.0
    )
    start = trace.peak_s
    counts = []
    for step in trace.steps:
        if step.t_s >= start:
            t_s = round((step.t_s - start) / 60, 3)
            counts.append(live_replicas(plan, t_s))
            exact = peers * step.live / peak(trace)
            assert abs(counts[-1] - exact) <= 0.5 or counts[-1] == 1
    assert max(counts) == peers and min(counts) >= 1
    never_twice_at_once(plan)


def test_removals_with_the_same_return_are_one_fault(tmp_path: Path) -> None:
    rows = [f"0,add,n{n}" for n in range(8)]
    rows += [f"10000,remove,n{n}" for n in range(4)]
    rows += [f"10000,add,m{n}" for n in range(2)]
    rows += [f"20000,add,m{n}" for n in (2, 3)]
    plan = replayed(tmp_path, "\n".join(rows), 0, 8, remove="kill")
    at_once, later = plan.faults
    assert (at_once.at.seconds, len(at_once.who), at_once.heal_after_s) == (10.0, 2, 0.0)
    assert (later.at.seconds, len(later.who), later.heal_after_s) == (10.0, 2, 10.0)
    assert len({*at_once.who, *later.who}) == 4


def test_a_window_is_cut_and_compressed(tmp_path: Path) -> None:
    rows = [{"gap_seconds": 60}, [4, 4, 2, 4, 3, 4, 1]]
    text = json.dumps({"metadata": rows[0], "data": rows[1]})
    whole = replayed(tmp_path, text, 0, 4, compression=30)
    assert [(f.at.seconds, len(f.who), f.heal_after_s) for f in whole.faults] == [
        (4.0, 2, 2.0),
        (8.0, 1, 2.0),
        (12.0, 3, None),
    ]
    part = replayed(tmp_path, text, 0, 4, compression=30, start_s=90, minutes=2.5)
    assert [(f.at.seconds, len(f.who), f.heal_after_s) for f in part.faults] == [
        (1.0, 2, 2.0),
        (5.0, 1, None),
    ]
    with pytest.raises(ConfigError, match="a time at which nodes live"):
        replayed(tmp_path, text, 0, 4, start_s=400)


def test_kinds_on_nodes_remove_nodes(tmp_path: Path) -> None:
    plan = replayed(tmp_path, SAMPLES["skypilot"], 0, 4, remove="kill_node")
    assert {name[:5] for fault in plan.faults for name in fault.who} == {"node-"}


def test_a_missing_trace_names_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    with pytest.raises(ConfigError) as caught:
        plan_of(
            write(tmp_path, {"trace": {"file": "g4dn-trce.csv"}}),
            seed=0,
            peers=3,
            swarm=SwarmConfig(peers=3),
            budget=Budget(),
        )
    (problem,) = caught.value.problems
    assert (problem.key, problem.nearest) == ("plan.trace.file", "g4dn-trace.csv")


def test_warnings_of_a_trace_reach_the_caller(tmp_path: Path) -> None:
    (tmp_path / "trace").write_text(COUNTS)
    told: list[str] = []
    plan_of(
        write(tmp_path, {"trace": {"file": "trace"}}),
        seed=0,
        peers=4,
        swarm=SwarmConfig(peers=4),
        budget=Budget(),
        warnings=told,
    )
    assert len(told) == 1 and "row 3" in told[0]


@given(counts=st.lists(st.integers(0, 50), min_size=1, max_size=40), replicas=st.integers(1, 60))
def test_folding_adds_up(counts: list[int], replicas: int) -> None:
    counts = [max(counts[0], 1), *counts[1:]]
    data = {"metadata": {"gap_seconds": 10}, "data": counts}
    reader = TRACE_FORMATS.get("skypilot")
    assert len(list(reader.records(json.dumps(data)))) == len(counts)
    live = replicas
    trace = assemble("x", "skypilot", reader.records(json.dumps(data)))
    for level in fold(trace, replicas, 0, trace.length_s, 1.0):
        assert level.gone >= 0 and level.come >= 0 and level.gone + level.come > 0
        live += level.come - level.gone
        assert live == level.live >= 1


@pytest.mark.parametrize(
    ("format", "text"),
    [
        ("bamboo", "0,add,a\n1" + "0" * 400 + ",add,b\n"),
        ("live-counts", "2024-03-01, 23:59:00, 4\n2024-03-02, 00:00:00, 1" + "0" * 5000 + "\n"),
        ("live-counts", "2024-03-01, 23:59:00, 4\n2024-03-02, 00:00:00, 1" + "0" * 17 + "\n"),
        ("parcae", '[0, "add", {"nodes": ["a"]}]\n[1e400, "add", {"nodes": ["b"]}]\n'),
        ("parcae", '[0, "add", {"nodes": ["a"]}]\n[1' + "0" * 400 + ', "add", {"nodes": ["b"]}]\n'),
        ("parcae", '[0, "add", {"nodes": ["a"]}]\n' + "[" * 100_000 + "\n"),
        ("skypilot", '{"metadata": {"gap_seconds": 1e308}, "data": [1, 2, 3]}'),
        ("skypilot", '{"metadata": {"gap_seconds": 1' + "0" * 400 + '}, "data": [1, 2]}'),
        ("skypilot", '{"metadata": {"gap_seconds": 1}, "data": [1, 1' + "0" * 40 + "]}"),
        ("skypilot", "[" * 100_000),
    ],
)
def test_a_row_with_an_infinite_number_is_invalid(tmp_path: Path, format: str, text: str) -> None:
    assert refused(tmp_path, text, format)


def test_the_peak_is_found_in_one_pass() -> None:
    """Every step used to look through all steps."""

    class Counted(tuple):  # type: ignore[type-arg]
        passes = 0

        def __iter__(self) -> Any:
            Counted.passes += 1
            return super().__iter__()

    steps = Counted(Step(float(i), 1, 0, min(i, 400), (i,)) for i in range(1, 500))
    trace = Trace("x", "bamboo", steps, {}, ())
    assert (trace.peak_s, peak(trace)) == (400.0, 400)
    assert Counted.passes == 2
