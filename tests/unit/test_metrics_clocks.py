"""Offsets of the nodes' clocks, from events of peers whose clocks are wrong by a known amount."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from rayhive.events import Event, dump_event, load_event
from rayhive.metrics.clocks import clocks_of
from rayhive.report.trace import trace_of
from rayhive.timeline import Timeline
from tests.fixtures.logs import START, make_spec

PEERS = ("peer-0", "peer-1", "peer-2")


def event(kind: str, t: float, peer: str | None = None, **fields: Any) -> Event:
    return load_event(json.dumps({"kind": kind, "t": START + t, "peer": peer, **fields}))


def history(wrong: Mapping[str, float], **averaged: Any) -> Timeline:
    """Return three peers on nodes of their own, each with a clock that is wrong by some seconds."""
    spec = make_spec(swarm={"peers": 3})
    stamped = [
        event("replicate_started", 0.0, spec=spec.model_dump(mode="json")),
        *(event("peer_spawned", 0.5, p, node=f"node-{p}", host="vm", pid=1) for p in PEERS),
        event("barrier_released", 2.0, peers=3),
    ]
    for number, peer in enumerate(PEERS):
        off = wrong.get(peer, 0.0)
        own = [
            event("dht_ready", 1.0 + off, peer, addresses=[]),
            event("peer_ready", 1.9 + off + number / 100, peer),
            event("training_started", 2.03 + off, peer, round=0),
        ]
        for at in range(1, 4):
            end = 2.1 + at + number / 1000
            shared = {"group": list(PEERS), "group_size": 3, "outcome": "averaged", **averaged}
            waited = {"waited_s": 0.2 + number / 50, "averaging_s": 0.15, "matchmaking_s": 0.02}
            phases = [{"name": "P", "seconds": 0.05}, {"name": "Q", "seconds": 0.08}]
            own += [
                event(
                    "round", end + off, peer, round=at, samples=4, phases=phases, **waited, **shared
                ),
                event("transition", end + off + 0.01, peer, round=at, seconds=1.0),
            ]
        own.append(event("peer_finished", 6.0 + off, peer, reason="rounds", round=3, samples=12))
        stamped += own
    stamped.append(event("replicate_finished", 6.1, state="completed"))
    return Timeline(spec, stamped)


def test_clocks_that_may_be_equal_are_not_corrected() -> None:
    clocks = clocks_of(history({}))
    assert not clocks.corrected
    for offset in clocks.offsets.values():
        assert offset.low <= 0 <= offset.high


@pytest.mark.parametrize("seconds", [-7.0, 0.8, 3600.0])
def test_a_wrong_clock_is_bounded_and_corrected(seconds: float) -> None:
    clocks = clocks_of(history({"peer-1": seconds}))
    assert clocks.slack_s == 0
    offset = clocks.offsets["node-peer-1"]
    assert offset.low <= seconds <= offset.high
    assert offset.seconds == pytest.approx(seconds, abs=0.1)
    assert clocks.offsets["node-peer-0"].seconds == pytest.approx(0.0, abs=0.1)


def test_events_of_other_nodes_tighten_the_bounds() -> None:
    timeline = history({})
    without = [e for e in timeline.events if e.kind != "round"]
    loose = clocks_of(Timeline(timeline.spec, without)).offsets["node-peer-0"]
    tight = clocks_of(timeline).offsets["node-peer-0"]
    assert tight.high - tight.low <= loose.high - loose.low
    # peer-2 was ready 0.02 s later than peer-0, and its clock is close to that of peer-0
    assert tight.low > -0.31


def test_contradictions_are_widened_and_shown() -> None:
    late = history({})
    changed = [
        e.model_copy(update={"t": e.t - 0.5}) if e.kind == "training_started" else e
        for e in late.events
    ]
    assert 0 < clocks_of(Timeline(late.spec, changed)).slack_s < 1


def test_a_partial_averaging_says_nothing() -> None:
    clocks = clocks_of(history({"peer-1": 0.3}, outcome="partial"))
    offset = clocks.offsets["node-peer-1"]
    assert (offset.low, offset.high) == pytest.approx((0.21, 0.33))  # by ready and started


def test_a_trace_is_on_one_clock() -> None:
    trace, _ = trace_of(history({"peer-1": 50.0}))
    rounds = [e for e in trace["traceEvents"] if e["name"] == "round 2"]
    assert len(rounds) == 3
    begins = [slice_["ts"] / 1e6 for slice_ in rounds]
    assert max(begins) - min(begins) < 0.1
    names = [e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"]
    assert names[0] == "supervisor and faults"
    assert names[2].startswith("peer-1 (clock +49970 ms, between +49910 and +50030")
    assert trace["otherData"]["clock_offsets_s"]["node-peer-1"]["low"] < 50


def test_slices_of_a_track_are_nested_and_strict_json(tmp_path: Path) -> None:
    trace, _ = trace_of(history({}))
    json.dumps(trace, allow_nan=False)
    slices = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    assert {"group formation", "P", "Q", "computes", "averages (averaged)", "updates"} <= {
        e["name"] for e in slices
    }
    tracks = {(e["pid"], e["tid"]) for e in slices}
    assert len({tid for _, tid in tracks}) == len(tracks) > 3
    key = lambda e: e["tid"]  # noqa: E731
    for _, track in groupby(sorted(slices, key=key), key=key):
        open_ends: list[int] = []
        for each in sorted(track, key=lambda e: (e["ts"], -e["dur"])):
            while open_ends and open_ends[-1] <= each["ts"]:
                open_ends.pop()
            assert not open_ends or each["ts"] + each["dur"] <= open_ends[-1]
            assert each["dur"] >= 0
            open_ends.append(each["ts"] + each["dur"])


def test_the_events_of_the_test_are_stored_as_real_ones() -> None:
    for each in history({}).events:
        assert load_event(dump_event(each)) == each
