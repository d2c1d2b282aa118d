"""Real preemption notices on a Ray cluster: of a cloud's metadata service, and of Ray's drain."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
import yaml

from rayhive.cluster.node.notices.base import METADATA_VARIABLE
from rayhive.events import Left, NodeNoticed, Notice, PeerFinished, PeerSpawned, Round, of_kind
from rayhive.metrics.rows import replicate_row
from rayhive.spec.replicate import ReplicateSpec
from tests.fixtures.metadata_service import INTERRUPTION, metadata_service
from tests.integration.cluster_harness import (
    FAKE_FORKSERVER,
    ROOT,
    driver,
    events_of,
    eventually,
    ray_head,
    ray_node,
    replicate,
    training,
)

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

RUN = """
import json, sys
from dataclasses import asdict
from rayhive.cluster.cluster import Cluster
from rayhive.cluster.node import raylets
from rayhive.spec.replicate import ReplicateSpec
address, forkserver = sys.argv[1], json.loads(sys.argv[2])
with Cluster.connect(address, forkserver_command=forkserver) as cluster:
    for text in sys.argv[3:]:
        handle = cluster.start(ReplicateSpec.model_validate_json(text))
        print("started", flush=True)
        print("outcome", json.dumps(asdict(handle.wait(240))), flush=True)
        handle.release()
        print("draining", json.dumps(list(raylets.draining())), flush=True)
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="rht-", dir="/tmp"))
    yield path
    shutil.rmtree(path)


def test_the_notice_of_a_cloud_reaches_the_peer_on_that_node_and_the_other_goes_on(
    folder: Path, tmp_path: Path
) -> None:
    """Then the node is used no more: the next replicate finds room on the other one."""
    sources = {"sources": ["aws"], "then": "continue"}
    budget = {"seconds_per_replicate": 15, "samples_per_replicate": None}
    endless = {"rounds": None, "budget": budget}
    first = replicate(tmp_path / "first", preemption=sources, **endless)
    second = replicate(tmp_path / "second", preemption=sources, rounds=3)
    with metadata_service("aws") as steady, metadata_service("aws") as spot:
        head_options = {METADATA_VARIABLE: steady.url}
        with (
            ray_head(folder, options=["--num-cpus=2"], **head_options) as head,
            ray_node(head, folder, ["--num-cpus=2"], **{METADATA_VARIABLE: spot.url}),
        ):
            specs = [spec.model_dump_json(by_alias=True) for spec in (first, second)]
            forkserver = json.dumps(FAKE_FORKSERVER)
            with driver(RUN, head.address, forkserver, *specs, **head.environment) as run:
                eventually(lambda: training(first), 120.0)
                when = datetime.now(timezone.utc) + timedelta(seconds=120)
                spot.set(INTERRUPTION, _action(when))
                assert json.loads(run.line("outcome")) == {
                    "state": "completed",
                    "stop_reason": "seconds",
                }
                draining = json.loads(run.line("draining"))
                assert json.loads(run.line("outcome"))["state"] == "completed"
    seen = events_of(first)
    (noticed,) = of_kind(seen, NodeNoticed)
    nodes = {event.peer: event.node for event in of_kind(seen, PeerSpawned)}
    (gone,) = (name for name, node in nodes.items() if node == noticed.node)
    assert draining == [noticed.node] and noticed.drained
    assert (noticed.source, noticed.certain, noticed.lives) == ("aws", True, [gone])
    (notice,) = of_kind(seen, Notice)
    assert (notice.peer, notice.source, notice.fault) == (gone, "aws", None)
    assert notice.deadline_s == noticed.deadline_s
    reasons = {event.peer: event.reason for event in of_kind(seen, PeerFinished)}
    assert reasons.pop(gone) == "notice" and list(reasons.values()) == ["stop"]
    assert replicate_row(first.folder)["preemptions"] == 1
    places = {event.node for event in of_kind(events_of(second), PeerSpawned)}
    assert places == set(nodes.values()) - {noticed.node}


def _action(when: datetime) -> str:
    return json.dumps({"action": "terminate", "time": when.strftime("%Y-%m-%dT%H:%M:%SZ")})


def test_real_peers_hand_over_when_ray_drains_their_node(folder: Path, tmp_path: Path) -> None:
    """The replicate counts as the study asks: it continues, and no sample is lost."""
    spec = _digits(tmp_path, then="continue")
    seen = _drained(folder, spec, lambda outcome: outcome["state"] == "completed")
    (noticed,) = of_kind(seen, NodeNoticed)
    (gone,) = noticed.lives
    assert (noticed.source, noticed.drained) == ("ray", True)
    (left,) = of_kind(seen, Left)
    assert left.peer == gone and left.lost == 0
    after = [event for event in of_kind(seen, Round) if event.t > left.t and event.peer != gone]
    assert {event.outcome for event in after[-4:]} == {"averaged"}
    assert after[-1].group_size == 2
    row = replicate_row(spec.folder)
    assert (row["preemptions"], row["invariants_violated"]) == (1, 0)


def test_by_default_the_replicate_is_given_up_to_be_repeated(folder: Path, tmp_path: Path) -> None:
    spec = _digits(tmp_path)
    seen = _drained(folder, spec, lambda outcome: outcome["state"] == "lost")
    (noticed,) = of_kind(seen, NodeNoticed)
    assert str(seen[-1]["stop_reason"]).endswith("is taken away: ray, node drain")
    assert noticed.node[:8] in str(seen[-1]["stop_reason"])


def _digits(folder: Path, **preemption: Any) -> ReplicateSpec:
    """Return three real peers on two nodes."""
    spec = replicate(folder, swarm={"peers": 3, "target_batch_size": 96, "batch_size": 16})
    return ReplicateSpec.model_validate(
        {
            **spec.model_dump(by_alias=True),
            "workload": {"name": "digits"},
            "preemption": preemption,
            "budget": {"seconds_per_replicate": 25},
        }
    )


def _drain_command() -> list[str]:
    """Return the command by which a pod of KubeRay drains its node, without the wait after it."""
    manifest = (ROOT / "experiments" / "cluster" / "raycluster.yaml").read_text(encoding="utf-8")
    (group,) = next(yaml.safe_load_all(manifest))["spec"]["workerGroupSpecs"]
    hook = group["template"]["spec"]["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
    program, *options = shlex.split(hook[-1].partition(";")[0])
    assert program == "ray"
    return [sys.executable, "-c", "from ray.scripts.scripts import main; main()", *options]


def _drained(folder: Path, spec: ReplicateSpec, ok: Callable[[dict[str, str]], bool]) -> list[Any]:
    """Run a replicate, drain the node that is not the head, and return the events."""
    with (
        ray_head(folder, options=["--num-cpus=2"]) as head,
        ray_node(head, folder, ["--num-cpus=1"]),
    ):
        given = spec.model_dump_json(by_alias=True)
        with driver(RUN, head.address, "null", given, **head.environment) as run:
            eventually(lambda: training(spec), 200.0)
            nodes = [event.node for event in of_kind(events_of(spec), PeerSpawned)]
            (alone,) = (node for node in nodes if nodes.count(node) == 1)
            command = [*_drain_command(), f"--address={head.address}", f"--node-id={alone}"]
            done = subprocess.run(command, env={**os.environ, **head.environment})
            assert done.returncode == 0
            outcome = json.loads(run.line("outcome"))
            assert ok(outcome), outcome
    return events_of(spec)
