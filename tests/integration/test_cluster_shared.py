"""A Ray cluster that outlives its drivers: adoption, status and stop from other processes, jobs."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rayhive.cluster.node import capabilities
from tests.integration.cluster_harness import (
    FAKE_FORKSERVER,
    ROOT,
    Head,
    driver,
    events_of,
    eventually,
    groups,
    litter,
    pids,
    ray_head,
    ray_node,
    replicate,
    training,
    users_of,
)

pytestmark = [pytest.mark.cluster]

START = """
import json, sys, time
from dataclasses import asdict
from rayhive.cluster.cluster import Cluster
from rayhive.spec.replicate import ReplicateSpec
address, spec, forkserver = sys.argv[1], ReplicateSpec.model_validate_json(sys.argv[2]), sys.argv[3]
with Cluster.connect(address, forkserver_command=json.loads(forkserver)) as cluster:
    assert not cluster.embedded
    assert not cluster.check_room(spec.swarm)
    handle = cluster.start(spec)
    print("started", flush=True)
    print("outcome", json.dumps(asdict(handle.wait(60))), flush=True)
    handle.release()
"""

ADOPT = """
import json, sys
from dataclasses import asdict
from rayhive.cluster.cluster import Cluster
address, run_id = sys.argv[1:3]
with Cluster.connect(address) as cluster:
    print("found", json.dumps(cluster.supervisors()), flush=True)
    handle = cluster.find(run_id)
    print("status", json.dumps(asdict(handle.status())), flush=True)
    assert handle.wait(0.2) is None
"""

CONTROL = """
import json, sys
from dataclasses import asdict
from rayhive.cluster.control import cluster_status, stop_study
address = sys.argv[1]

def status():
    return [asdict(found) for found in cluster_status(address)]

answer = [status(), *(stop_study(address, study) for study in sys.argv[2:])]
print("answer", json.dumps([*answer, status()]), flush=True)
"""


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="rht-", dir="/tmp"))
    yield path
    assert users_of(path) == []
    shutil.rmtree(path)


@pytest.fixture(scope="module")
def head(folder: Path) -> Iterator[Head]:
    with ray_head(folder, options=["--num-gpus=1", "--labels=zone=a"]) as head:
        yield head


def test_a_replicate_outlives_its_driver_and_is_adopted(
    head: Head, folder: Path, tmp_path: Path
) -> None:
    spec = replicate(tmp_path, rounds=None, budget={"seconds_per_replicate": 120})
    arguments = (head.address, spec.model_dump_json(by_alias=True), json.dumps(FAKE_FORKSERVER))
    with driver(START, *arguments, **head.environment) as first:
        first.line("started")
        eventually(lambda: training(spec))
        os.kill(first.process.pid, signal.SIGKILL)
        first.process.wait()
    with driver(ADOPT, head.address, spec.run_id, **head.environment) as second:
        assert json.loads(second.line("found")) == [spec.run_id]
        status = json.loads(second.line("status"))
        assert status["phase"] == "training" and status["seconds"] < 120
        assert second.process.wait(30) == 0
    left = time.time()
    eventually(lambda: any(e["kind"] == "round" and e["t"] > left for e in events_of(spec)))
    assert len(groups(spec)) == 2 * len(pids(spec)) == 4

    with driver(CONTROL, head.address, "another", "study", **head.environment) as control:
        (running,), another, stopped, after = json.loads(control.line("answer"))
    assert (running["run_id"], running["phase"]) == (spec.run_id, "training")
    assert running["peers"]["peer-1"]["round"] > 0
    assert (another, stopped, after) == ([], [spec.run_id], [])
    assert events_of(spec)[-1]["state"] == "stopped"
    assert groups(spec) == [] and litter(spec) == []
    # a stopped study has no agents
    eventually(lambda: [pid for pid in users_of(folder) if "forkserver" in _line(pid)] == [])


def _line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


@pytest.mark.slow
def test_a_driver_that_ends_takes_its_agents_along(head: Head, tmp_path: Path) -> None:
    # ... and the demands of node classes are met: two peers share the one (pretended) GPU
    classes = {
        "gpu": {"count": 2, "gpus": 0.5, "labels": {"zone": "a"}},
        "cpu": {"count": 1},
    }
    spec = replicate(tmp_path, study="other", rounds=3, swarm={"peers": 3, "node_classes": classes})
    arguments = (head.address, spec.model_dump_json(by_alias=True), json.dumps(FAKE_FORKSERVER))
    with driver(START, *arguments, **head.environment) as only:
        assert json.loads(only.line("outcome")) == {"state": "completed", "stop_reason": "rounds"}
        assert only.process.wait(30) == 0
    assert groups(spec) == [] and litter(spec) == []
    ready = [event for event in events_of(spec) if event["kind"] == "peer_ready"]
    assert {event["peer"]: event["device"] for event in ready} == {
        "peer-0": "0",
        "peer-1": "0",
        "peer-2": "",
    }
    eventually(lambda: _actors(head) == [])


def _actors(head: Head) -> list[str]:
    code = """
import json, sys, ray
ray.init(address=sys.argv[1], log_to_driver=False)
print("answer", json.dumps([a["name"] for a in ray.util.list_named_actors(True)]), flush=True)
"""
    with driver(code, head.address, **head.environment) as asker:
        found: list[str] = json.loads(asker.line("answer"))
    return found


@pytest.mark.slow
def test_peers_go_to_the_nodes_of_their_class_and_their_logs_come_home(tmp_path: Path) -> None:
    path = Path(tempfile.mkdtemp(prefix="rht-", dir="/tmp"))
    classes = {name: {"count": 1, "labels": {"zone": name}} for name in ("a", "b")}
    spec = replicate(tmp_path, swarm={"node_classes": classes}, says="hello")
    try:
        with ray_head(path, options=["--labels=zone=b"]) as head:
            arguments = (head.address, spec.model_dump_json(by_alias=True))
            with driver(
                START, *arguments, json.dumps(FAKE_FORKSERVER), **head.environment
            ) as early:
                assert early.process.wait(60) == 1
            assert not (tmp_path / "events.jsonl").exists()
            with (
                ray_node(head, path, ["--labels=zone=a", "--num-cpus=1"]),
                driver(START, *arguments, json.dumps(FAKE_FORKSERVER), **head.environment) as late,
            ):
                outcome = json.loads(late.line("outcome"))
                assert outcome == {"state": "completed", "stop_reason": "rounds"}
                assert late.process.wait(30) == 0
        spawned = [event for event in events_of(spec) if event["kind"] == "peer_spawned"]
        assert len({event["node"] for event in spawned}) == 2
        ready = [event for event in events_of(spec) if event["kind"] == "dht_ready"]
        # they have to reach each other: no loopback between machines
        assert not [e for e in ready if "127.0.0.1" in e["addresses"][0]]
        for name in ("peer-0", "peer-1"):
            assert "hello" in (tmp_path / "logs" / f"{name}.log").read_text()
        assert groups(spec) == [] and litter(spec) == [] and users_of(path) == []
    finally:
        shutil.rmtree(path, ignore_errors=True)


CAN = """
import json, sys
from rayhive.cluster.cluster import Cluster
from rayhive.spec import SwarmConfig
with Cluster.connect(sys.argv[1]) as cluster:
    for classes in json.loads(sys.argv[2]):
        needs = {"kill": ["signals"], "disk_full": ["mount"]}
        problems = cluster.check_kinds(needs, SwarmConfig(node_classes=classes))
        print("answer", json.dumps([str(problem) for problem in problems]), flush=True)
"""


@pytest.mark.slow
def test_a_kind_is_refused_that_a_node_of_the_swarm_cannot_do(tmp_path: Path) -> None:
    path = Path(tempfile.mkdtemp(prefix="rht-", dir="/tmp"))
    able, both = ({name: {"count": 1, "labels": {"zone": name}} for name in k} for k in ("b", "ab"))
    can = capabilities.here()["mount"] is None  # else neither node can
    weak = ["setpriv", "--bounding-set=-sys_admin"] if can else []
    try:
        with (
            ray_head(path, options=["--labels=zone=b"]) as head,
            ray_node(head, path, ["--labels=zone=a", "--num-cpus=1"], under=weak),
            driver(CAN, head.address, json.dumps([able, both]), **head.environment) as asker,
        ):
            assert (json.loads(asker.line("answer")) == []) is can
            (problem,) = json.loads(asker.line("answer"))
            assert "disk_full" in problem and f"on {socket.gethostname()}: " in problem
        assert users_of(path) == []
    finally:
        shutil.rmtree(path, ignore_errors=True)


@pytest.mark.slow
def test_a_cluster_with_a_token_is_joined_with_the_token(tmp_path: Path) -> None:
    path = Path(tempfile.mkdtemp(prefix="rht-", dir="/tmp"))
    try:
        secret = {"RAY_AUTH_TOKEN": "t" * 32}
        with ray_head(path, RAY_AUTH_MODE="token", **secret) as head:
            # ray.init sends no token unless RAY_AUTH_MODE says so; that is found out
            environment = {k: v for k, v in head.environment.items() if k != "RAY_AUTH_MODE"}
            with driver(CONTROL, head.address, **environment) as control:
                assert json.loads(control.line("answer")) == [[], []]
            wrong = environment | {"RAY_AUTH_TOKEN": "x" * 32}
            done = subprocess.run(
                [sys.executable, "-c", CONTROL, head.address],
                env={**os.environ, "PYTHONPATH": str(ROOT), **wrong},
                capture_output=True,
                text=True,
                timeout=90,
            )
            assert "ConfigError" in done.stderr and "token" in done.stderr.splitlines()[-1]
        assert users_of(path) == []
    finally:
        shutil.rmtree(path, ignore_errors=True)


JOB = """
import json, os, sys
from dataclasses import asdict
import rayhive
from rayhive.cluster.cluster import Cluster
from rayhive.spec.replicate import ReplicateSpec
assert "RAY_ADDRESS" in os.environ
assert os.path.dirname(rayhive.__file__) == os.path.join(os.getcwd(), "rayhive"), rayhive.__file__
spec, forkserver = ReplicateSpec.model_validate_json(sys.argv[1]), json.loads(sys.argv[2])
with Cluster.connect(None, forkserver_command=forkserver) as cluster:
    assert not cluster.embedded
    handle = cluster.start(spec)
    print("outcome", json.dumps(asdict(handle.wait(60))), flush=True)
    handle.release()
"""


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["disabled", "token"])
def test_a_submitted_job_runs_a_replicate(tmp_path: Path, mode: str) -> None:
    """The plain command works from a checkout with an environment and runs in it."""
    checkout = tmp_path / "checkout"
    shutil.copytree(ROOT / "rayhive", checkout / "rayhive")
    shutil.copy(ROOT / ".gitignore", checkout)
    (checkout / "script.py").write_text(JOB)
    for name in (".venv/lib", "runs/old", ".git/objects", "build"):
        (checkout / name).mkdir(parents=True)
        with (checkout / name / "large.bin").open("wb") as file:
            file.truncate(300 * 2**20)  # more than Ray uploads, together and apart
    spec = replicate(tmp_path / "run", rounds=4)
    path = Path(tempfile.mkdtemp(prefix="rht-", dir="/tmp"))
    environment = {"RAY_AUTH_MODE": mode} | (
        {"RAY_AUTH_TOKEN": "t" * 32} if mode == "token" else {}
    )
    try:
        with ray_head(path, dashboard=True, **environment) as head:
            command = [sys.executable, "-c", "from ray.scripts.scripts import main; main()"]
            command += ["job", "submit", "--address", head.dashboard, "--working-dir", "."]
            command += ["--", sys.executable, "script.py"]
            command += [spec.model_dump_json(by_alias=True), json.dumps(FAKE_FORKSERVER)]
            done = subprocess.run(
                command,
                cwd=checkout,
                env={**os.environ, **head.environment},
                capture_output=True,
                text=True,
                timeout=240,
            )
            assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
            assert '"completed"' in done.stdout
            assert events_of(spec)[-1]["state"] == "completed"
            assert groups(spec) == [] and litter(spec) == []
        assert users_of(path) == []
    finally:
        shutil.rmtree(path, ignore_errors=True)
