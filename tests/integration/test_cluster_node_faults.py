"""Faults of the nodes of a real cluster: a fault without a heal ends with the replicate."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from rayhive.cluster.cluster import Cluster
from rayhive.cluster.node import capabilities, cgroups
from rayhive.cluster.node.runs import tag
from rayhive.spec.fault_plan import FaultPlan
from rayhive.spec.replicate import ReplicateSpec
from tests.integration.cluster_harness import FAKE_FORKSERVER, events_of, replicate

pytestmark = [pytest.mark.cluster]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster.connect("local", forkserver_command=FAKE_FORKSERVER) as cluster:
        yield cluster


@pytest.mark.slow
def test_a_straggler_and_held_memory_end_with_the_replicate(
    cluster: Cluster, tmp_path: Path
) -> None:
    reasons = [capabilities.here()[need] for need in ("cpu_quota", "memory")]
    if any(reasons):
        pytest.skip(str(reasons))
    faults: list[dict[str, Any]] = [
        # a pretended peer that does a round each millisecond needs more than this
        {"kind": "straggler", "who": ["peer-1"], "args": {"cores": 0.02}},
        {"kind": "memory_pressure", "who": ["peer-0"], "args": {"megabytes": 32}},
    ]
    numbered = [{"id": f"f{n}", "at": {"round": 5}, **fault} for n, fault in enumerate(faults)]
    plan = FaultPlan.model_validate({"scenario": "test", "peers": 2, "faults": numbered})
    budget = {"seconds_per_replicate": 6.0, "samples_per_replicate": None}
    spec = replicate(tmp_path, budget=budget, rounds=None, peers={"1": {"round_s": 0.001}})
    spec = ReplicateSpec.model_validate({**spec.model_dump(by_alias=True), "plan": plan})
    handle = cluster.start(spec)
    outcome = handle.wait(60.0)
    handle.release()

    events = events_of(spec)
    assert outcome is not None and outcome.state == "completed", outcome
    verified = {e["fault"]: e for e in events if e["kind"] == "fault_verified"}
    assert verified["f0"]["ok"], verified["f0"]
    assert verified["f0"]["proof"]["peer-1"]["throttled"] > 0
    assert verified["f1"]["ok"], verified["f1"]
    assert verified["f1"]["proof"]["rss"]["node-0"] >= 0.95 * 32e6
    fired = {e["fault"]: e["done"] for e in events if e["kind"] == "fault_fired"}
    spawned = {e["peer"]: e["pid"] for e in events if e["kind"] == "peer_spawned"}
    assert spawned["peer-1"] in fired["f0"]["pids"]["peer-1"]
    assert spawned["peer-0"] not in fired["f0"]["pids"]["peer-1"]

    assert not psutil.pid_exists(fired["f1"]["held"]["node-0"]["pid"])
    assert not [group for group in cgroups.made_here() if f"-{tag(spec.run_id)}-" in group.name]
