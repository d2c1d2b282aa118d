"""The row of a replay names the code that ran, so that a comparison shows what changed."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import rayhive
from rayhive import api
from rayhive.errors import ConfigError
from rayhive.spec.replicate import ReplicateSpec
from rayhive.sweep.attempts import read_spec
from rayhive.sweep.provenance import code_revision
from tests.unit.sweep_fakes import TINY, World

MODULE = "module_of_a_replay"
SOURCE = "from rayhive.workloads.digits import Digits\n\nclass Mine(Digits):\n    width = {}\n"
STUDY = {
    **TINY,
    "storage": None,
    "workload": {"import": f"{MODULE}:Mine"},
    "space": {"codec": "none"},
    "budget": {"trials": 1, "seconds_per_replicate": 5},
}


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A module of the user's with a workload, in the working directory."""
    path = tmp_path / "work" / f"{MODULE}.py"
    path.parent.mkdir()
    path.write_text(SOURCE.format(1))
    monkeypatch.chdir(path.parent)
    monkeypatch.syspath_prepend(str(path.parent))
    yield path
    sys.modules.pop(MODULE, None)


@pytest.fixture
def recorded(module: Path, world: World, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a run by an earlier revision of rayhive."""
    monkeypatch.setattr("rayhive.sweep.driver.code_revision", lambda: "0123abc")
    return rayhive.sweep(STUDY, out="recorded", progress=False).folder


def replayed(recorded: Path, name: str = "again") -> tuple[ReplicateSpec, list[str]]:
    """Replay a run; return the new spec, and the notes on differences of the environment."""
    again = api.replay(recorded, 0, out=name, progress=False)
    notes = api.compare(recorded, again.folder).notes
    return read_spec(again.folder), [note.split()[0] for note in notes if " differs: " in note]


def test_a_comparison_with_a_replay_lists_changed_code_and_revision(
    recorded: Path, module: Path
) -> None:
    module.write_text(SOURCE.format(2))
    spec, differing = replayed(recorded)
    assert differing == ["code", "git_revision"]
    assert spec.git_revision == code_revision()
    changed = rayhive.sweep(STUDY, out="changed", progress=False)
    assert list(changed.replicates["code"]) == [spec.code]


def test_a_replay_of_unchanged_code_has_the_code_of_the_run(recorded: Path) -> None:
    spec, differing = replayed(recorded)
    assert differing == ["git_revision"]
    assert spec.code == read_spec(recorded / "trials/0/r0-none").code is not None


def test_a_replay_of_code_that_the_run_accepts_has_the_code_of_the_run(
    recorded: Path, module: Path
) -> None:
    module.write_text(SOURCE.format(2))
    rayhive.sweep(STUDY, out=recorded, code="accept", progress=False)
    _, differing = replayed(recorded)
    assert differing == ["git_revision"]


def test_the_peers_of_a_replay_work_in_the_present_directory(
    recorded: Path, module: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    module.rename(other / module.name)
    monkeypatch.chdir(other)
    monkeypatch.syspath_prepend(str(other))
    spec, _ = replayed(module.parent / recorded)
    assert spec.directory == str(other)


def test_a_replay_without_the_module_is_refused_before_anything_starts(
    recorded: Path, module: Path, world: World
) -> None:
    module.unlink()
    del sys.modules[MODULE]
    started = world.starts.total()
    with pytest.raises(ConfigError, match="a module that imports"):
        api.replay(recorded, 0, out="again", progress=False)
    assert world.starts.total() == started and not Path("again").exists()


def test_a_replay_of_a_registered_workload_has_no_user_code(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    study: dict[str, Any] = {**STUDY, "workload": {"name": "digits"}}
    rayhive.sweep(study, out="recorded", progress=False)
    spec, differing = replayed(Path("recorded"))
    assert spec.code is None and differing == []
    started = json.loads(Path("again/events.jsonl").read_text().splitlines()[0])
    assert started["spec"]["git_revision"] == spec.git_revision == code_revision()
