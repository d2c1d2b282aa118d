"""Versions of the user's code and data never share a row."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rayhive.errors import ConfigError, RayhiveError
from rayhive.report.results import load_results
from rayhive.spec import WorkloadConfig
from rayhive.sweep import provenance
from rayhive.sweep.provenance import Fingerprint, fingerprint_of, read_fingerprint
from rayhive.sweep.resolve import ResolvedStudy, resolve
from rayhive.sweep.signals import Interrupted, Interruption
from rayhive.sweep.sweep import run_sweep
from rayhive.sweep.target import target_at
from tests.fixtures.logs import Log
from tests.unit.sweep_fakes import Recorder, World

MODULE = """
from rayhive.workloads.digits import Digits
import {package}.layers

class Mine(Digits):
    def __init__(self, *, corpus: str | None = None) -> None:
        super().__init__()

    def module(self, seed):
        from .late import width
        return super().module(seed)
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package of the user's with a workload, beside a folder of data."""
    name = f"mine_{abs(hash(tmp_path)):x}"
    folder = tmp_path / "work" / name
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    (folder / "layers.py").write_text("import torch, helper_of_mine\n")
    (folder / "late.py").write_text("width = 1\n")
    (folder / "unused.py").write_text("")
    (folder / "model.py").write_text(MODULE.format(package=name))
    (folder.parent / "helper_of_mine.py").write_text("x = 1\n")
    (folder.parent / "corpus").mkdir()
    (folder.parent / "corpus" / "train.txt").write_text("a b c")
    monkeypatch.chdir(folder.parent)
    monkeypatch.syspath_prepend(str(folder.parent))
    yield folder
    for module in [m for m in sys.modules if m.startswith((name, "helper_of_mine"))]:
        del sys.modules[module]


def study(package: Path, **fields: Any) -> ResolvedStudy:
    args = {"corpus": "corpus"}
    return resolve(
        {
            "name": "study",
            "workload": {"import": f"{package.name}.model:Mine", "args": args},
            "space": {"codec": ["none", "float16"]},
            "replicates": 1,
            "budget": {"trials": 2, "seconds_per_replicate": 30},
            "storage": f"journal:{package.parent}/study.log",
            **fields,
        }
    )


def sweep(
    given: ResolvedStudy,
    folder: Path,
    world: World | None = None,
    how: str = "refuse",
    progress: Recorder | None = None,
    again: bool = False,
) -> Recorder:
    progress, world = progress or Recorder(), world or World()
    with Interruption() as interruption:
        run_sweep(
            given,
            folder,
            progress,
            interruption,
            target_at(connect=world.connect),
            code=how,
            again=again,
        )
    return progress


def codes(run_dir: Path) -> dict[str, str]:
    found = {path: json.loads(path.read_bytes()) for path in run_dir.glob("trials/*/*/spec.json")}
    return {f"{spec['trial']}/{spec['replicate']}": spec["code"] for spec in found.values()}


def test_local_modules_that_a_workload_imports_are_part_of_its_code(package: Path) -> None:
    found = fingerprint_of(study(package).config.workload)
    name = package.name
    assert sorted(found.code) == sorted(
        ["helper_of_mine.py", *(f"{name}/{f}.py" for f in ("__init__", "layers", "late", "model"))]
    )
    assert list(found.data) == ["args.corpus/train.txt"]
    assert found.digest is not None
    assert read_fingerprint(json.loads(found.model_dump_json())) == found


def test_a_registered_workload_has_no_user_code() -> None:
    found = fingerprint_of(WorkloadConfig(name="digits"), kind="real")
    assert found == Fingerprint(code={}, data={}, kind="real") and found.digest is None
    other = fingerprint_of(WorkloadConfig(name="digits"), kind="generated")
    assert other.differences(found) == ["data was real and is generated"]


@pytest.mark.parametrize("given", [None, 3, {}, {"code": 3, "data": {}}])
def test_a_run_folder_without_a_valid_fingerprint_has_none(given: object) -> None:
    assert read_fingerprint(given) is None


def edit(package: Path, text: str = "width = 2") -> None:
    (package / "late.py").write_text(f"{text}\n")


def test_a_run_is_not_resumed_with_changed_code(package: Path, run_dir: Path) -> None:
    sweep(study(package), run_dir)
    sweep(study(package), run_dir)
    edit(package)
    (package.parent / "helper_of_mine.py").unlink()
    (package.parent / "corpus" / "more.txt").write_text("d")
    before = {path: path.read_bytes() for path in run_dir.rglob("*.json*")}
    with pytest.raises(ConfigError) as caught:
        sweep(study(package, replicates=2), run_dir)
    (problem,) = caught.value.problems
    assert problem.key == "workload.import"
    assert f"changed: {package.name}/late.py" in problem.allowed
    assert "gone: helper_of_mine.py" in problem.allowed
    assert "new: args.corpus/more.txt" in problem.allowed
    assert {path: path.read_bytes() for path in run_dir.rglob("*.json*")} == before


def test_changed_code_that_is_kept_apart_has_its_own_rows(package: Path, run_dir: Path) -> None:
    sweep(study(package), run_dir)
    (old,) = set(codes(run_dir).values())
    edit(package)
    progress = sweep(study(package, replicates=2), run_dir, how="keep-apart")
    assert len(progress.of("started")) == 2
    new = {code for name, code in codes(run_dir).items() if name.endswith("/1")}
    assert len(new) == 1 and new != {old}
    rows = load_results(run_dir).folded
    assert len(rows) == 4 and {row["n"] for row in rows} == {1}
    assert {row["code"] for row in rows} == {old, *new}
    # from now on it is the code of the run
    sweep(study(package, replicates=2), run_dir)


def test_changed_code_that_is_accepted_shares_the_rows(package: Path, run_dir: Path) -> None:
    sweep(study(package), run_dir)
    edit(package)
    sweep(study(package, replicates=2), run_dir, how="accept")
    sweep(study(package, replicates=3), run_dir)
    assert len(set(codes(run_dir).values())) == 1
    assert [row["n"] for row in load_results(run_dir).folded] == [3, 3]


def test_values_of_an_unfinished_trial_come_from_one_version_of_the_code(
    package: Path, run_dir: Path
) -> None:
    given = study(package, replicates=2, budget={"trials": 1, "seconds_per_replicate": 30})

    def tick() -> None:
        if sum(world.starts.values()) == 2:
            world.tick = lambda: None
            raise Interrupted("enough")

    world = World(tick=tick)
    with pytest.raises(Interrupted):
        sweep(given, run_dir, world)
    edit(package)
    progress = sweep(given, run_dir, World(), how="keep-apart")
    assert any("ran with other code" in text for (text,) in progress.of("note"))
    assert len(set(codes(run_dir).values())) == 1
    rows = [(row["n"], row["code"]) for row in load_results(run_dir).folded]
    assert sorted(n for n, _ in rows) == [1, 2]


def test_a_run_without_measurements_is_resumed_with_changed_code(
    package: Path, run_dir: Path
) -> None:
    one = study(package, budget={"trials": 1, "seconds_per_replicate": 30})
    sweep(one, run_dir, World(log=lambda spec: Log(spec, state="failed")))
    edit(package)
    sweep(study(package), run_dir)


def test_code_that_changes_while_a_sweep_runs_ends_it(package: Path, run_dir: Path) -> None:
    def tick() -> None:
        if len(world.ends) == 1:
            edit(package)

    world = World(tick=tick)
    with pytest.raises(RayhiveError, match=r"changed while the sweep ran \(changed: .*late\.py"):
        sweep(study(package), run_dir, world)
    assert sum(world.starts.values()) == 1


def test_damaged_provenance_holds_no_fingerprint(package: Path, run_dir: Path) -> None:
    sweep(study(package), run_dir)
    (run_dir / "provenance.json").write_text('{"fingerprint": [')
    edit(package)
    sweep(study(package, replicates=2), run_dir)
    assert len({row["code"] for row in load_results(run_dir).rows}) == 2


def test_large_files_and_folders_are_compared_by_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(provenance, "LARGE", 3)
    monkeypatch.setattr(provenance, "MANY", 1)
    (tmp_path / "many").mkdir()
    for name in "ab":
        (tmp_path / "many" / name).write_text(name)
    (tmp_path / "file").write_text("long")
    given = WorkloadConfig(name="digits", args={"deep": {"x": [str(tmp_path / "many"), 3, ""]}})
    found = fingerprint_of(given, [tmp_path / "file", tmp_path / "no"])
    assert list(found.data) == ["data_files/file", "args.deep.x"]
    (tmp_path / "many" / "a").write_text("aa")
    assert fingerprint_of(given, [tmp_path / "file"]).differences(found) == ["changed: args.deep.x"]


def test_values_of_an_open_trial_come_from_its_present_code(package: Path) -> None:
    folder = package.parent / "run"

    class Stops(Recorder):
        def replicate_finished(self, spec: Any, row: Any, kept: bool) -> None:
            super().replicate_finished(spec, row, kept)
            raise Interrupted("enough")

    one = {"space": {}, "budget": {"trials": 1, "seconds_per_replicate": 30}, "replicates": 2}
    given = study(package, baselines=["single"], **one)
    with pytest.raises(Interrupted):
        sweep(study(package, **one), folder, progress=Stops())
    (number,) = [int(path.name[1]) for path in folder.glob("trials/0/*")]
    edit(package)

    def log(spec: Any) -> Log:
        lost = spec.trial is not None and spec.replicate == number
        return Log(spec, seconds=(9.0, 0.5, 0.6, 0.7), state="lost" if lost else "completed")

    progress = sweep(given, folder, World(log=log), "keep-apart")
    ((trial, values, _),) = progress.of("trial")
    assert (trial, values[0]) == (0, 11.1)  # not the mean with the 4.1 s of the old code
    assert ("lost" in [state for _, state, _ in progress.of("finished")]) is True
    edit(package, "width = 3")
    notes = [text for (text,) in sweep(given, folder, how="keep-apart").of("note")]
    assert "baseline single r0 none ran with other code: it is run again" in notes


@pytest.mark.usefixtures("fakes")
def test_values_of_a_trial_that_was_lost_come_from_its_present_code(package: Path) -> None:
    folder = package.parent / "run"
    one = {"space": {}, "budget": {"trials": 1, "seconds_per_replicate": 30}, "retries": 0}
    given = study(package, scenarios=["none", "kill-one"], **one)

    def world(first_s: float, loses: bool) -> World:
        def log(spec: Any) -> Log:
            lost = loses and spec.scenario != "none"
            seconds = (first_s, 0.5, 0.6, 0.7)
            return Log(spec, seconds=seconds, state="lost" if lost else "completed")

        return World(log=log)

    ((_, values, _),) = sweep(given, folder, world(2.0, loses=True)).of("trial")
    assert values is None
    edit(package)
    sweep(given, folder, world(9.0, loses=True), "keep-apart")
    ((_, values, _),) = sweep(given, folder, world(9.0, loses=False), again=True).of("trial")
    assert values[0] == 11.1  # not the mean with the 4.1 s of the old code
    calm = [row for row in load_results(folder).folded if row["scenario"] == "none"]
    assert [row["n"] for row in calm] == [1, 1] and calm[0]["code"] != calm[1]["code"]
