"""Scenarios with ``available_only``: the target decides which kinds of faults are left out."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from rayhive.api import plan as predict
from rayhive.cluster.node import capabilities
from rayhive.errors import ConfigError, Problem
from rayhive.faults.target import CAPABILITIES
from rayhive.spec import SwarmConfig
from rayhive.spec.replicate import ReplicateSpec
from rayhive.sweep.resolve import resolve
from rayhive.sweep.signals import Interruption
from rayhive.sweep.sweep import run_sweep
from rayhive.sweep.target import target_at
from tests.unit.sweep_fakes import FakeCluster, Recorder, World

pytestmark = pytest.mark.usefixtures("fakes")
MIX: dict[str, Any] = {
    "kill": {"heal_after_s": 1},
    "straggler": {"heal_after_s": 1, "args": {"cores": 0.5}},
    "nan_gradient": {},
}
ALL = frozenset(MIX)


def study(folder: Path, available_only: bool = True) -> dict[str, Any]:
    """Return a study with a mix of which one kind needs a quota of CPU time."""
    path = folder / "mix.yaml"
    mix = {"faults": 30, "kinds": MIX, "available_only": "$available_only"}
    content = {"about": "A mix.", "args": {"available_only": False}, "plan": {"chaos": mix}}
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    return {
        "name": "mixed",
        "workload": {"name": "digits"},
        "swarm": {"peers": 5, "target_batch_size": 160},
        "scenarios": [str(path)],
        "replicates": 1,
        "scenario_args": {"mix": {"available_only": available_only}},
        "budget": {"trials": 1, "seconds_per_replicate": 900},
    }


def without_quota() -> dict[str, str | None]:
    return {**dict.fromkeys(CAPABILITIES), "cpu_quota": "no control groups"}


def run(
    given: Mapping[str, Any], folder: Path, address: str | None, available: Mapping[str, str | None]
) -> set[str]:
    """Run a study on a cluster with these capabilities; return the kinds of its faults."""
    world = World()

    class Cluster(FakeCluster):
        def check_kinds(
            self, needs: Mapping[str, Collection[str]], swarm: SwarmConfig
        ) -> list[Problem]:
            return capabilities.missing(needs, available)

    @contextmanager
    def connect(where: str | None) -> Iterator[FakeCluster]:
        assert where == address
        yield Cluster(world)

    with Interruption() as interruption:
        run_sweep(resolve(given), folder, Recorder(), interruption, target_at(address, connect))
    (path,) = folder.glob("trials/0/*-mix/spec.json")
    plan = ReplicateSpec.model_validate_json(path.read_text()).plan
    assert plan is not None
    return {fault.kind for fault in plan.faults}


@pytest.fixture(autouse=True)
def no_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


def test_a_cluster_commits_faults_that_the_drivers_machine_cannot(
    tmp_path: Path, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capabilities, "here", without_quota)
    everything: dict[str, str | None] = dict.fromkeys(CAPABILITIES)
    assert run(study(tmp_path), run_dir, "10.0.0.1:6379", everything) == ALL


def test_kinds_that_a_cluster_lacks_are_left_out_although_the_driver_has_them(
    tmp_path: Path, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capabilities, "here", lambda: dict.fromkeys(CAPABILITIES))
    kinds = run(study(tmp_path), run_dir, "10.0.0.1:6379", without_quota())
    assert kinds == ALL - {"straggler"}


def test_this_machine_leaves_out_the_kinds_that_it_lacks(
    tmp_path: Path, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capabilities, "here", without_quota)
    given = study(tmp_path)
    (scenario,) = predict(given).scenarios
    kinds = {fault.kind for plan in scenario.plans if plan is not None for fault in plan.faults}
    assert kinds == ALL - {"straggler"} and not predict(given).unmet
    assert run(given, run_dir, None, without_quota()) == kinds


def test_without_the_option_the_kinds_are_needed(
    tmp_path: Path, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capabilities, "here", without_quota)
    given = study(tmp_path, available_only=False)
    assert [problem.value for problem in predict(given).unmet] == ["straggler"]
    with pytest.raises(ConfigError, match="no control groups"):
        run(given, run_dir, "10.0.0.1:6379", without_quota())
