"""Clusters without room: one that grows is asked for nodes, a fixed one refuses at once."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from rayhive.events import PeerSpawned, of_kind, read_events
from tests.integration.cluster_harness import (
    FAKE_FORKSERVER,
    ROOT,
    driver,
    eventually,
    free_port,
    ray_head,
    replicate,
    users_of,
)

pytestmark = [pytest.mark.cluster]

#: Fixed by the provider that makes nodes out of processes of this machine.
HEAD_ID = "f" * 51 + "00000"

RUN = """
import json, sys
from dataclasses import asdict
from rayhive.cluster.cluster import Cluster
from rayhive.cluster.node.raylets import rooms
from rayhive.spec import SwarmConfig
from rayhive.spec.replicate import ReplicateSpec
address, spec, forkserver = sys.argv[1], ReplicateSpec.model_validate_json(sys.argv[2]), sys.argv[3]
with Cluster.connect(address, forkserver_command=json.loads(forkserver)) as cluster:
    found = [str(problem) for problem in cluster.check_room(spec.swarm)]
    print("problems", json.dumps(found), flush=True)
    never = SwarmConfig(peers=2, gpus_per_peer=1.5)
    print("never", len(cluster.check_room(never)), flush=True)
    if not found:
        handle = cluster.start(spec)
        print("outcome", json.dumps(asdict(handle.wait(150))), flush=True)
        print("rooms", json.dumps([room.cpus for room in rooms()]), flush=True)
        handle.release()
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="rht-", dir="/tmp"))
    yield path
    # the nodes of the monitor are not children of this process
    eventually(lambda: not _kill(users_of(path)))
    shutil.rmtree(path)


def _kill(pids: list[int]) -> list[int]:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return pids


def autoscaler(
    file: Path, port: int, worker_types: dict[str, dict[str, Any]] | None = None, **provider: Any
) -> Path:
    """Write the configuration of an autoscaler whose head has no cores and whose workers have 1.

    Args:
        file: The file to write.
        port: Port of the GCS.
        worker_types: Types of the workers; None for one without labels.
        provider: More settings of the provider.
    """
    import ray.util

    commands = (
        *("initialization", "setup", "head_setup", "worker_setup", "head_start_ray"),
        "worker_start_ray",
    )
    lists = [f"{name}_commands" for name in commands]
    nothing = {key: [] for key in (*lists, "cluster_synced_files", "rsync_exclude", "rsync_filter")}
    head, worker = "ray.head.default", {"CPU": 1, "object_store_memory": 80_000_000}
    file.write_text(
        json.dumps(
            {
                **nothing,
                **{"auth": {}, "docker": {}, "file_mounts": {}},
                "cluster_name": "grows",
                "max_workers": 3,
                "upscaling_speed": 1.0,
                "idle_timeout_minutes": 5,
                "file_mounts_sync_continuously": False,
                "provider": {
                    "type": "fake_multinode",
                    "head_node_id": HEAD_ID,
                    "gcs_address": f"{ray.util.get_node_ip_address()}:{port}",
                    "disable_node_updaters": True,
                    **provider,
                },
                "head_node_type": head,
                "available_node_types": {
                    head: {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0},
                    **{
                        name: {
                            **settings,
                            **{"resources": worker, "node_config": {}},
                            **{"min_workers": 0, "max_workers": 3},
                        }
                        for name, settings in (worker_types or {"worker": {}}).items()
                    },
                },
            }
        )
    )  # fmt: skip
    return file


@pytest.mark.slow
def test_a_study_waits_for_the_nodes_that_an_autoscaler_adds(folder: Path, tmp_path: Path) -> None:
    """It was refused before Ray was asked, for the head has no cores and no worker is up."""
    port = free_port()
    file = autoscaler(folder / "autoscaler.json", port)
    spec = replicate(tmp_path, rounds=3)
    with ray_head(
        folder,
        options=["--num-cpus=0", f"--autoscaling-config={file}"],
        port=port,
        RAY_FAKE_CLUSTER="1",
        AUTOSCALER_UPDATE_INTERVAL_S="1",
        RAY_OVERRIDE_NODE_ID_FOR_TESTING=HEAD_ID,
    ) as head:
        given = (head.address, spec.model_dump_json(by_alias=True), json.dumps(FAKE_FORKSERVER))
        with driver(RUN, *given, **head.environment) as run:
            assert json.loads(run.line("problems")) == []
            assert run.line("never") == "1"
            outcome = json.loads(run.line("outcome"))
            assert outcome["state"] == "completed", outcome
            rooms = json.loads(run.line("rooms"))
            assert sum(rooms) == spec.swarm.peers == len(rooms) - 1


@pytest.mark.slow
def test_a_study_makes_nodes_of_the_manifest_appear(folder: Path, tmp_path: Path) -> None:
    """Its peers ask for the label of the spot nodes, and no such node is there."""
    manifest = yaml.safe_load((ROOT / "experiments" / "cluster" / "aws.yaml").read_text())
    types = manifest["available_node_types"]
    workers = {n: {"labels": types[n]["labels"]} for n in types if n != manifest["head_node_type"]}
    ((kind, settings),) = workers.items()
    study = tmp_path / "study.yaml"
    study.write_text(
        yaml.safe_dump(
            {
                "name": "grows",
                "workload": {"name": "digits"},
                "swarm": {
                    "peers": 2,
                    "node_classes": {kind: {"count": 2, "labels": settings["labels"]}},
                },
                "budget": {
                    "trials": 1,
                    "seconds_per_replicate": 60,
                    "samples_per_replicate": 1024,
                },
                "replicates": 1,
                "retries": 0,
            }
        )
    )
    port = free_port()
    file = autoscaler(folder / "autoscaler.json", port, workers, launch_multiple=True)
    with ray_head(
        folder,
        options=["--num-cpus=0", f"--autoscaling-config={file}"],
        port=port,
        RAY_FAKE_CLUSTER="1",
        AUTOSCALER_UPDATE_INTERVAL_S="1",
        RAY_OVERRIDE_NODE_ID_FOR_TESTING=HEAD_ID,
    ) as head:
        command = [sys.executable, "-m", "rayhive", "sweep", str(study), "--format", "json"]
        command += ["--address", head.address, "--out", str(tmp_path / "run")]
        done = subprocess.run(
            command,
            env={**os.environ, **head.environment},
            cwd=ROOT,
            capture_output=True,
            text=True,
        )
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout)
    assert (row["n"], row["n_failed"]) == (1, 0), done.stderr
    seen = list(read_events(tmp_path / "run" / "trials" / "0" / "r0-none" / "events.jsonl"))
    nodes = {event.node for event in of_kind(seen, PeerSpawned)}
    assert len(nodes) == 2 and HEAD_ID not in nodes, "one new node a peer"


@pytest.mark.slow
def test_a_fixed_cluster_without_cores_is_refused_with_the_reason(
    folder: Path, tmp_path: Path
) -> None:
    spec = replicate(tmp_path, rounds=3)
    with ray_head(folder, options=["--num-cpus=0"]) as head:
        given = (head.address, spec.model_dump_json(by_alias=True), json.dumps(FAKE_FORKSERVER))
        with driver(RUN, *given, **head.environment) as run:
            (problem,) = json.loads(run.line("problems"))
            assert "swarm.peers: 2" in problem
            assert "0 cores in all, and no autoscaler adds nodes" in problem
