"""Commands of the command line, on a cluster without processes."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import yaml

import rayhive.sweep.sweep
from rayhive.cli import main
from rayhive.cli.main import with_default_file
from rayhive.cluster import control, doctor
from rayhive.cluster.node import capabilities, machine
from rayhive.cluster.replicate.peer_table import PeerStatus, ReplicateStatus
from rayhive.errors import ClusterError
from rayhive.faults.target import CAPABILITIES
from tests.fixtures.logs import Log
from tests.fixtures.report_pages import sweep
from tests.unit.sweep_fakes import TINY, FakeCluster, FakeHandle, World

ROOT = Path(__file__).parents[2]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the working directory, with a study in it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(TINY))
    return tmp_path


def test_help_imports_nothing_heavy() -> None:
    script = (
        "import sys, rayhive.cli; code = rayhive.cli.main(['--help']);"
        "print(code, [name for name in sys.modules if name in "
        "('torch', 'ray', 'optuna', 'hivemind', 'pandas', 'pydantic', 'lightning')])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.stdout.splitlines()[-1] == "0 []"


@pytest.mark.parametrize(
    "command",
    [
        "sweep",
        "retry",
        "plan",
        "results",
        "replay",
        "trace",
        "report",
        "compare",
        "scenario",
        "testbed",
        "train",
        "status",
        "stop",
        "doctor",
    ],
)
def test_every_command_has_a_help_text_with_an_example(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, "--help"]) == 0
    said = capsys.readouterr().out
    assert "Usage" in said and len(said) > 200
    if command not in ("scenario", "testbed", "doctor"):
        assert f"rayhive {command} " in said.split("Example", 1)[1] or command == "status"


def test_a_sweep_prints_its_table_and_writes_parquet(
    place: Path, world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sweep", "study.yaml", "--format", "json"]) == 0
    out, err = capsys.readouterr()
    rows = json.loads(out)
    assert sorted(row["configuration"] for row in rows) == ["float16", "none"]
    assert "tiny: 2 trials of 1 replicates each" in err
    assert "2 trials; runs/tiny" in err
    for name in ("trials.parquet", "configurations.parquet"):
        assert (place / "runs/tiny" / name).exists()

    assert main(["results", "runs/tiny", "--format", "csv", "--sort=-codec"]) == 0
    assert capsys.readouterr().out.startswith("configuration,")

    assert main(["sweep", "study.yaml", "--set", "budget.trials=1"]) == 2
    assert "at least 2, as in the run" in capsys.readouterr().err
    assert main(["sweep", "study.yaml", "--set", "replicates=2"]) == 0
    assert sum(world.starts.values()) == 4


def test_a_sweep_without_a_successful_trial_exits_with_1(
    place: Path, world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    world.log = lambda spec: Log(spec, state="failed")
    assert main(["sweep", "study.yaml"]) == 1
    assert "2 trials, 2 failed" in capsys.readouterr().err
    world.log = Log
    assert main(["sweep", "study.yaml", "--out", "elsewhere", "--set", "storage=null"]) == 0


def test_an_interrupted_sweep_prints_the_command_that_resumes_it(
    place: Path, world: World, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    look = FakeHandle.wait
    signals = [signal.SIGTERM]

    def wait(self: FakeHandle, timeout: float) -> Any:
        if "-t0-" not in self.run_id and signals:
            signal.raise_signal(signals.pop())
        return look(self, timeout)

    monkeypatch.setattr(FakeHandle, "wait", wait)
    monkeypatch.setattr(sys, "argv", ["/usr/bin/rayhive", "sweep", "study.yaml", "--out", "a b"])
    assert main(["sweep", "study.yaml", "--out", "a b"]) == 128 + signal.SIGTERM
    out, err = capsys.readouterr()
    assert out == ""
    assert "interrupted by SIGTERM" in err
    assert "rayhive sweep study.yaml --out 'a b'" in err
    assert not world.live and world.closed == 1
    assert (place / "a b" / "trials.parquet").exists()

    monkeypatch.setattr(FakeHandle, "wait", look)
    monkeypatch.setattr(sys, "argv", ["experiments/sweep.py"])
    assert main(["sweep", "study.yaml", "--out", "a b"]) == 0
    assert sorted(world.starts.values()) == [1, 2]


def test_a_submitted_job_has_its_run_folder_in_the_home(
    place: Path, world: World, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")
    monkeypatch.setenv("HOME", str(place / "home"))
    (place / "home").mkdir()
    for options, folder in ([], "home/runs/tiny"), (["--out", "kept"], "kept"):
        assert main(["sweep", "study.yaml", "--set", "storage=null", *options]) == 0
        first, *_, last = capsys.readouterr().err.splitlines()
        assert f"kept in {place / folder} on {socket.gethostname()}" in first
        assert folder in last
        assert (place / folder / "trials.parquet").exists()
    assert sorted(path.name for path in place.iterdir()) == ["home", "kept", "study.yaml"]
    # the next job has another working directory and goes on with the same run
    elsewhere = place / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    assert main(["sweep", "../study.yaml", "--set", "storage=null"]) == 0
    assert sum(world.starts.values()) == 4 and not list(elsewhere.iterdir())


def test_a_failure_is_a_message_and_a_bug_is_a_traceback(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    @contextmanager
    def connect(address: str | None) -> Iterator[FakeCluster]:
        raise ClusterError("an embedded Ray did not start: no room")
        yield

    monkeypatch.setattr(rayhive.sweep.target, "connect_to_ray", connect)
    assert main(["sweep", "study.yaml"]) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("rayhive: an embedded Ray did not start")
    assert sorted(path.name for path in place.iterdir()) == ["study.yaml"]

    def broken(address: str | None) -> Any:
        raise ZeroDivisionError

    monkeypatch.setattr(rayhive.sweep.target, "connect_to_ray", broken)
    with pytest.raises(ZeroDivisionError):  # python prints it and exits with 1
        main(["sweep", "study.yaml"])


def test_a_plan_starts_and_writes_nothing(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "study.yaml", "--set", "budget.trials=9"]) == 0
    out = capsys.readouterr().out
    assert "2 trials (the space has 2 configurations) × 1 scenario × 1 replicate = 2" in out
    assert "5 s of training; all at most 10 s" in out
    assert main(["plan", "study.yaml", "--format", "json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["configuration"] for row in rows] == ["none", "float16"]
    assert rows[0]["payload_bytes_per_round_predicted"] == 605_992
    assert main(["plan", "study.yaml", "--format", "csv"]) == 2
    assert sorted(path.name for path in place.iterdir()) == ["study.yaml"]


@pytest.mark.parametrize("command", ["plan", "sweep"])
def test_missing_capabilities_are_refused_before_anything_starts(
    command: str, place: Path, world: World, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(machine, "facts", lambda: {"cores": 2, "gpus": ["A100", "A100"]})
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    sets = ["swarm.peers=3", "swarm.gpus_per_peer=0.6", "storage=oracle://somewhere/db"]
    given = [word for text in sets for word in ("--set", text)]
    assert main([command, "study.yaml", *given]) == 2
    err = capsys.readouterr().err
    assert "storage: 'oracle://somewhere/db' is not valid" in err
    assert "swarm.gpus_per_peer: 0.6 is not valid" in err and "room for 2 such peers" in err
    assert not world.starts
    assert main([command, "study.yaml", *given[:-2], "--set", "swarm.peers=2"]) == 0
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert main([command, "study.yaml", *given[:-2], "--set", "swarm.peers=2"]) == 2


@pytest.mark.parametrize("command", ["plan", "sweep"])
def test_with_an_address_the_machine_of_the_driver_is_not_checked(
    command: str, place: Path, world: World, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    lacking = dict.fromkeys(CAPABILITIES, "not on this machine")
    monkeypatch.setattr(capabilities, "here", lambda: lacking)
    monkeypatch.setattr(machine, "facts", lambda: {"cores": 2, "gpus": []})
    sets = ["scenarios=[straggler]", "swarm.gpus_per_peer=1", "budget.seconds_per_replicate=90"]
    given = [word for text in sets for word in ("--set", text)]
    assert main([command, "study.yaml", *given]) == 2
    assert "not on this machine" in capsys.readouterr().err
    assert main([command, "study.yaml", *given, "--address", "10.0.0.1:6379"]) == 0
    assert "not on this machine" not in capsys.readouterr().err
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert main([command, "study.yaml", *given]) == 0


RUNNING = ReplicateStatus(
    run_id="tiny-t0-r0-none-a0",
    study="tiny",
    folder="/somewhere/r0-none",
    phase="training",
    seconds=3.2,
    budget_seconds=30.0,
    peers={"peer-0": PeerStatus("training", round=4, samples=1024, loss=0.5)},
)


def test_status_shows_the_running_replicates_and_their_peers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(control, "cluster_status", lambda address: [RUNNING])
    assert main(["status"]) == 0
    out = capsys.readouterr().out
    assert "tiny-t0-r0-none-a0: training, 3 of 30 s" in out
    assert "1,024" in out
    assert main(["status", "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out) == [asdict(RUNNING)]
    silent = ReplicateStatus("tiny-t1", "does not answer")
    monkeypatch.setattr(control, "cluster_status", lambda address: [silent])
    assert main(["status"]) == 0
    assert capsys.readouterr().out == "tiny-t1: does not answer\n"
    asked: list[str | None] = []
    monkeypatch.setattr(control, "cluster_status", lambda address: asked.append(address) or [])
    assert main(["status", "--address", "auto"]) == 0
    assert asked == ["auto"]
    capsys.readouterr()
    assert main(["status"]) == 0
    assert capsys.readouterr().out == "no replicate is running\n"


def test_stop_names_the_stopped_replicates(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[tuple[str | None, str]] = []

    def stop_study(address: str | None, study: str) -> list[str]:
        asked.append((address, study))
        return ["tiny-t0-r0-none-a0"] if study == "tiny" else []

    monkeypatch.setattr(control, "stop_study", stop_study)
    assert main(["stop", "tiny", "--address", "a:1"]) == 0
    assert capsys.readouterr().out == "stopped tiny-t0-r0-none-a0\n"
    assert main(["stop", "other"]) == 0
    assert "no replicate of 'other' is running" in capsys.readouterr().out
    assert asked == [("a:1", "tiny"), (None, "other")]


def test_doctor_exits_with_1_if_a_requirement_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    checks = [doctor.Check("python", True, "3.11"), doctor.Check("tc", False, "none", "x", False)]
    monkeypatch.setattr(doctor, "doctor", lambda: checks)
    assert main(["doctor"]) == 0
    assert "note" in capsys.readouterr().out
    checks.append(doctor.Check("p2pd", False, "[missing]", "pip install hivemind"))
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "[missing]" in out and "pip install hivemind" in out
    assert main(["doctor", "--format", "json"]) == 1
    assert json.loads(capsys.readouterr().out)[2]["name"] == "p2pd"


@pytest.mark.parametrize(
    ("arguments", "given"),
    [
        ([], False),
        (["--set", "a=b"], False),
        (["--set=a=b", "--out", "x", "--format=json"], False),
        (["--help"], False),
        (["study.yaml"], True),
        (["--out", "x", "study.yaml"], True),
        (["study.yaml", "--set", "a=b"], True),
    ],
)
def test_the_script_runs_the_quickstart_if_no_study_is_given(
    arguments: list[str], given: bool
) -> None:
    found = with_default_file(arguments, Path("quick.yaml"))
    assert found == (arguments if given else ["quick.yaml", *arguments])


def test_python_m_rayhive_is_the_command_line() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "rayhive", "scenario", "show", "no such"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 2
    assert done.stderr.startswith("rayhive: NAME: 'no such' is not valid")


def test_output_goes_to_any_encoding_and_a_full_disk_is_a_message(tmp_path: Path) -> None:
    run = sweep(tmp_path / "run")
    command = [sys.executable, "-m", "rayhive", "results", str(run)]
    latin = {**os.environ, "PYTHONIOENCODING": "latin-1", "PYTHONUTF8": "0"}
    done = subprocess.run(command, env=latin, capture_output=True, check=True)
    assert b"\\u2605" in done.stdout and not done.stderr  # the star
    with Path("/dev/full").open("w") as full:
        failed = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, check=False)
    assert failed.returncode == 1 and failed.stderr == b"rayhive: No space left on device\n"
    closed = subprocess.run(["sh", "-c", '"$@" >&-', "sh", *command], stderr=subprocess.PIPE)
    assert closed.returncode == 0 and not closed.stderr
