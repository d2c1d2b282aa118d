"""Pruning: replicates that are skipped or stopped, their record, and what tables make of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayhive.cli.plan_text import study_plan_lines
from rayhive.cluster.replicate.early_stop import EarlyStopWatch
from rayhive.cluster.replicate.peer_table import Outcome
from rayhive.errors import ConfigError
from rayhive.events import Event, Pruned, ReplicateFinished, of_kind, read_events
from rayhive.metrics.pruning import Curve, early_stop, verdict
from rayhive.report.render import results_text
from rayhive.report.results import load_results
from rayhive.spec.pruning import Pruner
from rayhive.spec.replicate import ReplicateSpec
from rayhive.sweep.dry_run import make_plan
from rayhive.sweep.resolve import resolve
from rayhive.sweep.signals import Interruption
from rayhive.sweep.sweep import run_sweep
from rayhive.sweep.target import target_at
from rayhive.timeline import Timeline
from tests.fixtures.logs import Log, make_spec, records, write_run
from tests.unit.sweep_fakes import Killed, Recorder, World

pytestmark = pytest.mark.usefixtures("fakes")

STUDY: dict[str, Any] = {
    "name": "pruned",
    "workload": {"name": "digits"},
    "swarm": {"peers": 2, "target_batch_size": 128},
    "space": {"codec": ["none", "float16", "uniform8", "quantile8"]},
    "replicates": 3,
    "objectives": {"time_to_target_s": "minimize"},
    "budget": {"trials": 4, "seconds_per_replicate": 60},
    "pruner": "front",
}
MISSED = (0.5, 0.6)


def run(
    folder: Path, log: Any, *, world: World | None = None, parallel: int = 1, **fields: Any
) -> Recorder:
    study = resolve({**STUDY, "storage": f"journal:{folder}.log", **fields})
    progress = Recorder()
    world = world or World(log=log)
    target = target_at(connect=world.connect)
    with Interruption() as interruption:
        run_sweep(study, folder, progress, interruption, target, parallel=parallel)
    return progress


def uniform_misses(spec: ReplicateSpec) -> Log:
    missed = spec.configuration.codec == "uniform8"
    return Log(spec, accuracies=MISSED if missed else (0.8, 0.96))


# -- rows that cannot be on the front ------------------------------------------------------------


def test_replicates_of_a_row_off_the_front_are_not_run(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    progress = run(folder, uniform_misses)
    assert len(progress.of("started")) == 3 * 3 + 1
    states = [state for _, state, _ in progress.of("finished")]
    assert (states.count("completed"), states.count("skipped")) == (10, 2)
    row = next(row for row in load_results(folder).folded if row["codec"] == "uniform8")
    assert (row["n"], row["n_skipped"], row["n_failed"], row["reached"]) == (1, 2, 0, 0)
    assert row["pareto"] is False and row["time_to_target_s"] is None
    skipped = [row for row in load_results(folder).rows if row["state"] == "skipped"]
    assert {row["stop_reason"] for row in skipped} == {
        "not run: replicate 0 missed the target, so the row cannot be on the Pareto front"
    }
    text = " ".join(results_text(folder).split())
    assert "2 replicates not run by the pruner (n_skipped)" in text
    assert "missed (0/1)" in text


def test_a_resumed_sweep_decides_the_same(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    first = run(folder, uniform_misses)
    again = run(folder, uniform_misses)
    assert again.of("started") == []
    ended = {name: state for name, state, _ in first.of("finished")}
    assert {name: state for name, state, _ in again.of("finished")} == ended
    more = run(folder, uniform_misses, replicates=4)  # one more of each, but for that row
    assert len(more.of("started")) == 3


@pytest.mark.parametrize("parallel", [2, 3, 4])
def test_replicates_beside_a_hopeless_one_end_and_later_ones_are_skipped(
    parallel: int, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    missed, begun_after = [], []

    def log(spec: ReplicateSpec) -> Log:
        found = uniform_misses(spec)
        if spec.configuration.codec == "uniform8":
            begun_after.append(len(missed))
        return found

    class Ends(World):
        def look(self, run_id: str) -> Any:
            codec = self.live[run_id].spec.configuration.codec
            outcome = super().look(run_id)
            if outcome is not None and codec == "uniform8":
                missed.append(run_id)
            return outcome

    progress = run(folder, log, world=Ends(looks=3, log=log), parallel=parallel, replicates=6)
    assert 1 <= len(begun_after) <= parallel
    assert set(begun_after) == {0}  # none began after one had missed the target
    states = [state for _, state, _ in progress.of("finished")]
    assert states.count("completed") == 3 * 6 + len(begun_after)
    assert states.count("skipped") == 6 - len(begun_after)
    again = run(folder, uniform_misses, parallel=1, replicates=6)
    assert again.of("started") == []


def test_replicates_that_others_are_compared_with_are_run(tmp_path: Path) -> None:
    def log(spec: ReplicateSpec) -> Log:
        return Log(spec, accuracies=MISSED)

    scenarios = ["none", "kill-one"]
    swarm = {"peers": 3, "target_batch_size": 128}
    progress = run(tmp_path / "run", log, scenarios=scenarios, swarm=swarm)
    started = [name.split("/") for name, *_ in progress.of("started")]
    assert sum(scenario == "none" for *_, scenario in started) == 4 * 3
    assert sum(scenario == "kill-one" for *_, scenario in started) == 4


def test_without_a_pruner_everything_runs(tmp_path: Path) -> None:
    progress = run(tmp_path / "run", uniform_misses, pruner="none")
    assert len(progress.of("started")) == 12


# -- bounds ----------------------------------------------------------------------------------------


def test_a_replicate_begins_with_the_median_of_the_others(tmp_path: Path) -> None:
    levels = {"none": 0.5, "float16": 0.6, "uniform8": 0.7, "quantile8": 0.8}
    specs: list[ReplicateSpec] = []

    def log(spec: ReplicateSpec) -> Log:
        specs.append(spec)
        level = levels[spec.configuration.codec]
        return Log(spec, accuracies=(level, 0.91 + level / 100))

    run(tmp_path / "run", log, pruner={"name": "median", "least": 3, "margin": 0.2})
    assert [spec.early_stop is None for spec in specs[:3]] == [True] * 3
    last = specs[-1].early_stop
    assert last is not None and (last.metric, last.mode, last.margin) == ("accuracy", "max", 0.2)
    others = [levels[s.configuration.codec] for s in specs[:-1] if s.trial != specs[-1].trial]
    assert [(bar.samples, bar.replicates) for bar in last.bars] == [(256, 9), (512, 9)]
    assert last.bars[0].value == pytest.approx(median(others))


def test_a_lost_attempt_keeps_the_bounds_of_its_replicate(tmp_path: Path) -> None:
    """A sweep that was killed prunes as one that was not."""
    specs: list[ReplicateSpec] = []

    def log(spec: ReplicateSpec) -> Log:
        specs.append(spec)
        return Log(spec)

    world = World(log=log)

    def kill() -> None:
        if len(specs) == 12:  # the last one runs
            world.die()
            raise Killed

    world.tick = kill
    with pytest.raises(Killed):
        run(tmp_path / "run", log, world=world, pruner="median")
    world.tick = lambda: None
    run(tmp_path / "run", log, world=world, pruner="median")
    killed, again = specs[11:]
    assert (killed.run_id, again.attempt) != (again.run_id, killed.attempt)
    assert again.early_stop is not None
    assert again.early_stop == killed.early_stop


def curves(*levels: float, mode: Any = "min") -> list[Curve]:
    return [Curve("loss", mode, ((256, level), (512, level / 2))) for level in levels]


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.floats(0.1, 10), min_size=3, max_size=7),
    st.lists(st.floats(0.1, 10), min_size=2, max_size=2),
    st.floats(0, 1),
    st.sampled_from([10.0, 50.0, 75.0]),
)
def test_the_verdict_is_that_of_the_rule(
    levels: Sequence[float], losses: Sequence[float], margin: float, percent: float
) -> None:
    import numpy as np

    pruner = Pruner(name="percentile", percentile=percent, margin=margin, least=3, after=1)
    stop = early_stop(pruner, curves(*levels))
    assert stop is not None
    log = Log(losses=losses, accuracies=MISSED)
    seen = Timeline(log.spec, records(log.events()))
    found = verdict(seen, stop, ["peer-0", "peer-1"])
    best = min(losses) + 0.01  # peer 1 is 0.02 worse
    bar = float(np.percentile([level / 2 for level in levels], 100 - percent))
    assert (found is not None) == (best > bar * (1 + margin))
    if found is not None:
        assert (found.samples, found.round, found.replicates) == (512, 4, len(levels))
        assert (found.value, found.bar) == (pytest.approx(best), pytest.approx(bar))


def test_a_replicate_is_not_judged_before_its_time() -> None:
    stop = early_stop(Pruner(name="median", least=3, after=2), curves(0.1, 0.2, 0.3))
    assert stop is not None
    log = Log(losses=(5.0, 5.0), accuracies=MISSED)
    timeline = Timeline(log.spec, records(log.events()))
    assert verdict(timeline, stop, ["peer-0", "peer-1"]) is None  # two evaluations
    sooner = stop.model_copy(update={"after": 1})
    assert verdict(timeline, sooner, ["peer-0", "peer-1"]) is not None
    assert verdict(timeline, sooner, ["peer-0", "peer-7"]) is None  # not all have reported
    assert early_stop(Pruner(name="median", least=4), curves(0.1, 0.2, 0.3)) is None


# -- the supervisor --------------------------------------------------------------------------------


def test_a_supervisor_stops_a_hopeless_replicate_once() -> None:
    stop = early_stop(Pruner(name="median", least=3, after=0), curves(0.1, 0.2, 0.3))
    log = Log(make_spec(early_stop=stop), losses=(5.0, 4.0))
    reasons: list[str] = []
    watch = EarlyStopWatch(log.spec, lambda: ["peer-0", "peer-1"], reasons.append)
    heard = [watch.heard(event) for event in in_turn(log)]
    pruned = [event for event in heard if event is not None]
    assert len(pruned) == len(reasons) == 1
    assert reasons[0] == (
        "loss 5.01 at 256 samples is worse than the median 0.2 of 3 finished replicates, by more "
        "than 10 %"
    )
    assert watch.judged(Outcome("stopped", reasons[0])) == Outcome("pruned", reasons[0])
    assert watch.judged(Outcome("stopped", "by hand")) == Outcome("stopped", "by hand")
    assert watch.judged(Outcome("completed", "target")) == Outcome("completed", "target")


def test_a_replicate_without_bounds_is_never_stopped() -> None:
    log = Log(losses=(5.0, 4.0))
    watch = EarlyStopWatch(log.spec, lambda: ["peer-0", "peer-1"], pytest.fail)
    assert [watch.heard(event) for event in in_turn(log)] == [None] * len(in_turn(log))


def in_turn(log: Log) -> list[Event]:
    """Return the events of the peers in the order of time."""
    events = records(event for event in log.events() if event["peer"] is not None)
    return sorted(events, key=lambda event: event.t)


# -- tables ----------------------------------------------------------------------------------------

WHY = "loss 5.01 at 256 samples is worse than the median"


def pruned_log(**fields: Any) -> Log:
    """A replicate that was stopped although it might have reached the target."""
    return Log(make_spec(**fields), seconds=(2.0, 0.5), losses=(1.0,), state="pruned")


def test_a_pruned_replicate_is_censored(tmp_path: Path) -> None:
    other = {"codec": "float16"}
    logs = [
        *(Log(make_spec(replicate=n, trial=0)) for n in range(3)),
        *(Log(make_spec(replicate=n, trial=1, configuration=other)) for n in range(2)),
        pruned_log(replicate=2, trial=1, configuration=other),
    ]
    folder = write_run(tmp_path / "run", logs)
    results = load_results(folder)
    whole, cut = results.folded
    single = next(row for row in results.rows if row["state"] == "pruned")
    assert (single["reached"], single["time_to_target_s"]) == (None, None)
    assert (cut["n"], cut["n_pruned"], cut["n_failed"], cut["reached"]) == (2, 1, 0, 2)
    # geometric mean, with the 4.5 s after which it ended
    times = [row["time_to_target_s"] for row in results.rows if row["trial"] == 1]
    assert times[2] is None
    assert times[:2] == [4.1, 4.1] and single["trained_s"] == 4.5
    assert cut["time_to_target_s"] == pytest.approx((4.1 * 4.1 * 4.5) ** (1 / 3))
    assert cut["final_loss"] == whole["final_loss"]  # of the two that finished
    assert (whole["pareto"], cut["pareto"]) == (True, False)
    text = " ".join(results_text(folder).split())
    assert "≥" in text and "(2/3)" in text
    assert "the shortest replicate that missed it or was pruned." in text
    assert "1 replicate stopped early by the pruner (n_pruned)" in text
    wide = results_text(folder, wide=True)
    assert "(2/3)" in wide


def test_a_pruned_replicate_reaches_no_target(tmp_path: Path) -> None:
    log = Log(make_spec(), state="pruned")  # its last evaluation is at the target
    row = load_results(write_run(tmp_path / "run", [log])).rows[0]
    assert (row["reached"], row["time_to_target_s"], row["samples_to_target"]) == (None,) * 3


def test_the_sampler_is_told_of_the_pruned(tmp_path: Path) -> None:
    def log(spec: ReplicateSpec) -> Log:
        if spec.configuration.codec == "uniform8":
            return pruned_log(**{name: getattr(spec, name) for name in type(spec).model_fields})
        return Log(spec)

    progress = run(tmp_path / "run", log, replicates=1)
    values = {number: found for number, found, _ in progress.of("trial")}
    failed = [reason for _, _, reason in progress.of("trial")]
    assert failed == [None] * 4
    assert sorted(found[0] for found in values.values())[-1] == 2 * 60  # as for a missed target


# -- records ---------------------------------------------------------------------------------------


def test_a_skipped_replicate_is_on_disk(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run(folder, uniform_misses)
    logs = [read_events(path) for path in sorted(folder.glob("trials/*/*/events.jsonl"))]
    ends = [next(of_kind(events, ReplicateFinished)) for events in logs]
    assert sum(end.state == "skipped" for end in ends) == 2
    assert Pruned.model_fields["kind"].default == "pruned"


# -- the plan --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pruner", "texts"),
    [
        ("none", []),
        ("front", ["pruner front: skips further replicates of a row"]),
        ("median", ["pruner median: skips", "worse than the median of at least 4 others"]),
        (
            {"name": "percentile", "percentile": 25, "after": 1, "margin": 0.2},
            ["after 1 evaluation, ", "the bound that 25 % miss, of at least 4", "more than 20 %"],
        ),
    ],
)
@pytest.mark.parametrize("scenarios", [["none"], ["none", "kill-one"]])
def test_a_plan_says_what_the_pruner_may_leave_out(
    pruner: Any, texts: list[str], scenarios: list[str]
) -> None:
    swarm = {"peers": 3, "target_batch_size": 128}
    fields = {"pruner": pruner, "scenarios": scenarios, "swarm": swarm}
    out = " ".join("\n".join(study_plan_lines(make_plan(resolve({**STUDY, **fields})))).split())
    for text in texts:
        assert text in out
    assert ("pruner" in out) == bool(texts)
    always = "replicates without faults always run to their end"
    assert (always in out) == (bool(texts) and len(scenarios) > 1)


# -- bad input -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "texts"),
    [
        ({"pruner": "medain"}, ["pruner", "median"]),
        (
            {"pruner": "median", "objectives": {"payload_bytes_per_sample": "minimize"}},
            ["none or front with the objective payload_bytes_per_sample"],
        ),
        ({"pruner": {"name": "median", "percentile": 25}}, ["absent without pruner: percentile"]),
        ({"pruner": "percentile"}, ["pruner.percentile", "above 0 and below 100"]),
        ({"pruner": {"name": "median", "margin": -1}}, ["pruner.margin"]),
    ],
)
def test_a_wrong_pruner_is_refused(fields: dict[str, Any], texts: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        resolve({**STUDY, **fields})
    for text in texts:
        assert text in str(error.value)


def test_a_run_keeps_its_pruner(tmp_path: Path) -> None:
    run(tmp_path / "run", uniform_misses)
    with pytest.raises(ConfigError, match=r"pruner"):
        run(tmp_path / "run", uniform_misses, pruner="none")
