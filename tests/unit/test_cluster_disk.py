"""Status of replicates from their folders alone, and facts about this machine."""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path

import pytest

from rayhive.cluster.actors import RUN_IDS, agent_pattern, may_supervise, supervisor_pattern
from rayhive.cluster.control import status_from_disk
from rayhive.cluster.doctor import doctor
from rayhive.cluster.node import capabilities, machine, processes
from rayhive.cluster.node.tools.small_disk import SmallDisk
from rayhive.cluster.replicate.handle import settle
from rayhive.cluster.replicate.peer_table import Outcome
from rayhive.cluster.replicate.recorder import set_aside
from rayhive.events import Event, EventLog, make_event
from rayhive.faults.target import CAPABILITIES
from tests.integration.cluster_harness import replicate


def write(folder: Path, *events: Event) -> None:
    log = EventLog(folder / "events.jsonl")
    for event in events:
        log.append(event)
    log.close()


def test_the_outcome_of_a_dead_supervisor_is_the_one_on_disk(tmp_path: Path) -> None:
    assert settle(tmp_path, "gone") == Outcome("lost", "the supervisor died: gone")
    write(tmp_path, make_event("barrier_released", peers=2))
    assert settle(tmp_path, "gone").state == "lost"
    write(tmp_path, make_event("replicate_finished", state="completed", stop_reason="rounds"))
    assert settle(tmp_path, "gone") == Outcome("completed", "rounds")


def test_the_status_of_a_replicate_is_read_from_its_events(tmp_path: Path) -> None:
    assert status_from_disk(tmp_path) is None
    spec = replicate(tmp_path)
    (tmp_path / "spec.json").write_text(spec.model_dump_json(by_alias=True))
    write(tmp_path, make_event("replicate_started", spec={}))
    status = status_from_disk(tmp_path)
    assert status is not None and status.phase == "placing"
    write(tmp_path, make_event("peer_spawned", "peer-0", pid=7, host="h", node="n"))
    status = status_from_disk(tmp_path)
    assert status is not None and status.phase == "starting"
    write(
        tmp_path,
        make_event("barrier_released", peers=2),
        make_event("round", "peer-0", round=3, samples=8, loss=0.25, outcome="alone"),
        make_event("peer_lost", "peer-1", exit_code=-9, reason="killed"),
    )
    status = status_from_disk(tmp_path)
    assert status is not None and status.phase == "training" and status.outcome is None
    assert status.run_id == spec.run_id and (status.seconds or 0) < 60
    assert status.peers["peer-0"].round == 3 and status.peers["peer-0"].pid == 7
    assert status.peers["peer-1"].state == "lost"
    write(tmp_path, make_event("peer_spawned", "peer-1.1", pid=8, host="h", node="n"))
    status = status_from_disk(tmp_path)
    assert status is not None and status.phase == "training"
    assert status.peers["peer-1.1"].state == "starting"
    write(tmp_path, make_event("replicate_finished", state="failed", stop_reason="x"))
    status = status_from_disk(tmp_path)
    assert status is not None and status.outcome == Outcome("failed", "x")


def test_events_of_an_earlier_attempt_are_set_aside(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    assert set_aside(path) == path
    for number in range(2):
        path.write_text("old\n")
        assert set_aside(path) == path and not path.exists()
        assert (tmp_path / f"events.attempt-{number}.jsonl").read_text() == "old\n"


@pytest.mark.parametrize(
    ("study", "name", "ours"),
    [
        ("a", "supervisor:a:c0de:n0de:1", True),
        ("a.b", "supervisor:a.b:c0de:n0de:1", True),
        ("a.b", "supervisor:a-b:c0de:n0de:1", False),
        ("a", "supervisor:ab:c0de:n0de:1", False),
        (None, "supervisor:whatever:c0de:n0de:1", True),
        (None, "agent:a:0:0", False),
    ],
)
def test_supervisors_are_recognised_by_their_names(
    study: str | None, name: str, ours: bool
) -> None:
    assert (supervisor_pattern(study).fullmatch(name) is not None) == ours
    assert (agent_pattern("a").fullmatch(name) is not None) == (name == "agent:a:0:0")


@pytest.mark.parametrize(
    ("study", "run_id", "ours"),
    [
        ("a", "a-t12-r3-kill-one-a1", True),
        ("a", "a-ddp-powersgd-r0-none-a0", True),
        ("a.b", "a_b-t0-r0-none-a0", True),
        ("a", "ab-t0-r0-none-a0", False),
    ],
)
def test_a_replicate_is_looked_for_on_the_supervisors_of_its_study(
    study: str, run_id: str, ours: bool
) -> None:
    assert RUN_IDS.fullmatch(run_id)
    assert may_supervise(f"supervisor:{study}:c0de:n0de:1", run_id) == ours
    assert not may_supervise(f"agent:{study}:c0de:n0de", run_id)


def test_private_directories_leave_room_for_the_names_of_sockets(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    long = tmp_path / ("x" * 80)
    long.mkdir()
    monkeypatch.setenv("RAY_TMPDIR", str(long))
    assert len(machine.short_temporary_directory()) <= 28


def test_workers_import_from_the_paths_of_the_driver(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    paths = processes.import_paths()
    assert paths[0] == str(Path(processes.__file__).parents[3]) and str(tmp_path) in paths
    assert not [path for path in paths if "-packages" in path or path.endswith(".zip")]


def test_facts_about_the_machine_fit_in_a_cell() -> None:
    facts = machine.facts()
    assert facts["cores"] >= 1 and facts["memory"] > 2**28
    assert machine.hardware().startswith(f"{facts['cores']} x ")
    assert machine.versions()["python"] == ".".join(map(str, sys.version_info[:3]))


def test_the_doctor_compares_versions_with_their_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {
        "torch": ("2.13.0+cpu", ">=2.6"),
        "ray": ("2.60", ">=2.60.0,<3"),
        "numpy": ("2.4.1", ">=1.26,<2.4"),
        "hivemind": ("1.1.11", "==1.1.12"),
        "optuna": ("5.0.0rc1", ">=4,<6"),
    }
    bounds = [f"{name}{bound}" for name, (_, bound) in installed.items()]
    monkeypatch.setattr(metadata, "requires", lambda name: [*bounds, "jinja2>=3; extra=='report'"])
    monkeypatch.setattr(metadata, "version", lambda name: installed[name][0])
    (found,) = [check for check in doctor() if check.name == "packages"]
    assert not found.ok
    assert found.detail == "numpy 2.4.1 is not <2.4; hivemind 1.1.11 is not ==1.1.12"


def test_the_doctor_finds_this_machine_fit() -> None:
    checks = {check.name: check for check in doctor()}
    assert len(checks) == 15 + len(CAPABILITIES)
    for check in checks.values():
        assert check.detail, check.name
        assert check.ok or check.mend, f"{check.name} is wrong and nobody says what to do"
    assert checks["p2pd"].ok and checks["python"].ok and checks["ports"].ok


def test_the_doctor_finds_a_mount_that_no_living_run_uses(tmp_path: Path) -> None:
    reason = capabilities.here()["mount"]
    if reason is not None:
        pytest.skip(reason)
    disk = SmallDisk(tmp_path / "checkpoints", 2**20)
    try:
        (found,) = [check for check in doctor() if check.name == "leftovers"]
        assert not found.ok and f"umount {disk.folder}" in found.detail
    finally:
        disk.release()


def test_the_doctor_sees_a_small_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    from rayhive.cluster import doctor as module

    monkeypatch.setattr(module, "_MIN_SHARED_MEMORY", 2**60)
    shared = next(check for check in doctor() if check.name == "shared memory")
    assert not shared.ok and "--shm-size" in shared.mend
