from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayhive.errors import RayhiveError
from rayhive.events import KINDS, EventLog, dump_event, load_event, make_event, read_events

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(min_size=1), inner),
    max_leaves=10,
).filter(lambda value: not (isinstance(value, dict) and value.keys() == {"float"}))


@given(st.dictionaries(st.sampled_from(["a", "b", "c"]), values))
def test_an_event_comes_back_as_it_was(fields: dict[str, object]) -> None:
    event = make_event("round", "peer-0", **fields)
    line = dump_event(event)
    assert "\n" not in line
    assert load_event(line) == event


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_numbers_that_json_has_not_come_back(number: float) -> None:
    back = load_event(dump_event(make_event("weights", sketch=[number])))["sketch"][0]
    assert back == number or (math.isnan(back) and math.isnan(number))


def test_only_known_kinds_are_made() -> None:
    with pytest.raises(ValueError, match="rond"):
        make_event("rond")
    assert "round" in KINDS


def test_a_log_is_read_in_the_order_of_writing(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "new" / "events.jsonl")
    for number in range(3):
        log.append(make_event("round", round=number))
    log.close()
    log.close()
    assert [event["round"] for event in read_events(log.path)] == [0, 1, 2]


def test_a_torn_last_line_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    whole = dump_event(make_event("round", round=1))
    path.write_text(whole + "\n" + whole[:20])
    assert [event["round"] for event in read_events(path)] == [1]


@pytest.mark.parametrize("torn", ["", '{"kind":"rou', "{"])
def test_a_log_goes_on_after_a_writer_that_died(tmp_path: Path, torn: str) -> None:
    path = tmp_path / "events.jsonl"
    whole = "".join(dump_event(make_event("round", round=number)) + "\n" for number in range(2))
    for complete, rounds in ((whole, [0, 1, 2]), ("", [2])):
        path.write_text(complete + torn)
        log = EventLog(path)
        assert path.read_text() == complete
        log.append(make_event("round", round=2))
        log.close()
        assert [event["round"] for event in read_events(path)] == rounds


def test_a_log_on_a_full_disk_says_so_when_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.symlink_to("/dev/full")
    log = EventLog(path)
    with pytest.raises(OSError, match="No space"):
        log.append(make_event("round", round=0))
    with pytest.raises(OSError, match="No space"):
        log.close()


@pytest.mark.parametrize("line", ["{", "3", '{"kind": "round"}'])
def test_a_broken_line_in_the_middle_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "events.jsonl"
    whole = dump_event(make_event("round", round=1))
    path.write_text(f"{whole}\n{line}\n{whole}\n")
    with pytest.raises(RayhiveError, match="line 2"):
        list(read_events(path))
