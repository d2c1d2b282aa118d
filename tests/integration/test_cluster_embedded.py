"""Whole replicates of pretended peers on an embedded Ray: how they go right and wrong."""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from rayhive.cluster.cluster import Cluster
from rayhive.cluster.node import machine
from rayhive.cluster.node.raylets import rooms
from rayhive.cluster.replicate.peer_table import Outcome
from rayhive.errors import ConfigError
from rayhive.events import Pruned
from rayhive.metrics.rows import replicate_row
from rayhive.spec import SwarmConfig
from rayhive.spec.pruning import Bar, EarlyStop
from rayhive.spec.replicate import ReplicateSpec
from tests.integration.cluster_harness import (
    FAKE_FORKSERVER,
    events_of,
    eventually,
    groups,
    kinds,
    litter,
    pids,
    replicate,
    training,
)

pytestmark = [pytest.mark.cluster]

PATIENT = 40.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    directory = None
    with Cluster.connect("local", forkserver_command=FAKE_FORKSERVER) as cluster:
        assert cluster.embedded_ray is not None
        directory = cluster.embedded_ray.directory
        assert directory.is_dir() and len(str(directory)) < 40
        yield cluster
    assert not directory.exists()


def run(cluster: Cluster, spec: ReplicateSpec) -> Outcome:
    """Run a replicate to its end and check the properties of every end."""
    handle = cluster.start(spec)
    outcome = handle.wait(PATIENT)
    assert outcome is not None, handle.status()
    events = events_of(spec)
    assert events[-1]["kind"] == "replicate_finished"
    assert outcome == Outcome(events[-1]["state"], events[-1]["stop_reason"])
    assert groups(spec) == [] and litter(spec) == []
    handle.release()
    return outcome


def test_a_replicate_goes_through_all_phases(cluster: Cluster, tmp_path: Path) -> None:
    spec = replicate(tmp_path, rounds=6)
    handle = cluster.start(spec)
    assert handle.run_id == spec.run_id and spec.run_id in cluster.supervisors("study")
    assert handle.wait(PATIENT) == Outcome("completed", "rounds")

    status = handle.status()
    assert status.phase == "finished" and set(status.peers) == {"peer-0", "peer-1"}
    for peer in status.peers.values():
        assert (peer.round, peer.samples, peer.loss) == (6, 24, pytest.approx(1 / 6))

    assert ReplicateSpec.model_validate_json((tmp_path / "spec.json").read_text()) == spec
    events = events_of(spec)
    assert [kind for kind in kinds(events, None) if kind != "invariant"] == [
        "replicate_started",
        "barrier_released",
        "outcome",
        "replicate_finished",
    ]
    assert events[0]["spec"] == spec.model_dump(mode="json", by_alias=True)
    assert events[0]["versions"]["ray"] and "GiB" in events[0]["hardware"]
    for name in ("peer-0", "peer-1"):
        own = kinds(events, name)
        (spawned,) = (e for e in events if (e["kind"], e["peer"]) == ("peer_spawned", name))
        assert spawned["hardware"] == events[0]["hardware"]
        assert spawned["versions"] == events[0]["versions"]
        assert own[:4] == ["peer_spawned", "dht_ready", "peer_ready", "training_started"]
        assert own.count("round") == 6 and own[-1] == "peer_finished"
        assert (tmp_path / "logs" / f"{name}.log").exists()
    # the barrier: no peer trains before all are ready
    ready = max(e["t"] for e in events if e["kind"] == "peer_ready")
    # one kernel, one clock
    assert {e["boot"] for e in events if e["kind"] == "peer_spawned"} == {events[0]["boot"]}
    assert ready <= min(e["t"] for e in events if e["kind"] == "training_started")
    assert groups(spec) == [] and litter(spec) == []

    handle.release()
    eventually(lambda: spec.run_id not in cluster.supervisors())
    assert handle.wait(0.0) == Outcome("completed", "rounds")


def test_a_hopeless_replicate_is_pruned(cluster: Cluster, tmp_path: Path) -> None:
    bars = (Bar(samples=8, value=0.5, replicates=6),)
    stop = EarlyStop(metric="loss", mode="min", share=50, margin=0.1, after=2, bars=bars)
    endless = replicate(tmp_path / "worse", rounds=None, evaluate=1.0)
    worse = endless.model_copy(update={"early_stop": stop})
    better = replicate(tmp_path / "better", rounds=6, evaluate=0.4)
    better = better.model_copy(update={"early_stop": stop})
    handles = [cluster.start(spec) for spec in (worse, better)]
    ended, whole = (handle.wait(PATIENT) for handle in handles)
    assert ended is not None and ended.state == "pruned"
    assert whole == Outcome("completed", "rounds")
    (pruned,) = [event for event in events_of(worse) if isinstance(event, Pruned)]
    assert (pruned.metric, pruned.value, pruned.bar, pruned.replicates) == ("loss", 1.0, 0.5, 6)
    assert pruned.samples == 8 * pruned.round >= 24
    row = replicate_row(worse.folder)
    assert (row["state"], row["stop_reason"]) == ("pruned", ended.stop_reason)
    assert groups(worse) == [] and litter(worse) == []
    for handle in handles:
        handle.release()


def test_the_forkserver_stays_warm_between_replicates(cluster: Cluster, tmp_path: Path) -> None:
    parents = []
    for number in range(2):
        spec = replicate(tmp_path / str(number), rounds=None)
        handle = cluster.start(spec)
        eventually(lambda spec=spec: training(spec))
        parents += [psutil.Process(pid).ppid() for pid in pids(spec)]
        handle.stop("enough")
        handle.wait(PATIENT)
        handle.release()
    assert len(set(parents)) == 1


def test_starting_again_adopts_and_stopping_twice_is_harmless(
    cluster: Cluster, tmp_path: Path
) -> None:
    spec = replicate(tmp_path, rounds=None)
    handle = cluster.start(spec)
    eventually(lambda: training(spec))
    assert handle.wait(0.0) is None and handle.status().phase == "training"
    again = cluster.start(spec)
    found = cluster.find(spec.run_id, spec.folder)
    assert found is not None and found.status().run_id == spec.run_id
    assert cluster.find(spec.run_id, tmp_path / "elsewhere") is None
    with pytest.raises(ConfigError, match="name that no other run"):
        cluster.start(spec.model_copy(update={"folder": str(tmp_path / "elsewhere")}))

    handle.stop("because")
    handle.stop("twice")
    assert again.wait(PATIENT) == Outcome("stopped", "because")
    assert groups(spec) == [] and litter(spec) == []
    assert len(pids(spec)) == 2, "adopted, not started twice"
    handle.release()


def test_a_killed_peer_fails_the_replicate_with_its_signal(
    cluster: Cluster, tmp_path: Path
) -> None:
    spec = replicate(tmp_path, rounds=None, peers={"1": {"die": [3, -signal.SIGKILL]}})
    outcome = run(cluster, spec)
    assert outcome.state == "failed"
    assert "peer-1: its process was killed by signal 9" in outcome.stop_reason
    assert "told to die" in outcome.stop_reason
    (lost,) = [event for event in events_of(spec) if event["kind"] == "peer_lost"]
    assert (lost["peer"], lost["exit_code"]) == ("peer-1", -9)


@pytest.mark.parametrize(
    ("trouble", "text"),
    [
        ({"fail": "start"}, "peer-1: RuntimeError('told to fail')"),
        ({"die": ["start", 3]}, "peer-1: its process ended with exit code 3"),
        ({"fail": 2}, "peer-1: RuntimeError('told to fail')"),
    ],
    ids=["fails before the barrier", "dies before the barrier", "fails in training"],
)
def test_a_peer_in_trouble_fails_the_replicate(
    cluster: Cluster, tmp_path: Path, trouble: dict[str, Any], text: str
) -> None:
    outcome = run(cluster, replicate(tmp_path, rounds=None, peers={"1": trouble}))
    assert outcome.state == "failed" and outcome.stop_reason.startswith(text)


def test_a_forkserver_that_does_not_start_loses_the_replicate_with_its_last_words(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = (sys.executable, "-c", "raise SystemExit('no torch here')")
    broken = replace(cluster.agent_options, forkserver_command=command)
    monkeypatch.setattr(cluster, "agent_options", broken)
    outcome = run(cluster, replicate(tmp_path, study="broken"))
    assert outcome == Outcome("lost", "the forkserver ended with exit code 1: no torch here")


def test_a_folder_that_cannot_be_written_loses_the_replicate(
    cluster: Cluster, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("in the way")
    handle = cluster.start(replicate(tmp_path / "file"))
    assert handle.wait(PATIENT) == Outcome(
        "lost", f"{tmp_path / 'file'} can't be written: Not a directory"
    )
    handle.release()


def test_a_full_disk_loses_the_replicate(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").symlink_to("/dev/full")
    handle = cluster.start(replicate(tmp_path, rounds=None))
    outcome = handle.wait(PATIENT)
    assert outcome is not None and outcome.state == "lost"
    assert "No space left on device" in outcome.stop_reason
    handle.release()


@pytest.mark.slow
def test_a_peer_that_is_never_ready_in_time_loses_the_replicate(
    cluster: Cluster, tmp_path: Path
) -> None:
    spec = replicate(tmp_path, peers={"1": {"startup_s": 60.0}}, timeouts={"barrier": 5.0})
    outcome = run(cluster, spec)
    reason = "peer-1 did not reach the barrier within 5 s (timeouts.barrier)"
    assert outcome == Outcome("lost", reason)  # the machine may be slow: no failure of the peer


@pytest.mark.parametrize(
    ("budget", "state"),
    [
        ({"samples_per_replicate": None}, "completed"),
        ({"samples_per_replicate": 10**6}, "timed_out"),
    ],
)
def test_the_budget_of_time_ends_training(
    cluster: Cluster, tmp_path: Path, budget: dict[str, Any], state: str
) -> None:
    spec = replicate(tmp_path, rounds=None, budget={"seconds_per_replicate": 0.8, **budget})
    assert run(cluster, spec) == Outcome(state, "seconds")
    events = events_of(spec)
    (released,) = [e["t"] for e in events if e["kind"] == "barrier_released"]
    finished = [e for e in events if e["kind"] == "peer_finished"]
    assert [e["reason"] for e in finished] == ["stop", "stop"]
    assert all(0.7 < e["t"] - released < 3.0 for e in finished)


@pytest.mark.parametrize("reason", ["target", "diverged"])
def test_one_peer_ends_it_for_all(cluster: Cluster, tmp_path: Path, reason: str) -> None:
    spec = replicate(tmp_path, rounds=None, peers={"0": {"rounds": 3, "reason": reason}})
    expected = {
        "target": Outcome("completed", "target"),
        "diverged": Outcome("diverged", "peer-0 diverged in round 3"),
    }
    assert run(cluster, spec) == expected[reason]


def test_a_deaf_peer_is_killed(cluster: Cluster, tmp_path: Path) -> None:
    spec = replicate(
        tmp_path,
        rounds=None,
        budget={"seconds_per_replicate": 0.5},
        peers={"1": {"deaf": True}},
        timeouts={"stopping": 0.5},
    )
    outcome = run(cluster, spec)
    assert outcome.state == "failed"
    assert outcome.stop_reason == "peer-1 did not stop within 1.5 s"


def test_a_peer_that_will_not_go_home_is_killed_without_harm(
    cluster: Cluster, tmp_path: Path
) -> None:
    spec = replicate(tmp_path, peers={"1": {"deaf": True}}, timeouts={"teardown": 0.5})
    outcome = run(cluster, spec)
    assert outcome == Outcome("completed", "rounds")


def test_a_dead_supervisor_takes_its_peers_along(cluster: Cluster, tmp_path: Path) -> None:
    spec = replicate(tmp_path, rounds=None)
    handle = cluster.start(spec)
    eventually(lambda: training(spec))
    (supervisor,) = [
        process
        for process in psutil.process_iter(["cmdline"])
        if process.info["cmdline"]
        and process.info["cmdline"][0].startswith("ray::TrialSupervisor")
        and str(tmp_path) in _open_files(process)
    ]
    os.kill(supervisor.pid, signal.SIGKILL)
    outcome = handle.wait(PATIENT)
    assert outcome is not None and outcome.state == "lost"
    assert outcome.stop_reason.startswith("the supervisor died")
    eventually(lambda: groups(spec) == [])
    # the next replicate does not have to wait for the agent's round to find a clean node
    following = replicate(tmp_path / "next")
    assert run(cluster, following).state == "completed"
    cluster.retire(["study"])
    eventually(lambda: litter(spec) == [])


def _open_files(process: psutil.Process) -> str:
    try:
        return " ".join(file.path for file in process.open_files())
    except psutil.Error:
        return ""


@pytest.mark.slow
def test_eight_peers_fit_on_two_cores(cluster: Cluster, tmp_path: Path) -> None:
    spec = replicate(tmp_path, swarm={"peers": 8}, rounds=2)
    assert cluster.check_room(spec.swarm) == []
    assert run(cluster, spec).state == "completed"
    assert len(pids(spec)) == 8


def test_a_node_that_dies_prints_nothing_of_its_log_into_our_output(
    cluster: Cluster, capfd: pytest.CaptureFixture[str]
) -> None:
    worker = importlib.import_module("ray._private.worker")
    # the call of Ray's thread for error messages, with the message of a dying raylet
    message = {"lines": ["Raylet is terminated."], "pid": "raylet", "is_err": False}
    worker.print_to_stdstream(message, ignore_prefix=False)
    assert "Raylet" not in "".join(capfd.readouterr())


def test_a_demand_that_can_never_be_met_is_reported(cluster: Cluster) -> None:
    (room,) = rooms()
    assert room.cpus == machine.cores()
    swarm = SwarmConfig.model_validate(
        {
            "peers": 2,
            "node_classes": {
                "fast": {"count": 1, "labels": {"accelerator": "none-such"}},
                "slow": {"count": 1, "gpus": 64},
            },
        }
    )
    keys = [problem.key for problem in cluster.check_room(swarm)]
    assert keys == ["swarm.node_classes.fast.labels", "swarm.node_classes.slow.gpus"]


def test_the_records_of_running_peers_list_their_processes_and_files(
    cluster: Cluster, tmp_path: Path
) -> None:
    spec = replicate(tmp_path, rounds=None)
    handle = cluster.start(spec)
    eventually(lambda: training(spec))
    assert cluster.embedded_ray is not None
    files = list(cluster.embedded_ray.agents.rglob("*.owns.json"))
    owned = [json.loads(file.read_text()) for file in files]
    assert sorted(o["leader"] for o in owned) == sorted(pids(spec))
    assert all(len(o["processes"]) == 2 and len(o["sockets"]) == 2 for o in owned)
    handle.stop("seen")
    handle.wait(PATIENT)
    assert list(cluster.embedded_ray.agents.rglob("*.owns.json")) == []
    handle.release()
