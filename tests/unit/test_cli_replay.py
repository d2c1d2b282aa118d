"""``rayhive replay`` prints the outcome, and ``rayhive results`` reads its folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rayhive.cli import main
from rayhive.report.render import results_text
from rayhive.spec.replicate import ReplicateSpec
from tests.fixtures.faulted import kill_and_restart
from tests.fixtures.logs import Log, write_events, write_run


@pytest.fixture
def replayed(monkeypatch: pytest.MonkeyPatch) -> list[ReplicateSpec]:
    """Have replays write the events of a log, instead of starting Ray."""
    specs: list[ReplicateSpec] = []

    def run_again(spec: ReplicateSpec, *_: Any) -> None:
        story: Any = kill_and_restart(folder=spec.folder) if spec.plan else Log(spec=spec)
        events = story.events if spec.plan else story.events()
        write_events(Path(spec.folder), events)
        (Path(spec.folder) / "spec.json").write_text(spec.model_dump_json(), encoding="utf-8")
        specs.append(spec)

    monkeypatch.setattr("rayhive.api.scenarios.run_again", run_again)
    monkeypatch.setattr("rayhive.report.page.write.timeline_html", lambda _: "")
    return specs


def test_a_replay_without_faults_prints_its_result(
    tmp_path: Path, replayed: list[ReplicateSpec], capsys: pytest.CaptureFixture[str]
) -> None:
    run, again = write_run(tmp_path / "run", [Log()]), tmp_path / "again"
    assert main(["replay", str(run), "0", "--out", str(again)]) == 0
    out = capsys.readouterr().out
    assert "none, seed 0, none, 2 peers: completed" in out
    assert "No faults were planned." in out
    figures = "final_loss 0.51, time_to_target_s 4.1 s, samples_per_s 113.8 1/s, round_p50_s 0.65 s"
    assert figures in out
    assert f"rayhive results {again}" in out
    assert "final_loss: recorded 0.5100, again 0.5100" in out
    assert [spec.folder for spec in replayed] == [str(again)]


@pytest.mark.parametrize("faulted", [False, True])
def test_results_read_the_folder_of_one_replicate(
    tmp_path: Path,
    replayed: list[ReplicateSpec],
    capsys: pytest.CaptureFixture[str],
    faulted: bool,
) -> None:
    again = tmp_path / "again"
    run = write_run(tmp_path / "run", [] if faulted else [Log()])
    if faulted:
        kill_and_restart().write(run)
    assert main(["replay", str(run), "0", "--out", str(again)]) == 0
    capsys.readouterr()
    assert main(["results", str(again), "--format", "json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    (original,) = json.loads(results_text(run, "json"))
    assert row["n"] == 1
    assert row["samples_per_s"] == original["samples_per_s"]
    assert row["recover_s"] == original["recover_s"]
    assert "again: 1 row of 1 replicate" in results_text(again)


def test_a_replay_prints_the_times_of_recovery_and_rejoin(
    tmp_path: Path, replayed: list[ReplicateSpec], capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path / "run", [])
    kill_and_restart().write(run)
    assert main(["replay", str(run), "0", "--out", str(tmp_path / "again")]) == 0
    out = capsys.readouterr().out
    assert "survivors went on after 1.30 s (longest stall 1.30 s)" in out
    assert "throughput of the live peers recovered after 1.30 s" in out
    assert "peer-1.1: contributing 5.80 s after its start, 6.30 s after f0" in out
    assert "stall_p95_s 1.3 s, recover_p95_s 1.3 s, rejoin_p95_s 5.8 s" in out


def test_a_trace_is_written_beside_the_events(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path / "run", [])
    kill_and_restart().write(run)
    assert main(["trace", str(run)]) == 0
    (path,) = run.glob("trials/*/*/trace.json")
    assert f"{path} (open it in https://ui.perfetto.dev)" in capsys.readouterr().out
    names = {event["name"] for event in json.loads(path.read_text())["traceEvents"]}
    assert {"kill peer-1", "fault_verified", "peer-1.1", "peer_lost"} <= names
    assert main(["trace", str(path.parent), "--out", str(tmp_path / "t.json")]) == 0
    assert (tmp_path / "t.json").read_bytes() == path.read_bytes()
    assert main(["trace", str(run), "9"]) == 2
    assert main(["trace", str(run), "0", "--replicate", "7"]) == 2
    assert "--replicate: 7 is not valid: a replicate of trial 0: 0" in capsys.readouterr().err
    assert main(["trace", str(tmp_path / "nothing"), "0"]) == 2
    assert "DIR: " in capsys.readouterr().err
