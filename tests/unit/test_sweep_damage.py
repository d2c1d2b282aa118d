"""Damaged files of a run: each is reported, and all other files are kept."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rayhive.cli import main
from rayhive.errors import DamagedError, NewerVersionError, RayhiveError
from rayhive.events import VERSION, load_event, read_events
from rayhive.report.results import load_results
from rayhive.spec import Configuration
from rayhive.sweep.attempts import current_attempt
from rayhive.sweep.run_folder import RunFolder
from tests.fixtures.logs import Log, make_spec, write_run
from tests.unit.sweep_fakes import Recorder, World
from tests.unit.test_sweep_driver import make_study, sweep


def replace_line(log: Path, number: int, text: bytes) -> None:
    lines = log.read_bytes().splitlines(keepends=True)
    lines[number] = text + b"\n"
    log.write_bytes(b"".join(lines))


def not_utf8(log: Path) -> None:
    replace_line(log, 5, b'{"kind":"\xff","t":1}')


def no_json(log: Path) -> None:
    replace_line(log, 5, b'{"kind":"rou{"kind":"round"')


def text_for_a_number(log: Path) -> None:
    events = [json.loads(line) for line in log.read_bytes().splitlines()]
    number = next(n for n, event in enumerate(events) if event["kind"] == "transition")
    text = json.dumps({**events[number], "clock_s": "soon"}).encode()
    replace_line(log, number, text)


def missing_field(log: Path) -> None:
    events = [json.loads(line) for line in log.read_bytes().splitlines()]
    number = next(n for n, event in enumerate(events) if event["kind"] == "round")
    del events[number]["outcome"]
    replace_line(log, number, json.dumps(events[number]).encode())


def no_state(log: Path) -> None:
    lines = log.read_bytes().splitlines()
    event = json.loads(lines[-1])
    del event["state"]
    replace_line(log, len(lines) - 1, json.dumps(event).encode())


def deep(log: Path) -> None:
    replace_line(log, 5, b'{"kind":' + b"[" * 100_000)


DAMAGES = [not_utf8, no_json, text_for_a_number, missing_field, no_state, deep]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_log_is_named_and_the_other_replicates_are_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: Callable[[Path], None]
) -> None:
    logs = [Log(spec=make_spec(replicate=number)) for number in range(3)]
    run = write_run(tmp_path / "run", logs)
    log = run / "trials/0/r1-none/events.jsonl"
    damage(log)
    assert main(["results", str(run)]) == 0
    out = capsys.readouterr().out
    assert "1 row of 2 replicates" in out and "Damaged and left out" in out
    assert str(log) in out.replace("\n", "")
    assert main(["results", str(run), "--format", "json"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)[0]["n"] == 2
    assert str(log) in said.err


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_replicate_is_set_aside_and_run_again(
    run_dir: Path, damage: Callable[[Path], None]
) -> None:
    study, world = make_study(), World()
    sweep(study, run_dir, world)
    log = run_dir / "trials/0/r1-none/events.jsonl"
    kept = {path: path.read_bytes() for path in run_dir.glob("trials/*/*/events.jsonl")}
    del kept[log]
    damage(log)
    done, progress = sweep(study, run_dir, world)
    assert done.trials == 3
    assert progress.of("started") == [("0/1/none", 1, False)]
    (note,) = [text for (text,) in progress.of("note") if "damaged" in text]
    assert note.startswith("trial 0 r1 none is damaged") and str(log) in note
    assert (log.parent / "events.damaged-0.jsonl").exists()
    assert {path: path.read_bytes() for path in kept} == kept
    assert len(load_results(run_dir).rows) == 6 and not load_results(run_dir).damaged
    _, again = sweep(study, run_dir, world)
    assert again.of("started") == []


def test_a_damaged_log_of_an_earlier_attempt_does_not_block_a_run(run_dir: Path) -> None:
    study, world = make_study(), World()
    sweep(study, run_dir, world)
    folder = run_dir / "trials/0/r0-none"
    (folder / "events.attempt-0.jsonl").write_bytes(b"\xff\n")
    results = load_results(run_dir)
    assert len(results.rows) == 6 and len(results.damaged) == 1
    _, progress = sweep(study, run_dir, world)
    assert progress.of("started") == []
    assert (folder / "events.damaged-0.jsonl").exists() and current_attempt(folder) == 1
    assert not load_results(run_dir).damaged


def test_several_damaged_logs_of_one_replicate_do_not_block_a_run(run_dir: Path) -> None:
    study, world = make_study(), World()
    sweep(study, run_dir, world)
    folder = run_dir / "trials/0/r0-none"
    for number in (0, 1):
        (folder / f"events.attempt-{number}.jsonl").write_bytes(b"\xff\n")
    _, progress = sweep(study, run_dir, world)
    assert progress.of("started") == [] and len(progress.of("note")) == 2
    assert len(list(folder.glob("events.damaged-*.jsonl"))) == 2


@pytest.mark.parametrize("content", [b"", b"{", b"\xff", b"[]"])
def test_a_damaged_spec_is_written_again_from_the_log(run_dir: Path, content: bytes) -> None:
    study, world = make_study(), World()
    sweep(study, run_dir, world)
    spec = run_dir / "trials/0/r1-none/spec.json"
    before = json.loads(spec.read_bytes())
    spec.write_bytes(content)
    _, progress = sweep(study, run_dir, world)
    assert progress.of("started") == []
    assert json.loads(spec.read_bytes())["configuration"] == before["configuration"]


@pytest.mark.parametrize("length", [0, 1, 60, 200])
def test_half_written_provenance_is_set_aside(run_dir: Path, length: int) -> None:
    study, world = make_study(), World()
    sweep(study, run_dir, world)
    file = run_dir / "provenance.json"
    before = json.loads(file.read_text())
    file.write_text(file.read_text()[:length])
    _, progress = sweep(study, run_dir, world)
    assert progress.of("started") == []
    after = json.loads(file.read_text())
    assert after.keys() >= {"run", "study", "versions", "hardware"}
    assert after["run"] == before["run"]  # which the storage knows, too
    assert (run_dir / "provenance.damaged-0.json").exists()


@pytest.mark.parametrize("content", [b"[]", b'{"run": 3}', b'{"earlier": 3}', b"\xff" * 9])
def test_provenance_of_another_shape_is_set_aside(run_dir: Path, content: bytes) -> None:
    folder, config = RunFolder(run_dir), make_study().config
    run_dir.mkdir()
    (run_dir / "provenance.json").write_bytes(content)
    with folder.opened(config) as run:
        assert len(run) == 32


@pytest.mark.parametrize(
    "content", [b"\xff", b"objectives: 3", b"- 1", b"objectives: {final_loss: up}", b"[" * 10**5]
)
def test_a_damaged_study_is_named(tmp_path: Path, content: bytes) -> None:
    run = write_run(tmp_path / "run", [Log()])
    (run / "sweep.yaml").write_bytes(content)
    with pytest.raises(DamagedError, match=r"sweep\.yaml"):
        load_results(run)


def test_a_log_with_impossible_times_is_damaged() -> None:
    for t in ("1e999", "-1", '"now"', "true", "1e300", "null"):
        with pytest.raises(ValueError, match=": t: "):
            load_event(f'{{"kind": "round", "t": {t}}}')
    events = {event["kind"]: event for event in Log().events()}
    for kind, field, value in [
        ("round", "round", 1.5),
        ("evaluation", "final", 1),
        ("evaluation", "values", {"loss": "low"}),
        ("replicate_started", "spec", 3),
    ]:
        with pytest.raises(ValueError, match=f"^{kind}: {field}"):
            load_event(json.dumps({**events[kind], field: value}))


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_any_damage_of_a_log_leaves_the_other_replicates_readable(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    logs = [Log(spec=make_spec(trial=n, configuration=Configuration())) for n in range(2)]
    logs[1].spec = make_spec(trial=1, configuration=Configuration(codec="float16"))
    run = write_run(tmp_path_factory.mktemp("run"), logs)
    log = run / "trials/0/r0-none/events.jsonl"
    lines = log.read_bytes().splitlines()
    number = data.draw(st.integers(0, len(lines) - 1))
    event: dict[str, Any] = json.loads(lines[number])
    field = data.draw(st.sampled_from(sorted(event)))
    values = st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.just([1, "a"])
    action = data.draw(st.sampled_from(["drop", "replace", "bytes"]))
    if action == "drop":
        del event[field]
        lines[number] = json.dumps(event).encode()
    elif action == "replace":
        event[field] = data.draw(values | st.dictionaries(st.text(max_size=3), values, max_size=2))
        lines[number] = json.dumps(event).encode()
    else:
        at = data.draw(st.integers(0, len(lines[number]) - 1))
        cut = lines[number]
        lines[number] = cut[:at] + data.draw(st.binary(max_size=3)) + cut[at + 1 :]
    log.write_bytes(b"\n".join(lines) + b"\n")
    try:
        results = load_results(run)
    except NewerVersionError:  # an older rayhive must not set aside the runs of a newer one
        assert event["v"] > VERSION
        return
    other = [row for row in results.rows if row["configuration"] == "float16"]
    assert len(other) == 1 and other[0]["final_loss"] == pytest.approx(0.51)
    assert results.folded
    try:
        list(read_events(log))
    except RayhiveError:
        assert results.damaged


def test_an_undamaged_run_has_no_note(run_dir: Path) -> None:
    _, progress = sweep(make_study(), run_dir, World())
    assert isinstance(progress, Recorder)
    assert not [text for (text,) in progress.of("note") if "damaged" in text]
