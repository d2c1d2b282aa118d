"""Export of a run to other tools; those that are not installed are skipped."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from rayhive import api
from rayhive.cli import main
from rayhive.report.loggers import TOOLS, LoggedRun, export, runs
from rayhive.report.results import load_results
from rayhive.spec import Configuration
from tests.fixtures.logs import Log, make_spec, write_run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    logs = [
        Log(spec=make_spec(trial=trial, replicate=replicate, configuration=configuration))
        for trial, configuration in enumerate([Configuration(), Configuration(codec="float16")])
        for replicate in (0, 1)
    ]
    return write_run(tmp_path / "run", logs)


def test_a_replicate_is_a_run_with_its_configuration_curve_and_row(folder: Path) -> None:
    results = load_results(folder)
    found = list(runs(folder, results))
    assert [run.name for run in found] == ["0-r0-none", "0-r1-none", "1-r0-none", "1-r1-none"]
    for run, row in zip(found, results.rows, strict=True):
        assert run.study == results.name and run.group == row["configuration"]
        assert run.parameters["codec"] == row["codec"]
        assert run.parameters["seed"] == row["seed"]
        assert run.final["final_loss"] == row["final_loss"] == run.points[-1].values["loss"]
        assert run.final["metric.accuracy"] == row["metric.accuracy"]
        assert not run.final.keys() & run.parameters.keys()
        samples = [point.samples for point in run.points]
        assert samples == sorted(samples) and len(samples) > 1


@pytest.mark.parametrize("tool", TOOLS)
def test_every_replicate_is_written_once(
    tool: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    packages = TOOLS[tool][0]
    installed = any(find_spec(package) for package in packages)
    out = tmp_path / "out"
    status = main(["export", str(folder), "--to", tool, "--out", str(out)])
    printed = capsys.readouterr()
    if not installed:
        assert status == 2 and f"pip install {packages[0]}" in printed.err
        assert not out.exists()
        return
    assert status == 0 and f"4 replicates in {out}" in printed.out
    assert any(out.iterdir())
    assert main(["export", str(folder), "--to", tool, "--out", str(out)]) == 2
    assert "does not exist yet" in capsys.readouterr().err


def recorder(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Have ``tensorboard`` write a file for each run, and return the names of the runs."""
    names: list[str] = []

    def begin(run: LoggedRun, out: Path) -> Any:
        out.mkdir(parents=True, exist_ok=True)
        (out / run.name).touch()
        names.append(run.name)
        return MagicMock()

    monkeypatch.setitem(TOOLS, "tensorboard", (("sys",), begin))
    return names


def test_the_folder_of_one_replicate_is_exported(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = recorder(monkeypatch)
    place = folder / "trials" / "1" / "r1-none"
    assert api.export(place, "tensorboard") == (place / "tensorboard", 1)
    assert names == ["1-r1-none"]


def test_replicates_that_measured_nothing_are_left_out(tmp_path: Path) -> None:
    states = ("completed", "pruned", "diverged", "skipped", "stopped", "lost", None)
    logs = [Log(make_spec(replicate=n), state=state) for n, state in enumerate(states)]
    run = write_run(tmp_path / "run", logs)
    found = [each.parameters["state"] for each in runs(run, load_results(run))]
    assert found == ["completed", "pruned", "diverged"]


def test_a_replicate_that_was_damaged_meanwhile_is_left_out_with_a_warning(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names, out = recorder(monkeypatch), tmp_path / "out"
    results = load_results(folder)
    (folder / "trials/0/r1-none/events.jsonl").write_text('{"kind":"x"\n')
    with pytest.warns(UserWarning, match=r"Damaged and left out: .*0/r1-none/events\.jsonl"):
        assert export(folder, results, "tensorboard", out) == 3
    assert names == ["0-r0-none", "1-r0-none", "1-r1-none"]
    with pytest.warns(UserWarning, match=r"Damaged and left out: .*0/r1-none/events\.jsonl"):
        assert api.export(folder, "tensorboard")[1] == 3  # it was damaged before


def test_tensorboard_reads_the_curves_back(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="needs tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    out = tmp_path / "out"
    assert main(["export", str(folder), "--to", "tensorboard", "--out", str(out)]) == 0
    (run, *_) = runs(folder, load_results(folder))
    read = EventAccumulator(str(out / run.study / run.name))
    read.Reload()
    losses = [(event.step, pytest.approx(event.value)) for event in read.Scalars("loss")]
    assert losses == [(point.samples, point.values["loss"]) for point in run.points]


def test_a_tool_of_a_version_that_the_logger_refuses_is_named_and_leaves_no_folder(
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def begin(run: LoggedRun, out: Path) -> Any:
        out.mkdir()
        raise ModuleNotFoundError("Requirement 'tool>=2' not met")

    monkeypatch.setitem(TOOLS, "tensorboard", (("sys",), begin))
    out = tmp_path / "out"
    assert main(["export", str(folder), "--to", "tensorboard", "--out", str(out)]) == 2
    assert "pip install -U sys (Requirement 'tool>=2' not met)" in capsys.readouterr().err
    assert not out.exists()


def test_an_unknown_tool_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(folder), "--to", "tensorbord"]) == 2
    assert "tensorboard" in capsys.readouterr().err
