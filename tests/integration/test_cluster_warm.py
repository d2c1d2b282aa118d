"""Supervisors and peer actors that wait for the next replicate, and those that must not be kept."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import psutil
import pytest
import ray

from rayhive.cluster.cluster import Cluster
from rayhive.cluster.replicate import supervisors
from rayhive.cluster.replicate.handle import ReplicateHandle
from rayhive.cluster.replicate.peer_table import Outcome
from rayhive.errors import ConfigError
from tests.integration.cluster_harness import (
    FAKE_FORKSERVER,
    eventually,
    groups,
    litter,
    replicate,
    training,
)

pytestmark = [pytest.mark.cluster]

PATIENT = 40.0
DONE = Outcome("completed", "rounds")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster.connect("local", forkserver_command=FAKE_FORKSERVER) as cluster:
        yield cluster


def workers(cluster: Cluster, kind: str) -> set[int]:
    """Return the processes of this cluster's actors of a class."""
    assert cluster.embedded_ray is not None
    found = set()
    for process in psutil.process_iter():
        try:
            line = process.cmdline()
            if line and line[0].startswith(f"ray::{kind}"):
                raylet = " ".join(psutil.Process(process.ppid()).cmdline())
                if str(cluster.embedded_ray.directory) in raylet:
                    found.add(process.pid)
        except psutil.Error:
            continue
    return found


def run(cluster: Cluster, folder: Path) -> tuple[set[int], set[int]]:
    """Run a replicate to its end; return the processes of its supervisor and its peers' actors."""
    spec = replicate(folder)
    handle = cluster.start(spec)
    assert handle.wait(PATIENT) == DONE
    handle.release()
    assert groups(spec) == [] and litter(spec) == []
    return workers(cluster, "TrialSupervisor"), workers(cluster, "PeerActor")


def test_replicates_in_a_row_share_their_supervisor_and_actors(
    cluster: Cluster, tmp_path: Path
) -> None:
    first = run(cluster, tmp_path / "0")
    assert [len(pids) for pids in first] == [1, 2]
    # idle actors hold no room: neither cores nor the claim of the node
    eventually(lambda: ray.available_resources().get("CPU") == ray.cluster_resources()["CPU"])
    free, there = ray.available_resources(), ray.cluster_resources()
    assert {name: free[name] for name in there if name.startswith("node:")} == {
        name: there[name] for name in there if name.startswith("node:")
    }
    assert run(cluster, tmp_path / "1") == first
    assert sorted(os.listdir(tmp_path / "1" / "logs")) == ["peer-0.log", "peer-1.log"]


def test_an_idle_actor_that_was_killed_is_replaced(cluster: Cluster, tmp_path: Path) -> None:
    supervisors, before = run(cluster, tmp_path / "0")
    killed = min(before)
    os.kill(killed, signal.SIGKILL)
    again, after = run(cluster, tmp_path / "1")
    assert again == supervisors
    assert len(after) == 2 and len(after & before) == 1 and killed not in after


def test_an_idle_supervisor_that_was_killed_is_replaced_with_its_actors(
    cluster: Cluster, tmp_path: Path
) -> None:
    (killed,), before = run(cluster, tmp_path / "0")
    os.kill(killed, signal.SIGKILL)
    eventually(lambda: workers(cluster, "PeerActor") == set())
    supervisors, after = run(cluster, tmp_path / "1")
    assert len(supervisors) == 1 and killed not in supervisors
    assert len(after) == 2 and not after & before


@pytest.mark.slow
def test_nothing_is_kept_of_a_replicate_that_was_lost(cluster: Cluster, tmp_path: Path) -> None:
    supervisors, before = run(cluster, tmp_path / "0")
    spec = replicate(tmp_path / "lost", rounds=None)
    handle = cluster.start(spec)
    eventually(lambda: training(spec))
    os.kill(min(before), signal.SIGKILL)
    outcome = handle.wait(PATIENT)
    assert outcome is not None and outcome.state == "lost"
    assert "its actor died" in outcome.stop_reason
    handle.release()
    eventually(lambda: not (supervisors | before) & _processes(cluster))
    assert run(cluster, tmp_path / "1") == (
        workers(cluster, "TrialSupervisor"),
        workers(cluster, "PeerActor"),
    )


def test_a_replicate_that_was_stopped_leaves_a_supervisor_in_order(
    cluster: Cluster, tmp_path: Path
) -> None:
    before = run(cluster, tmp_path / "0")
    spec = replicate(tmp_path / "stopped", rounds=None)
    handle = cluster.start(spec)
    eventually(lambda: training(spec))
    handle.stop("enough")
    assert handle.wait(PATIENT) == Outcome("stopped", "enough")
    handle.release()
    assert run(cluster, tmp_path / "1") == before


def test_two_replicates_of_a_study_at_a_time_have_a_supervisor_each(
    cluster: Cluster, tmp_path: Path
) -> None:
    shared = {"swarm": {"peers": 1, "share_nodes": True}}  # a core each
    specs = [replicate(tmp_path / name, rounds=None, **shared) for name in "ab"]
    handles = [cluster.start(spec) for spec in specs]
    for spec in specs:
        eventually(lambda spec=spec: training(spec))
    assert len(workers(cluster, "TrialSupervisor")) == 2
    assert {*cluster.supervisors("study")} == {spec.run_id for spec in specs}
    for handle in handles:
        handle.stop("enough")
    for handle in handles:
        assert handle.wait(PATIENT) == Outcome("stopped", "enough")
        handle.release()


def test_retired_supervisors_end_with_their_actors(cluster: Cluster, tmp_path: Path) -> None:
    run(cluster, tmp_path)
    cluster.retire(["study"])
    eventually(lambda: _processes(cluster) == set())
    assert cluster.supervisors() == []


def _processes(cluster: Cluster) -> set[int]:
    return workers(cluster, "TrialSupervisor") | workers(cluster, "PeerActor")


@pytest.mark.parametrize("idle", [False, True])
def test_of_two_replicates_of_one_name_that_begin_together_one_runs(
    idle: bool, cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two sweeps of one name with folders of their own."""
    spec = replicate(tmp_path / "0", "twice")
    if idle:
        before = cluster.start(replicate(tmp_path / "before", "twice"))
        assert before.wait(PATIENT) == DONE
        before.release()
    looked, taken = Barrier(2, timeout=60), Barrier(2, timeout=60)
    look = supervisors._look

    def together(run_id: str, apart_from: str | None = None) -> Any:
        if apart_from is not None:
            taken.wait()
            return look(run_id, apart_from)
        found = look(run_id)
        looked.wait()
        return found

    def start(folder: Path) -> ReplicateHandle | ConfigError:
        try:
            return cluster.start(spec.model_copy(update={"folder": str(folder)}))
        except ConfigError as error:
            return error

    monkeypatch.setattr(supervisors, "_look", together)
    with ThreadPoolExecutor(2) as both:
        found = list(both.map(start, (tmp_path / "0", tmp_path / "1")))
    (handle,) = (each for each in found if isinstance(each, ReplicateHandle))
    (refused,) = (each for each in found if isinstance(each, ConfigError))
    assert "a name that no other run on this cluster has" in str(refused)
    assert handle.wait(PATIENT) == DONE
    handle.release()
