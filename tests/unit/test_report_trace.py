"""The trace of a faulted replicate obeys the rules of the trace event format."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from rayhive.api.recorded import trace
from tests.fixtures.faulted import kill_and_restart

#: Phases -> keys that an entry of it must have besides name, ph and pid.
KEYS = {
    "X": {"tid", "ts", "dur"},
    "i": {"tid", "ts", "s"},
    "C": {"ts", "args"},
    "M": {"args"},
    "s": {"tid", "ts", "id", "cat"},
    "f": {"tid", "ts", "id", "cat", "bp"},
}
#: Names of metadata, and the key of their arguments.
METADATA = {
    "process_name": ("name", str),
    "process_sort_index": ("sort_index", int),
    "thread_name": ("name", str),
    "thread_sort_index": ("sort_index", int),
}


def read(folder: Path) -> dict[str, Any]:
    path, _ = trace(kill_and_restart().write(folder))
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"), parse_constant=refuse)
    return found


def refuse(name: str) -> None:
    raise AssertionError(f"{name} is not JSON")


def test_every_entry_has_the_keys_of_its_phase(tmp_path: Path) -> None:
    found = read(tmp_path)
    assert set(found) == {"traceEvents", "displayTimeUnit", "otherData"}
    assert found["displayTimeUnit"] in ("ms", "ns")
    entries = found["traceEvents"]
    assert {entry["ph"] for entry in entries} == set(KEYS)
    for entry in entries:
        assert entry["name"] and isinstance(entry["name"], str)
        assert type(entry["pid"]) is int and KEYS[entry["ph"]] <= set(entry)
        for key in ("ts", "dur", "tid"):
            assert key not in entry or (type(entry[key]) is int and entry[key] >= 0), entry
        if entry["ph"] == "i":
            assert entry["s"] in ("g", "p", "t")
        if entry["ph"] == "C":
            assert all(isinstance(value, (int, float)) for value in entry["args"].values())
        if entry["ph"] == "M":
            key, kind = METADATA[entry["name"]]
            assert isinstance(entry["args"][key], kind)


def test_every_process_and_track_has_one_name(tmp_path: Path) -> None:
    entries = read(tmp_path)["traceEvents"]
    names = [e for e in entries if e["name"] == "process_name"]
    tracks = [(e["pid"], e["tid"]) for e in entries if e["name"] == "thread_name"]
    assert len({e["pid"] for e in names}) == len(names)
    assert len(set(tracks)) == len(tracks)
    assert {e["pid"] for e in entries} == {e["pid"] for e in names}
    used = {(e["pid"], e["tid"]) for e in entries if e["ph"] in "Xisf"}
    assert used <= set(tracks)


def test_arrows_join_a_fault_with_the_peer_that_it_struck(tmp_path: Path) -> None:
    entries = read(tmp_path)["traceEvents"]
    flows: dict[int, dict[str, Any]] = defaultdict(dict)
    for entry in entries:
        if entry["ph"] in "sf":
            flows[entry["id"]][entry["ph"]] = entry
    assert len(flows) == 1
    slices = [entry for entry in entries if entry["ph"] == "X"]

    def around(entry: dict[str, Any]) -> list[str]:
        """Names of the slices of the entry's track that contain it."""
        place = entry["pid"], entry["tid"]
        return [
            each["name"]
            for each in slices
            if (each["pid"], each["tid"]) == place
            if each["ts"] <= entry["ts"] <= each["ts"] + each["dur"]
        ]

    for flow in flows.values():
        assert set(flow) == {"s", "f"}
        assert flow["s"]["name"] == flow["f"]["name"] and flow["s"]["cat"] == flow["f"]["cat"]
        assert flow["s"]["ts"] <= flow["f"]["ts"] and flow["f"]["bp"] == "e"
        assert "kill peer-1" in around(flow["s"])
        assert "peer-1" in around(flow["f"])
