"""The Python interface: the options, errors and results of the command line."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

import rayhive
import rayhive.sweep.target
from rayhive import api
from rayhive.cli import main
from rayhive.errors import ConfigError
from rayhive.spec import SweepConfig
from rayhive.sweep.signals import Interrupted
from tests.unit.sweep_fakes import TINY, FakeHandle, World

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make an empty folder the working directory."""
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("study", [TINY, SweepConfig.model_validate(TINY)], ids=["map", "model"])
def test_a_sweep_returns_frames_and_writes_them(
    world: World, study: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    run = rayhive.sweep(study, set={"budget.trials": 2}, progress=False)
    assert run.done is not None and (run.done.trials, run.done.failed) == (2, 0)
    assert sorted(run.configurations["configuration"]) == ["float16", "none"]
    assert list(run.replicates["state"]) == ["completed", "completed"]
    assert run.folder == Path("runs/tiny") and (run.folder / "trials.parquet").is_file()
    assert repr(run) == "Run('runs/tiny': 2 rows of 2 replicates)"
    out, err = capsys.readouterr()
    assert out == err == ""
    # a later call resumes, and a loaded run has the same tables
    again = rayhive.sweep(study, set=["budget.trials=2"])
    assert sum(world.starts.values()) == 2
    assert "tiny: 2 trials of 1 replicates each" in capsys.readouterr().err
    loaded = rayhive.load("runs/tiny")
    assert loaded.done is None
    assert loaded.configurations.equals(again.configurations)


def test_the_command_line_prints_what_the_interface_returns(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "study.yaml").write_text(json.dumps(TINY))
    assert main(["sweep", "study.yaml", "--format", "json"]) == 0
    printed = capsys.readouterr().out
    run = rayhive.load("runs/tiny")
    assert run.table("json").strip() == printed.strip()
    assert len(json.loads(printed)) == len(run.configurations)


def test_events_are_a_frame(world: World) -> None:
    run = rayhive.sweep(TINY, progress=False)
    events = run.events
    assert list(events.columns[:7]) == [
        "trial", "replicate", "scenario", "attempt", "t", "kind", "peer",
    ]  # fmt: skip
    rounds = events[events["kind"] == "round"]
    assert set(rounds["trial"]) == set(run.replicates["trial"]) and set(rounds["peer"]) == {
        "peer-0",
        "peer-1",
    }
    assert rounds["samples"].sum() == 2 * 2 * 4 * 64  # trials, peers, rounds, samples in each


def test_bad_input_is_an_exception_with_every_mistake(world: World, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        rayhive.sweep({**TINY, "replicates": 0, "space": {"codec": "nonne"}})
    assert [problem.key for problem in caught.value.problems] == ["replicates", "space.codec"]
    with pytest.raises(ConfigError, match="set seed"):
        rayhive.sweep(TINY, set={"seed": object()})
    with pytest.raises(ConfigError, match="KEY=VALUE"):
        rayhive.sweep(TINY, set="seed=1")
    with pytest.raises(ConfigError, match="--code"):
        rayhive.sweep(TINY, code="ignore")
    with pytest.raises(ConfigError, match="a run folder"):
        rayhive.load(tmp_path / "nowhere")
    assert not world.starts and not list(tmp_path.iterdir())


def test_a_sweep_runs_off_the_main_thread_and_leaves_the_handlers(world: World) -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    found: list[api.Run] = []
    thread = threading.Thread(target=lambda: found.append(rayhive.sweep(TINY, progress=False)))
    thread.start()
    thread.join()
    assert len(found[0].configurations) == 2
    assert before == (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM))


def test_an_interrupted_sweep_raises_with_its_folder_and_resumes(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = signal.getsignal(signal.SIGINT)
    wait, signals = FakeHandle.wait, [signal.SIGINT]

    def interrupted(self: FakeHandle, timeout: float) -> Any:
        if signals:
            signal.raise_signal(signals.pop())
        return wait(self, timeout)

    monkeypatch.setattr(FakeHandle, "wait", interrupted)
    with pytest.raises(Interrupted) as caught:
        rayhive.sweep(TINY, progress=False)
    assert caught.value.folder == Path("runs/tiny") and not world.live
    assert signal.getsignal(signal.SIGINT) is before
    assert len(rayhive.sweep(TINY, progress=False).configurations) == 2


def test_a_plan_says_what_is_unmet(world: World) -> None:
    found = api.plan(TINY, set={"storage": "oracle://somewhere/db"})
    assert found.trials == 2
    assert [problem.key for problem in found.unmet] == ["storage"]
    assert not api.plan(TINY).unmet and not world.starts


@pytest.mark.usefixtures("fakes")
def test_a_scenario_returns_its_twin_and_its_story(world: World) -> None:
    run = rayhive.run_scenario("kill-one", seed=1, peers=3, out="broken", progress=False)
    assert sorted(run.configurations["scenario"]) == ["kill-one", "none"]
    (story,) = run.stories()
    assert story.folder == Path("broken/trials/0/r0-kill-one")
    assert "kill-one" in str(story)
    assert len(run.stories(always=True)) == 2
    alone = rayhive.run_scenario("kill-one", twin=False, out="alone", progress=False)
    assert list(alone.configurations["scenario"]) == ["kill-one"]
    started = world.starts.total()
    again = api.retry("alone", progress=False)
    assert list(again.configurations["scenario"]) == ["kill-one"]  # it added the twin
    assert world.starts.total() == started
    again = api.replay("broken", 0, out="again", progress=False)
    assert list(again.replicates["scenario"]) == ["kill-one"]
    with pytest.raises(ConfigError, match="'kill-one'"):
        rayhive.run_scenario("kil-one")


def test_the_interface_is_there_whatever_was_imported_before() -> None:
    code = (
        "import rayhive.sweep.signals, rayhive, sys\n"
        "assert callable(rayhive.sweep) and rayhive.sweep.signals\n"
        "assert {'sweep', 'run_scenario', 'load'} <= set(dir(rayhive))\n"
        "assert not {'torch', 'ray', 'optuna', 'hivemind'} & sys.modules.keys()\n"
        "try:\n    rayhive.sweep('no/such.yaml')\n"
        "except rayhive.errors.ConfigError:\n    print('refused')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "refused\n", done.stderr
