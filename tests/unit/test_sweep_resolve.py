from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from rayhive.cli.plan_text import study_plan_lines
from rayhive.cluster.node import capabilities
from rayhive.errors import ConfigError
from rayhive.faults.target import CAPABILITIES
from rayhive.spec import Configuration
from rayhive.sweep import resolve as resolve_module
from rayhive.sweep.dry_run import LISTED, make_plan
from rayhive.sweep.resolve import ResolvedStudy, WorkloadFacts, replicate_seed, resolve
from rayhive.sweep.run_folder import RunFolder
from rayhive.sweep.signals import Interruption
from rayhive.sweep.sweep import preflight, run_sweep
from rayhive.sweep.target import target_at
from rayhive.workloads.base import Workload
from rayhive.workloads.digits import Digits
from tests.unit.sweep_fakes import SHAPES, Recorder, World

BASE: dict[str, Any] = {
    "name": "study",
    "workload": {"name": "digits"},
    "swarm": {"peers": 2, "target_batch_size": 256},
}
EXPERIMENTS = Path(__file__).parents[2] / "experiments"
OLD_STUDIES = Path(__file__).parents[1] / "fixtures" / "old_studies"


def keys(error: pytest.ExceptionInfo[ConfigError]) -> list[str]:
    return [problem.key for problem in error.value.problems]


def test_a_resolved_study_has_the_facts_of_its_workload(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(yaml.safe_dump(BASE))
    study = resolve(file, ["workload.args.width=8", "replicates=1"])
    assert study.config.replicates == 1
    assert study.workload.batch_size == 32
    assert study.workload.data == "real"
    assert study.workload.shapes[0] == (8, 1, 3, 3)
    assert resolve(file, ["swarm.batch_size=16"]).workload.batch_size == 16


@pytest.mark.parametrize("file", sorted(OLD_STUDIES.glob("*.yaml")), ids=lambda file: file.stem)
@pytest.mark.filterwarnings("ignore:swarm.average_state_every is now:FutureWarning")
def test_a_study_of_an_earlier_version_is_resolved(file: Path) -> None:
    study = resolve(file, workload=WorkloadFacts(SHAPES, 32, "real"))
    written = yaml.safe_load(file.read_text())
    assert study.config.budget.model_dump(include=set(written["budget"])) == written["budget"]
    assert len(study.config.enqueue) == len(written["enqueue"])


def test_mistakes_in_the_workload_are_reported_with_all_others() -> None:
    wrong = {**BASE, "workload": {"name": "digits", "args": {"widht": 8, "target": 3}}}
    with pytest.raises(ConfigError) as caught:
        resolve({**wrong, "replicates": 0, "space": {"codec": "nonne"}})
    assert keys(caught) == [
        "replicates",
        "space.codec",
        "workload.args.target",
        "workload.args.widht",
    ]


def test_a_round_holds_at_least_one_batch_of_a_peer() -> None:
    small = {**BASE, "swarm": {"target_batch_size": 16}}
    with pytest.raises(ConfigError, match=r"default batch size \(32\)") as caught:
        resolve(small)
    assert keys(caught) == ["swarm.target_batch_size"]
    resolve({**small, "swarm": {"target_batch_size": 16, "batch_size": 16}})


@pytest.mark.parametrize(
    "args",
    [
        {"name": "digits"},
        {"name": "source_lm", "args": {"corpus_bytes": 100_000, "context": 4096}},
        {"name": "lstm_wikitext2", "args": {"train_samples": 20}},
        {"name": "resnet18_cifar10", "args": {"train_samples": 20}},
    ],
    ids=lambda args: args["name"],
)
def test_peers_without_a_sample_are_reported_with_all_others(args: dict[str, Any]) -> None:
    swarm = {"peers": 2000, "target_batch_size": 2**20}
    with pytest.raises(ConfigError, match="samples that the workload trains on") as caught:
        resolve({**BASE, "workload": args, "swarm": swarm, "replicates": 0})
    assert keys(caught) == ["replicates", "swarm.peers"]


def test_a_workload_without_a_size_has_no_bound_on_peers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Digits, "train_size", Workload.train_size)
    resolve({**BASE, "swarm": {"peers": 2000, "target_batch_size": 2**20}})


def test_enqueued_configurations_are_completed_with_defaults() -> None:
    enqueue = [{"codec": "size_adaptive"}, {"powersgd_rank": 2}, {"codec": "float16"}]
    study = resolve({**BASE, "enqueue": enqueue})
    assert study.config.enqueue == (
        Configuration(codec="size_adaptive", threshold=65537, error_feedback=False),
        Configuration(powersgd_rank=2, min_compression_ratio=0.5),
        Configuration(codec="float16", error_feedback=False),
    )
    assert all(item.completed() == item for item in study.config.enqueue)


def quickstart() -> ResolvedStudy:
    return resolve(EXPERIMENTS / "quickstart.yaml")


def test_the_robustness_study_has_its_twin_and_room_for_its_faults() -> None:
    study = resolve(EXPERIMENTS / "robustness.yaml")
    enqueue = study.config.enqueue
    assert len(enqueue) == study.config.budget.trials
    assert len({study.space.key(item) for item in enqueue}) == len(enqueue)
    assert study.config.scenarios[0] == "none" and len(study.config.scenarios) == 5


def test_the_quickstart_covers_every_axis() -> None:
    study = quickstart()
    enqueue = study.config.enqueue
    assert len({study.space.key(item) for item in enqueue}) == len(enqueue) >= 8
    assert {item.codec for item in enqueue} >= {"none", "float16", "uniform8", "size_adaptive"}
    assert {item.delay for item in enqueue} == {"none", "state", "optimizer", "gradients"}
    assert {item.powersgd_rank for item in enqueue} == {None, 1, 2, 4}
    assert len({item.threshold for item in enqueue} - {None}) == 2
    assert len({item.min_compression_ratio for item in enqueue} - {None}) >= 2
    assert study.config.swarm.peers == 2 and study.config.replicates == 2


def test_a_plan_counts_and_predicts() -> None:
    space = {"codec": ["none", "float16"], "delay": ["none", "state"]}
    budget = {"trials": 9, "seconds_per_replicate": 10, "samples_per_replicate": 1000}
    study = resolve({**BASE, "space": space, "budget": budget, "replicates": 2})
    plan = make_plan(study)
    assert (plan.space_size, plan.trials, plan.replicates) == (4, 4, 8)
    assert plan.rounds == 4
    assert plan.longest_s == 80
    dense, half = plan.configurations
    assert dense.bytes_per_round == plan.dense_bytes == 2 * half.bytes_per_round
    assert (dense.ratio, half.ratio) == (1, 2)
    assert not dense.enqueued and dense.exact


@pytest.mark.parametrize(
    ("space", "column", "values"),
    [
        ({"local_steps": [None, 4, 16]}, "local_steps", [None, 4, 16]),
        ({"local_steps": 16, "group_size": ["all", 2]}, "group_size", ["all", 2]),
    ],
)
def test_a_plan_lists_what_changes_the_bytes_of_a_sample(
    space: dict[str, Any], column: str, values: list[Any]
) -> None:
    swarm = {"peers": 4, "target_batch_size": 256}
    budget = {"samples_per_replicate": 256 * 64}
    plan = make_plan(resolve({**BASE, "swarm": swarm, "budget": budget, "space": space}))
    rows = plan.configurations
    assert [getattr(row.configuration, column) for row in rows] == values
    assert len({row.bytes_per_sample for row in rows}) == len(rows)
    text = "\n".join(study_plan_lines(plan))
    assert f"each at most {'4 to 64' if None in values else '4'} rounds" in text


def test_a_plan_of_a_wide_space_lists_its_corners() -> None:
    ranges = {
        "codec": ["none", "float16", "uniform8", "quantile8", "size_adaptive"],
        "threshold": {"low": 16, "high": 10**6},
        "powersgd_rank": [None, 1, 2, 4],
        "min_compression_ratio": {"low": 0.0, "high": 0.95},
    }
    plan = make_plan(resolve({**BASE, "space": ranges, "enqueue": [{"codec": "float16"}]}))
    assert plan.space_size is None and plan.trials == 24
    assert plan.configurations[0].enqueued
    assert not any(row.enqueued for row in plan.configurations[1:])
    assert len(plan.configurations) == LISTED and plan.left_out > 0
    labels = [row.configuration.label for row in plan.configurations]
    assert len(set(labels)) == len(labels)
    peers = {4: 1.5, 2: 1.0, 1: 0.0}
    for count, share in peers.items():
        swarm = {"peers": count, "target_batch_size": 256}
        found = make_plan(resolve({**BASE, "swarm": swarm})).configurations[0]
        assert found.bytes_per_round == share * plan.dense_bytes


def test_every_fault_plan_is_made_once(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[str, int]] = []
    plan_of = resolve_module.plan_of

    def counted(name: str, **given: Any) -> Any:
        made.append((name, given["seed"]))
        return plan_of(name, **given)

    monkeypatch.setattr(resolve_module, "plan_of", counted)
    given = {"scenarios": ["kill-one"], "swarm": {"peers": 3}, "replicates": 2}
    study = resolve({**BASE, **given, "budget": {"trials": 2, "seconds_per_replicate": 60}})
    seeds = [replicate_seed(0, number) for number in range(2)]
    assert made == [("kill-one", seed) for seed in seeds]
    assert make_plan(study).replicates == 4
    world = World()
    with Interruption() as interruption:
        run_sweep(study, run_dir, Recorder(), interruption, target_at(connect=world.connect))
    assert len(made) == 2 and world.starts
    assert [scenario.name for scenario in study.scenarios] == ["none", "kill-one"]
    assert all(plan is None for plan in study.scenarios[0].plans)


def test_a_resolved_study_has_its_demands() -> None:
    plain = resolve(BASE).demands
    assert not plain.needs and not plain.testbed and plain.joining == 0
    shaped = {"peers": 2, "node_classes": {"slow": {"count": 2, "cpu_share": 0.5}}}
    assert resolve({**BASE, "swarm": {**shaped, "target_batch_size": 256}}).demands.testbed
    joined = {"scenarios": ["late-join"], "budget": {"seconds_per_replicate": 90}}
    demands = resolve({**BASE, **joined, "swarm": {"peers": 3}}).demands
    assert demands.joining > 0 and "join" in demands.needs


@pytest.mark.parametrize("environment", [False, True])
def test_the_capabilities_of_this_machine_count_only_without_an_address(
    environment: bool, monkeypatch: pytest.MonkeyPatch, run_dir: Path
) -> None:
    lacking = dict.fromkeys(CAPABILITIES, "not on this machine")
    monkeypatch.setattr(capabilities, "here", lambda: lacking)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    study = resolve({**BASE, "scenarios": ["kill-one"], "swarm": {"peers": 3}})
    run = RunFolder(run_dir)
    with pytest.raises(ConfigError, match="not on this machine"):
        preflight(study, run, target_at())
    if environment:
        monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    address = None if environment else "10.0.0.1:6379"
    preflight(study, run, target_at(address))
    world = World()
    with Interruption() as interruption:
        run_sweep(study, run_dir, Recorder(), interruption, target_at(address, world.connect))
    assert world.starts
    with pytest.raises(ConfigError, match="not on this machine"):
        preflight(study, run, target_at("local"))
