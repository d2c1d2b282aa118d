"""Cache of rows: it is used for unchanged content only, and never changes a value."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import rayhive
from rayhive.columns import Row
from rayhive.errors import DamagedError
from rayhive.events import ReplicateFinished, of_kind, read_events
from rayhive.metrics import rows as rows_module
from rayhive.metrics.row_cache import NAME
from rayhive.metrics.rows import is_measured, read_attempts, replicate_row
from rayhive.report.results import load_results
from rayhive.sweep.attempts import finished_event, lost_attempts, unfinished_outcome
from rayhive.timeline import Timeline
from tests.fixtures.logs import Log, make_spec, write_events, write_run


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[Timeline]:
    """Timelines whose rows were computed."""
    found: list[Timeline] = []
    compute = rows_module.timeline_row

    def counted(timeline: Timeline) -> Row:
        found.append(timeline)
        return compute(timeline)

    monkeypatch.setattr(rows_module, "timeline_row", counted)
    return found


def test_a_row_is_computed_once(tmp_path: Path, computed: list[Timeline]) -> None:
    run = write_run(tmp_path / "run", [Log(spec=make_spec(trial=trial)) for trial in range(3)])
    first = load_results(run)
    assert len(computed) == 3
    second = load_results(run)
    assert len(computed) == 3
    assert second.rows == first.rows
    assert [[*row] for row in second.rows] == [[*row] for row in first.rows]  # their order
    assert repr(second.rows) == repr(first.rows)  # the types, too


def test_several_attempts_are_kept(tmp_path: Path, computed: list[Timeline]) -> None:
    folder = tmp_path / "r0-none"
    for attempt, state in enumerate(("lost", "completed")):
        log = Log(spec=make_spec(attempt=attempt), state=state, started=100.0 * attempt)
        write_events(folder, log.events())
    found = list(read_attempts(folder))
    assert (folder / NAME).exists()
    assert list(read_attempts(folder)) == found
    assert [attempt.row["state"] for attempt in found] == ["lost", "completed"]
    assert len(computed) == 2


@pytest.mark.parametrize("name", ["events.jsonl", "spec.json"])
def test_a_changed_byte_of_equal_size_and_time_counts(
    tmp_path: Path, computed: list[Timeline], name: str
) -> None:
    folder = Log().write(tmp_path)
    before = replicate_row(folder)
    path = folder / name
    status, content = path.stat(), path.read_text()
    path.write_text(content.replace('"samples": 64', '"samples": 65').replace("1234", "1235"))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert path.stat().st_size == status.st_size
    after = replicate_row(folder)
    assert len(computed) == 2
    assert after == rows_module.timeline_row(computed[-1])
    assert (after != before) == (name == "events.jsonl")  # the spec in the events counts


def test_a_further_log_counts(tmp_path: Path, computed: list[Timeline]) -> None:
    folder = Log().write(tmp_path)
    replicate_row(folder)
    shutil.copy(folder / "events.jsonl", folder / "events.attempt-0.jsonl")
    assert len(list(read_attempts(folder))) == 2
    assert len(computed) == 3


def test_another_version_ignores_it_and_changing_code_keeps_nothing(tmp_path: Path) -> None:
    folder = Log().write(tmp_path / "run")
    package = tmp_path / "rayhive"
    shutil.copytree(Path(rayhive.__file__).parent, package)
    script = f"""
import sys
from pathlib import Path
from rayhive.metrics.rows import is_measured, replicate_row

print(is_measured({str(folder)!r}))
if sys.argv[1:]:
    Path(sys.argv[1]).write_text("# edited while this process runs")
replicate_row({str(folder)!r})
print(is_measured({str(folder)!r}))
"""

    def run(*edited: Path) -> list[str]:
        command = [sys.executable, "-c", script, *map(str, edited)]
        done = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True)
        return done.stdout.split()

    assert run() == ["False", "True"]
    assert run() == ["True", "True"]
    code = (package / "__init__.py").read_text()
    version = f'"{rayhive.__version__}"'
    (package / "__init__.py").write_text(code.replace(version, '"0.2.0.post1"'))
    assert run() == ["False", "True"]
    (package / "metrics" / "new.py").write_text("# other code")
    assert run(package / "metrics" / "newer.py") == ["False", "False"]
    assert run() == ["False", "True"]


def test_a_damaged_cache_is_ignored(tmp_path: Path, computed: list[Timeline]) -> None:
    folder = Log().write(tmp_path)
    row, good = replicate_row(folder), (folder / NAME).read_bytes()
    number = good.replace(b'"samples": 512', b'"samples": 612')
    assert number != good
    for bad in (b"", b"\n", b"\xff\xfe", good[:-1], number, good[64:], b"[]", good + b" "):
        (folder / NAME).write_bytes(bad)
        computed.clear()
        assert replicate_row(folder) == row
        assert len(computed) == 1, bad[:80]
        assert (folder / NAME).read_bytes() == good


def test_a_folder_that_cannot_be_written_works(tmp_path: Path, computed: list[Timeline]) -> None:
    folder = Log().write(tmp_path)
    (folder / NAME).mkdir()  # root may write to read-only folders, but not replace a folder
    folder.chmod(0o555)
    try:
        assert replicate_row(folder) == replicate_row(folder)
    finally:
        folder.chmod(0o755)
    assert len(computed) == 2
    assert sorted(path.name for path in folder.iterdir()) == ["events.jsonl", NAME, "spec.json"]


def test_a_replicate_that_runs_is_not_kept(tmp_path: Path, computed: list[Timeline]) -> None:
    log = Log(state=None)
    folder = log.write(tmp_path)
    assert replicate_row(folder)["state"] == "unfinished"
    assert not (folder / NAME).exists()
    write_events(folder, Log().tail())
    assert replicate_row(folder)["state"] == "completed"
    assert (folder / NAME).exists()


@pytest.mark.parametrize("endless", [False, True])
def test_a_damaged_log_is_not_kept(tmp_path: Path, endless: bool) -> None:
    run = write_run(tmp_path / "run", [Log()])
    log = next(run.rglob("events.jsonl"))
    if endless:
        log.unlink()
        log.symlink_to("/dev/zero")
    else:
        log.write_bytes(log.read_bytes() + b"no event\n")
    for _ in range(2):
        assert len(load_results(run).damaged) == 1
    assert not list(run.rglob(NAME))


def test_events_of_one_kind_are_read_alone(tmp_path: Path) -> None:
    folder = Log(seconds=(1.0,) * 3).write(tmp_path)
    found = list(read_events(folder / "events.jsonl", "replicate_finished"))
    assert found == list(of_kind(read_events(folder / "events.jsonl"), ReplicateFinished))
    assert len(found) == 1


@pytest.mark.parametrize("kept", [False, True])
def test_a_driver_finds_the_same_end_with_and_without_it(tmp_path: Path, kept: bool) -> None:
    folder = Log(state="timed_out").write(tmp_path)
    if kept:
        replicate_row(folder)
    assert is_measured(folder) == kept
    end = finished_event(folder)
    assert end is not None
    assert (end.state, unfinished_outcome(folder), lost_attempts(folder)) == ("timed_out", None, 0)
    with (folder / "events.jsonl").open("a") as log:
        log.write("no event\n")
    with pytest.raises(DamagedError):
        finished_event(folder)
