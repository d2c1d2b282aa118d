"""A run folder of version 0.1, in which two of today's axes are settings of the swarm."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

import rayhive
from rayhive.errors import ConfigError
from tests.unit.sweep_fakes import TINY, World

#: Settings of the swarm in version 0.1, and axes that it did not have.
MOVED = {"average_state_every": 1, "state_codec": "none"}
NEW = ("error_feedback",)
OLD_STUDY: dict[str, Any] = {**TINY, "swarm": {**TINY["swarm"], **MOVED}}

pytestmark = pytest.mark.filterwarnings("ignore:swarm.* is now space:FutureWarning")


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make an empty folder the working directory."""
    monkeypatch.chdir(tmp_path)


def rewrite(file: Path, load: Any, dump: Any, change: Callable[[Any], None]) -> None:
    data = load(file.read_text())
    change(data)
    file.write_text(dump(data))


def without_axes(found: dict[str, Any]) -> None:
    for name in (*MOVED, *NEW):
        found.pop(name, None)


def old_run(folder: Path) -> None:
    """Run the first trial of the old study, and write its files as version 0.1 did."""
    study = {**OLD_STUDY, "enqueue": [{"codec": "none"}]}
    rayhive.sweep(study, set={"budget.trials": 1}, progress=False)

    def sweep(data: dict[str, Any]) -> None:
        without_axes(data["space"])
        for each in data["enqueue"]:
            without_axes(each)
        data["swarm"] |= MOVED

    def spec(data: dict[str, Any]) -> None:
        without_axes(data["configuration"])
        data["swarm"] |= MOVED

    rewrite(folder / "sweep.yaml", yaml.safe_load, yaml.safe_dump, sweep)
    specs = list(folder.glob("trials/*/*/spec.json"))
    assert specs
    for each in specs:
        rewrite(each, json.loads, json.dumps, spec)
    journal = Path("trials.log")
    lines = [json.loads(line) for line in journal.read_text().splitlines()]
    given = [line["user_attr"] for line in lines if "configuration" in line.get("user_attr", {})]
    given += [
        line["user_attrs"] for line in lines if "configuration" in (line.get("user_attrs") or {})
    ]
    assert given
    for each in given:
        without_axes(each["configuration"])
    journal.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_a_run_of_an_earlier_version_is_resumed(world: World) -> None:
    old_run(Path("runs/tiny"))
    assert sum(world.starts.values()) == 1
    study = {**OLD_STUDY, "enqueue": [{"codec": "none"}]}
    run = rayhive.sweep(study, set={"budget.trials": 3}, progress=False)
    assert sum(world.starts.values()) == 2, "the measured trial is not measured again"
    assert run.done is not None and (run.done.trials, run.done.failed) == (2, 0)
    assert sorted(run.replicates["configuration"]) == [
        "float16 state-every-1",
        "none state-every-1",
    ]
    assert set(run.replicates["average_state_every"]) == {"1"}


def test_a_study_that_changed_its_meaning_is_refused_with_what_it_was(world: World) -> None:
    """Its default was another one: without the settings, the study means something else now."""
    old_run(Path("runs/tiny"))
    with pytest.raises(ConfigError, match=r"as in the run that") as caught:
        rayhive.sweep({**TINY, "enqueue": [{"codec": "none"}]}, progress=False)
    keys = {problem.key for problem in caught.value.problems}
    assert "space.average_state_every" in keys
    assert keys <= {"space.average_state_every", "enqueue"}
    assert sum(world.starts.values()) == 1
