"""Real peers through Ray: the forkserver, hivemind, and the remains of a killed peer."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rayhive.cluster.cluster import Cluster
from rayhive.cluster.node.process_group import OwnedProcesses, records
from rayhive.cluster.replicate.peer_table import Outcome
from rayhive.spec.replicate import ReplicateSpec
from tests.integration.cluster_harness import events_of, eventually, groups, pids, training

pytestmark = [pytest.mark.cluster, pytest.mark.swarm]

TARGET = 64


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster.connect("local") as cluster:
        yield cluster


def digits(folder: Path, trial: int, samples: int | None) -> ReplicateSpec:
    return ReplicateSpec.model_validate(
        {
            "study": "swarm",
            "trial": trial,
            "replicate": 0,
            "workload": {"name": "digits"},
            "swarm": {"peers": 2, "target_batch_size": TARGET, "batch_size": 16},
            "configuration": {},
            "budget": {"seconds_per_replicate": 90, "samples_per_replicate": samples},
            "evaluation": {"every_samples": 4 * TARGET},
            "folder": str(folder),
        }
    )


def story(spec: ReplicateSpec) -> str:
    """Return the last events and the logs, for the message of a failed test."""
    shown = [
        {k: v for k, v in e.stored().items() if k not in ("sketch", "spec")}
        for e in events_of(spec)
    ]
    logs = [path.read_text()[-1500:] for path in Path(spec.folder).glob("logs/*")]
    return "\n".join([*map(str, shown[-12:]), *logs])


def owned(cluster: Cluster, spec: ReplicateSpec) -> list[OwnedProcesses]:
    """Return the records of a running replicate's peers."""
    assert cluster.embedded_ray is not None
    found = [record for _, record in records(cluster.embedded_ray.agents)]
    return [record for record in found if record.leader in pids(spec)]


def left_of(found: list[OwnedProcesses]) -> list[Any]:
    """Return the files that dead peers left."""
    sockets = [path for record in found for path in record.sockets if os.path.exists(path)]
    processes = {pid for record in found for pid in record.processes}
    memory = [p for p in Path("/dev/shm").glob("torch_*") if int(p.name.split("_")[1]) in processes]
    return sockets + memory


def test_two_real_peers_train_and_leave_nothing(cluster: Cluster, tmp_path: Path) -> None:
    spec = digits(tmp_path, 0, samples=8 * TARGET)
    handle = cluster.start(spec)
    outcome = handle.wait(150)
    assert outcome == Outcome("completed", "rounds"), story(spec)
    rounds = [event for event in events_of(spec) if event["kind"] == "round"]
    assert {event["round"] for event in rounds} >= set(range(1, 9))
    assert {event["outcome"] for event in rounds} == {"averaged"}
    assert {event["group_size"] for event in rounds} == {2}
    undeclared = {(event.kind, *event.extra) for event in events_of(spec) if event.extra}
    assert not undeclared, "fields that no event record declares"
    assert groups(spec) == []
    handle.release()


def test_a_killed_real_peer_is_noticed_and_cleared_away(cluster: Cluster, tmp_path: Path) -> None:
    spec = digits(tmp_path, 1, samples=None)
    handle = cluster.start(spec)
    eventually(lambda: training(spec), 120)
    before = owned(cluster, spec)
    assert len(before) == 2 and all(record.sockets for record in before)
    assert all(len(record.processes) >= 4 for record in before), "trainer, DHT, p2pd, averager"
    os.kill(pids(spec)[1], signal.SIGKILL)
    outcome = handle.wait(40)
    assert outcome is not None and outcome.state == "failed", story(spec)
    assert "killed by signal 9" in outcome.stop_reason
    assert groups(spec) == [] and left_of(before) == []
    handle.release()
