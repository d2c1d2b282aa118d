"""Baselines of a study: validation, rows, comparison, and what the sampler does not see."""

from __future__ import annotations

import re
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import pytest
from pydantic import ValidationError

from rayhive.api import load
from rayhive.baselines.collectives import Traffic, ring_bytes
from rayhive.baselines.ddp import backend
from rayhive.baselines.single import best_peer
from rayhive.errors import ConfigError
from rayhive.invariants import check_all
from rayhive.report.advice import advice_lines
from rayhive.report.baselines import baseline_lines
from rayhive.report.recommendation import recommendations
from rayhive.report.results import load_results
from rayhive.spec import Configuration, SwarmConfig
from rayhive.spec.replicate import ReplicateSpec
from rayhive.sweep.replay import recorded_spec
from rayhive.sweep.resolve import WorkloadFacts, resolve
from rayhive.sweep.signals import Interruption
from rayhive.sweep.sweep import run_sweep
from rayhive.sweep.target import target_at
from rayhive.timeline import Timeline
from tests.fixtures.logs import PAYLOAD, STATE, Log, make_spec, records, write_run
from tests.unit.sweep_fakes import SHAPES, TINY, Recorder, World


def baseline_log(name: str, seed: int, **fields: Any) -> Log:
    spec = make_spec(trial=None, baseline=name, replicate=seed)
    return Log(spec, **fields)


def swarm_log(seed: int, codec: str = "none", **fields: Any) -> Log:
    trial = ("none", "float16").index(codec)
    spec = make_spec(trial=trial, configuration=Configuration(codec=codec), replicate=seed)
    return Log(spec, **fields)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Three seeds each of two configurations, of DDP, whose third seed failed, and of single."""
    logs = []
    for seed in range(3):
        drift = 0.3 * seed
        logs.append(swarm_log(seed, seconds=(2.0 + drift, 0.5, 0.6, 0.7)))
        logs.append(swarm_log(seed, "float16", payload=2000, seconds=(2.1 + drift, 0.5, 0.6, 0.7)))
        logs.append(baseline_log("single", seed, seconds=(1.0 + drift / 2, 0.2, 0.3, 0.2)))
        ended = "completed" if seed < 2 else "failed"
        logs.append(baseline_log("ddp", seed, seconds=(1.5 + drift, 0.5, 0.5, 0.5), state=ended))
    return write_run(tmp_path / "run", logs)


# -- the study ---------------------------------------------------------------------------------


def problems(**fields: Any) -> list[str]:
    with pytest.raises(ConfigError) as error:
        resolve({**TINY, **fields}, workload=WorkloadFacts(SHAPES, 32, "real"))
    return [str(problem) for problem in error.value.problems]


def test_an_unknown_baseline_is_refused_with_the_nearest_name() -> None:
    (text,) = problems(baselines=["dpp-fp16"])
    assert "baselines" in text and "'dpp-fp16'" in text and "did you mean 'ddp-fp16'?" in text


def test_a_baseline_is_listed_once() -> None:
    (text,) = problems(baselines=["ddp", "single", "ddp"])
    assert "listed once" in text


def test_faults_inside_a_peers_training_are_refused_with_baselines() -> None:
    (text,) = problems(baselines=["ddp"], scenarios=["byzantine-signflip"], swarm={"peers": 4})
    assert "sign_flip" in text and "byzantine-signflip" in text


@pytest.mark.parametrize(
    ("fields", "key", "refused"),
    [
        ({"space": {"local_steps": [None, 4]}}, "space.local_steps", None),
        ({"space": {"local_steps": [None, 8]}}, "space.local_steps", 8),
        ({"space": {"local_steps": [8], "fragments": [2]}}, "space.local_steps", None),
        ({"baselines": ["local-sgd"], "local_sgd": {"local_steps": 8}}, "local_sgd", 8),
    ],
)
def test_a_fault_that_would_come_with_the_last_round_of_local_steps_is_refused(
    fields: dict[str, Any], key: str, refused: int | None
) -> None:
    study = {
        "scenarios": ["kill-one"],
        "scenario_args": {"kill-one": {"round": 9}},
        "swarm": {"peers": 4, "target_batch_size": 64},
        "budget": {"samples_per_replicate": 64 * 16},
        **fields,
    }
    if refused is None:
        resolve({**TINY, **study}, workload=WorkloadFacts(SHAPES, 32, "real"))
        return
    (text,) = problems(**study)
    assert key in text and str(refused) in text and "kill at round 2" in text


def test_a_replicate_is_of_a_trial_or_of_a_baseline() -> None:
    for fields in ({"trial": None}, {"trial": 0, "baseline": "ddp"}):
        with pytest.raises(ValidationError, match="either of a trial or of a baseline"):
            make_spec(**fields)


def test_runs_of_baselines_have_names_of_their_own() -> None:
    names = {
        make_spec(**fields).run_id
        for fields in (
            {"trial": 0},
            {"trial": None, "baseline": "ddp"},
            {"trial": None, "baseline": "ddp-fp16"},
        )
    }
    assert len(names) == 3


# -- the sweep ---------------------------------------------------------------------------------


def sweep(folder: Path, world: World, **fields: Any) -> Recorder:
    study = {**TINY, "storage": f"journal:{folder}.log", "baselines": ["single", "ddp"], **fields}
    progress = Recorder()
    with Interruption() as interruption:
        run_sweep(
            resolve(study, workload=WorkloadFacts(SHAPES, 32, "real")),
            folder,
            progress,
            interruption,
            target_at(connect=world.connect),
        )
    return progress


def test_baselines_run_beside_the_trials_and_are_no_trials(run_dir: Path) -> None:
    world = World()
    progress = sweep(run_dir, world, replicates=2)
    told = {number for number, *_ in progress.of("trial")}
    assert len(told) == 2
    places = (*told, "single", "ddp")
    assert set(world.starts) == {f"{place}/{r}/none" for place in places for r in (0, 1)}
    specs = [
        ReplicateSpec.model_validate_json(path.read_text())
        for path in run_dir.glob("trials/*/*/spec.json")
    ]
    seeds = {spec.place: {s.seed for s in specs if s.place == spec.place} for spec in specs}
    assert seeds["ddp"] == seeds["single"] == seeds[str(min(told))] and len(seeds["ddp"]) == 2


def test_failed_baselines_are_rows_and_no_error_of_the_sweep(run_dir: Path) -> None:
    def log(spec: ReplicateSpec) -> Log:
        return Log(spec, state="completed" if spec.baseline is None else "failed")

    world = World(log=log)
    sweep(run_dir, world, replicates=3)
    rows = {row["configuration"]: row for row in load_results(run_dir).folded}
    assert (rows["ddp (baseline)"]["n"], rows["ddp (baseline)"]["n_failed"]) == (0, 3)
    assert rows["none"]["n"] == 3


def test_a_baseline_can_be_added_to_a_finished_run(run_dir: Path) -> None:
    world = World()
    sweep(run_dir, world, baselines=["single"])
    sweep(run_dir, world, baselines=["single", "ddp"])
    assert set(world.starts.values()) == {1}
    assert "ddp/0/none" in world.starts


# -- rows --------------------------------------------------------------------------------------


def test_rows_of_baselines_come_last_and_have_no_axes(run: Path) -> None:
    rows = load_results(run).folded
    labels = [row["configuration"] for row in rows]
    assert labels == ["none", "float16", "ddp (baseline)", "single (baseline)"]
    assert [row["baseline"] for row in rows] == [None, None, "ddp", "single"]
    assert all(row["codec"] is None and row["delay"] is None for row in rows[2:])
    assert [row["samples_per_s"] is not None for row in rows] == [True] * 4


def test_only_configurations_are_on_the_front_and_recommended(run: Path) -> None:
    results = load_results(run)
    assert [row["pareto"] for row in results.folded] == [True, True, None, None]
    (advice,) = recommendations(results)
    assert {row.row["configuration"] for row in advice.candidates} == {"none", "float16"}
    assert not advice.left_out


def test_sentences_compare_the_chosen_row_with_each_baseline(run: Path) -> None:
    results = load_results(run)
    row = results.folded[0]
    ddp, single = baseline_lines(results, row)
    # two peers send gradients and parameters in each of four rounds of 128 samples
    sent = f"{(PAYLOAD + STATE) / 64:.2f}"
    assert f"payload_bytes_per_sample {sent} instead of {sent} B (+0, may be equal);" in ddp
    assert ddp.endswith("1 of its 3 replicates failed: rounds.")
    # peer 1 ends its fourth round after 4.1, 4.4, 4.7 s, with single after 2.0, 2.15, 2.3 s
    factor = geometric_mean((4.1 + 0.3 * n) / (2.0 + 0.15 * n) for n in range(3))
    assert f" s (× {factor:.2f} [" in single
    assert [line for line in advice_lines(results, results.folded) if line.startswith("Against")]


def test_a_baseline_that_faults_end_is_compared_without_them(tmp_path: Path) -> None:
    logs = []
    for scenario, factor, state in (("none", 1.0, "completed"), ("story", 1.1, "failed")):
        for seed in range(2):
            fields = {"replicate": seed, "scenario": scenario}
            seconds = tuple(factor * s for s in (2.0, 0.5, 0.6, 0.7))
            logs.append(Log(make_spec(**fields), seconds=seconds))
            ddp = make_spec(trial=None, baseline="ddp", **fields)
            logs.append(Log(ddp, seconds=(3.0, 0.5, 0.6, 0.7), state=state))
    results = load_results(write_run(tmp_path / "run", logs))
    faulted = next(row for row in results.folded if row["scenario"] == "story")
    (line,) = baseline_lines(results, faulted)
    assert line.startswith("Against ddp (baseline): none of its 2 replicates finished: rounds; ")
    # the second evaluation, after 3 + 0.5 + 0.6 s and the time of the last round
    twin = next(r for r in results.folded if r["baseline"] and r["scenario"] == "none")
    here, there = (f"{row['time_to_target_s']:.3f}" for row in (faulted, twin))
    assert f"time_to_target_s {there} (here {here} s with faults)" in line
    assert "without faults it has" in line
    without = next(row for row in results.folded if row["scenario"] == "none")
    assert "with faults" not in " ".join(baseline_lines(results, without))


def test_what_a_baseline_does_not_count_is_empty_and_said_to_be(tmp_path: Path) -> None:
    uncounted = {(n, peer): {"sent_bytes": None} for n in range(1, 5) for peer in range(2)}
    logs = [
        log
        for seed in range(2)
        for log in (swarm_log(seed), baseline_log("hivemind", seed, rounds=uncounted))
    ]
    results = load_results(write_run(tmp_path / "run", logs))
    swarm, hivemind = results.folded
    for name in ("payload_bytes_per_sample", "payload_bytes_per_round", "state_bytes_per_round"):
        assert swarm[name] is not None and hivemind[name] is None
    (line,) = baseline_lines(results, swarm)
    assert line.endswith("it has no payload_bytes_per_sample.")


def test_paired_differences_to_a_baseline_by_its_name(run: Path) -> None:
    found = load(run).differences(versus="single")
    assert set(found["configuration"]) == {"none", "float16", "ddp (baseline)"}
    assert set(found["pairs"]) == {2, 3}


def test_a_replicate_of_a_baseline_is_found_by_name(run: Path) -> None:
    spec = recorded_spec(run, "ddp", 1)
    assert (spec.baseline, spec.trial, spec.replicate) == ("ddp", None, 1)
    with pytest.raises(ConfigError, match="trial or baseline"):
        recorded_spec(run, "elastik", 0)


def test_invariants_of_swarms_are_not_asked_of_baselines() -> None:
    log = baseline_log("ddp", 0)
    names = {found.name for found in check_all(log.spec, records(log.events()))}
    assert "samples_conserved" in names
    assert not names & {"one_component", "replicas_agree", "survivors_progress"}


# -- measurements ------------------------------------------------------------------------------


@pytest.mark.parametrize(("members", "sent"), [(1, 0), (2, 1000), (3, 1333), (4, 1500)])
def test_a_ring_sends_all_but_a_share_twice(members: int, sent: int) -> None:
    assert ring_bytes(1000, members) == sent


def test_times_of_a_round_are_those_between_its_buckets() -> None:
    now = iter((0.0, 1.0, 1.5, 4.0, 4.5))
    traffic = Traffic(clock=lambda: next(now))
    traffic.bucket_ready()  # 1.0
    traffic.bucket_ready()  # 1.5
    traffic.backward_ended()  # 4.0
    fields = traffic.round_fields(members=2)
    assert fields == {
        "sent_bytes": 0,
        "received_bytes": 0,
        "accumulating_s": 1.5,
        "waited_s": 2.5,
        "averaging_s": 3.0,
    }


def test_the_best_node_has_most_gpus_then_most_cores() -> None:
    def best(**classes: dict[str, Any]) -> int:
        count = sum(each["count"] for each in classes.values())
        swarm = SwarmConfig.model_validate({"peers": count, "node_classes": classes})
        return best_peer(make_spec(swarm=swarm).peer_spec(0))

    slow, fast = {"count": 2, "cpu_share": 0.5}, {"count": 2, "cpu_share": 4.0}
    assert best(slow=slow, fast=fast) == 2
    assert best(fast=fast, slow=slow) == 0
    assert best(fast=fast, gpu={"count": 1, "gpus": 1.0}) == 2


def test_peers_that_wait_beside_a_baseline_are_not_productive() -> None:
    log = baseline_log("single", 0)
    kept = [
        event
        for event in records(log.events())
        if event.peer != "peer-1" or event.kind in ("peer_ready", "training_started")
    ]
    end = next(e for e in records(log.events()) if e.kind == "peer_finished" and e.peer == "peer-1")
    idle = end.model_copy(update={"samples": 0, "pending": 0, "clock_s": None})
    timeline = Timeline(log.spec, [*kept, idle])
    from rayhive.metrics.rows import timeline_row

    row = timeline_row(timeline)
    assert row["productive_s"] is not None and row["badput_stalled_s"] is not None
    assert row["badput_stalled_s"] > 0
    assert row["productive_s"] < row["peer_seconds"] / 2 + 0.01  # type: ignore[operator]


def test_a_baseline_that_never_finished_has_no_differences(tmp_path: Path) -> None:
    logs = [
        log
        for seed in range(2)
        for log in (swarm_log(seed), baseline_log("ddp", seed, state="failed"))
    ]
    run = load(write_run(tmp_path / "run", logs))
    found = run.differences(versus="ddp")
    assert list(found["pairs"]) == [0, 0] and found["value"].isna().all()
    assert "× 1" not in run.table(versus="ddp")
    (line,) = baseline_lines(run.results, run.results.folded[0])
    assert line == "Against ddp (baseline): none of its 2 replicates finished: rounds."


# -- devices -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("accelerator", "swarm", "chosen"),
    [
        ("cuda", {"gpus_per_peer": 1}, "nccl"),
        ("cpu", {"gpus_per_peer": 1}, "gloo"),  # a node without GPUs
        ("cuda", {"gpus_per_peer": 0}, "gloo"),
        ("cuda", {"gpus_per_peer": 0.5}, "gloo"),  # two ranks of one GPU: nccl refuses them
        ("cuda", {"node_classes": {"a": {"count": 1, "gpus": 1}, "b": {"count": 1}}}, "gloo"),
        ("cuda", {"node_classes": {"a": {"count": 2, "gpus": 1}}}, "nccl"),
    ],
)
def test_nccl_is_chosen_if_every_peer_has_a_gpu(
    accelerator: str, swarm: dict[str, Any], chosen: str
) -> None:
    given = SwarmConfig.model_validate({"peers": 2, **swarm})
    for name in ("ddp", "elastic"):
        spec = make_spec(trial=None, baseline=name, swarm=given).peer_spec(0)
        assert backend(spec.model_copy(update={"accelerator": accelerator})) == chosen


def test_a_bound_of_a_baseline_is_said_to_be_one(tmp_path: Path) -> None:
    logs = [swarm_log(seed) for seed in range(2)]
    logs += [baseline_log("ddp", 0), baseline_log("ddp", 1, accuracies=(0.5, 0.6))]
    results = load_results(write_run(tmp_path / "run", logs))
    (line,) = baseline_lines(results, results.folded[0])
    assert re.search(r"time_to_target_s \d\S* instead of ≥ \d\S* s \(× .*\(cut\)", line)
