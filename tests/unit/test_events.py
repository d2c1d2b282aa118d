from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from rayhive.errors import DamagedError, NewerVersionError
from rayhive.events import (
    KINDS,
    VERSION,
    Event,
    EventLog,
    FaultHealed,
    Progress,
    Round,
    Weights,
    dump_event,
    load_event,
    make_event,
    of_kind,
    read_events,
)

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(min_size=1), inner),
    max_leaves=10,
).filter(lambda value: not (isinstance(value, dict) and value.keys() == {"float"}))


def round_(number: int = 1, **fields: Any) -> Round:
    return Round(round=number, samples=64, outcome="averaged", **fields)


# -- one event ---------------------------------------------------------------------------------


@given(values)
def test_an_event_is_read_as_it_was_written(done: Any) -> None:
    event = FaultHealed(fault="f0", lives=["peer-1.1"], done=done, seconds=1.5)
    line = dump_event(event)
    assert "\n" not in line
    assert load_event(line) == event


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_numbers_that_json_lacks_are_restored(number: float) -> None:
    written = Weights(round=1, sketch=[number], finite=False)
    read = load_event(dump_event(written))
    assert isinstance(read, Weights)
    back = read.sketch[0]
    assert back == number or (math.isnan(back) and math.isnan(number))


@pytest.mark.parametrize("stored", ["44695848", "44695848.0"])
def test_bytes_are_integers_also_in_a_log_that_holds_floats(stored: str) -> None:
    line = f'{{"kind":"peer_ready","t":1.0,"peer":"peer-0","dense_payload_bytes":{stored}}}'
    assert '"dense_payload_bytes":44695848,' in dump_event(load_event(line))


def test_fields_are_attributes_and_entries_of_a_mapping() -> None:
    event = round_(7, peer="peer-1", loss=None)
    assert (event.round, event.outcome, event.loss, event.clock_s) == (7, "averaged", None, None)
    assert dict(event) == {
        "kind": "round", "t": event.t, "peer": "peer-1", "round": 7, "samples": 64,
        "outcome": "averaged", "loss": None,
    }  # fmt: skip
    assert "loss" in event and "clock_s" not in event
    assert event.get("clock_s", 0.5) == 0.5
    with pytest.raises(KeyError):
        event["clock_s"]


def test_an_event_cannot_be_changed() -> None:
    event = round_()
    with pytest.raises(ValidationError, match="frozen"):
        event.round = 2  # type: ignore[misc]
    assert event.of_peer("peer-3").peer == "peer-3" and event.peer is None


def test_events_of_a_kind_are_selected_by_their_record() -> None:
    events = [round_(1), Progress(computed=3), round_(2)]
    assert [event.round for event in of_kind(events, Round)] == [1, 2]


def test_only_declared_kinds_are_made_and_their_fields_are_checked() -> None:
    with pytest.raises(ValueError, match="rond"):
        make_event("rond")
    with pytest.raises(ValueError, match="round: samples: Field required"):
        make_event("round", round=1, outcome="alone")
    with pytest.raises(ValueError, match="round: outcome"):
        make_event("round", round=1, samples=0, outcome="lonely")
    with pytest.raises(ValidationError, match="rouns"):
        Round(rouns=1, samples=0, outcome="alone")  # type: ignore[call-arg]
    event = make_event("invariant", name="x", ok=False, violations=("a", "b"))
    assert event["violations"] == ["a", "b"]


@pytest.mark.parametrize(
    ("field", "value"),
    [("round", 1.5), ("round", True), ("samples", "3"), ("loss", "low"), ("group", 3), ("t", -1)],
)
def test_a_field_of_another_type_is_named(field: str, value: object) -> None:
    stored = {**dict(round_()), field: value}
    with pytest.raises(ValueError, match=f"^round: {field}"):
        load_event(json.dumps(stored))


# -- versions ----------------------------------------------------------------------------------


def test_the_version_is_written_with_each_event() -> None:
    assert json.loads(dump_event(round_()))["v"] == VERSION
    assert "v" not in load_event(dump_event(round_()))


def test_a_line_without_a_version_is_read_as_version_one() -> None:
    line = '{"kind":"round","t":5.0,"round":3,"samples":8,"outcome":"alone","swarm_size":2}'
    event = load_event(line)
    assert isinstance(event, Round)
    assert (event.round, event.peer, event.extra) == (3, None, {"swarm_size": 2})
    assert event["swarm_size"] == 2 and json.loads(dump_event(event))["swarm_size"] == 2


def test_an_undeclared_kind_is_read_as_a_plain_event() -> None:
    event = load_event('{"kind":"eclipse","t":5.0,"peer":"peer-0","shadow":0.5}')
    assert type(event) is Event
    assert dict(event) == {"kind": "eclipse", "t": 5.0, "peer": "peer-0", "shadow": 0.5}


def test_a_log_of_a_newer_schema_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    newer = json.dumps({"v": VERSION + 1, "kind": "round", "t": 1.0})
    path.write_text(f"{dump_event(round_())}\n{newer}\n")
    with pytest.raises(NewerVersionError, match=rf"{re.escape(str(path))}: .* version 2 is newer"):
        list(read_events(path))


# -- the schema --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_every_field_of_a_kind_is_described(kind: str) -> None:
    record = KINDS[kind]
    text = "\n".join(base.__doc__ or "" for base in record.__mro__ if issubclass(base, Event))
    for name in record.model_fields:
        assert re.search(rf"^\s+{name}: \S", text, re.MULTILINE), name


def test_a_kind_is_declared_once() -> None:
    with pytest.raises(ValueError, match="'round' is declared twice"):

        class Again(Event, kind="round"):
            pass


# -- logs --------------------------------------------------------------------------------------


def test_a_log_is_read_in_the_order_of_writing(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "new" / "events.jsonl")
    for number in range(3):
        log.append(round_(number))
    log.close()
    log.close()
    assert [event["round"] for event in read_events(log.path)] == [0, 1, 2]


def test_an_incomplete_last_line_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    whole = dump_event(round_())
    path.write_text(whole + "\n" + whole[:20])
    assert [event["round"] for event in read_events(path)] == [1]


@pytest.mark.parametrize("torn", ["", '{"kind":"rou', "{"])
def test_a_log_goes_on_after_a_writer_that_died(tmp_path: Path, torn: str) -> None:
    path = tmp_path / "events.jsonl"
    whole = "".join(dump_event(round_(number)) + "\n" for number in range(2))
    for complete, rounds in ((whole, [0, 1, 2]), ("", [2])):
        path.write_text(complete + torn)
        log = EventLog(path)
        assert path.read_text() == complete
        log.append(round_(2))
        log.close()
        assert [event["round"] for event in read_events(path)] == rounds


def test_a_full_disk_raises_when_an_event_is_written(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.symlink_to("/dev/full")
    log = EventLog(path)
    with pytest.raises(OSError, match="No space"):
        log.append(round_())
    with pytest.raises(OSError, match="No space"):
        log.close()


def test_a_log_without_an_end_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.symlink_to("/dev/zero")
    with pytest.raises(DamagedError, match="not a regular file"):
        list(read_events(path))


def test_a_log_that_may_not_be_read_is_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(Path, "open", refuse)  # root may read everything
    with pytest.raises(DamagedError, match="may not be read"):
        list(read_events(tmp_path / "events.jsonl"))


@pytest.mark.parametrize("line", ["{", "3", '{"kind": "round"}', '{"kind": 3, "t": 1}'])
def test_a_broken_line_in_the_middle_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "events.jsonl"
    whole = dump_event(round_())
    path.write_text(f"{whole}\n{line}\n{whole}\n")
    with pytest.raises(DamagedError, match="line 2"):
        list(read_events(path))
