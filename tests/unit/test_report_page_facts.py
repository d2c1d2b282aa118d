"""Basis of a report, in its own words: missing replicates, revisions, sums, shares, evaluation."""

from __future__ import annotations

from pathlib import Path

import pytest

from rayhive.metrics.rows import NO_FAULTS
from rayhive.report.page.curves import loss_charts
from rayhive.report.page.importance import importances
from rayhive.report.page.round_time import round_times
from rayhive.report.page.run_data import read_run
from rayhive.report.page.table import page_table
from rayhive.report.page.winner_map import winner_map
from rayhive.report.page.write import report_html
from rayhive.report.results import load_results
from rayhive.spec import Configuration
from rayhive.spec.fault_plan import FaultPlan
from tests.fixtures.faulted import kill_and_restart
from tests.fixtures.logs import START, Log, make_spec, timeline_of, write_run
from tests.fixtures.report_pages import CODECS, page_of, sweep, write_over_links


@pytest.mark.parametrize(
    ("wanted", "text"),
    [
        (2, ""),
        (3, "The study asks for 3 replicates of each row: it lacks 4 more, in 4 of 4 rows."),
    ],
)
def test_missing_replicates_are_told(tmp_path: Path, wanted: int, text: str) -> None:
    run = sweep(tmp_path / "run")
    study = run / "sweep.yaml"
    study.write_text(study.read_text() + f"replicates: {wanted}\n")
    page = report_html(run, load_results(run))
    assert text in page and ("The study asks" in page) == bool(text)


def test_several_revisions_are_counted(tmp_path: Path) -> None:
    specs = [make_spec(replicate=n, git_revision="old" if n else "new") for n in range(3)]
    words = page_of(write_run(tmp_path / "run", map(Log, specs))).words("provenance")
    assert "git revisions old (2 replicates), new (1 replicate)" in words


def test_sums_are_marked(tmp_path: Path) -> None:
    run = sweep(tmp_path / "run")
    table = page_table(read_run(run, load_results(run)))
    totals = {each.column.name for each in table.columns if each.total}
    assert "rounds_partial" in totals
    assert totals.isdisjoint({"final_loss", "samples_per_s", "reached_target"})
    words = page_of(run).words("table")
    assert "rounds_partial Σ" in words and "final_loss Σ" not in words


def test_axes_that_change_together_are_named(tmp_path: Path) -> None:
    logs = []
    for trial, codec in enumerate(("none", "float16", "uniform8", "none")):
        delay = "state" if codec == "none" else "none"
        steps = {"none": None, "float16": 4, "uniform8": 8}[codec]
        outer = {} if steps is None else {"outer_lr": 0.7, "outer_momentum": 0.0}
        if trial == 3:
            outer |= {"powersgd_rank": 1, "min_compression_ratio": 0.5}
        chosen = Configuration(codec=codec, delay=delay, local_steps=steps, **outer)
        seconds = (2.0 + trial, 0.5, 0.6, 0.7)
        logs.append(Log(make_spec(trial=trial, configuration=chosen), seconds=seconds))
    run = write_run(tmp_path / "run", logs)
    (found,) = importances(read_run(run, load_results(run)))
    assert set(found.together) == {
        ("codec", "local_steps"),
        ("powersgd_rank", "min_compression_ratio"),
        ("delay", "outer_lr", "outer_momentum"),
    }
    assert "told apart: codec, local_steps" in page_of(run).words("importance")


def test_the_settings_of_the_recommended_configuration_are_told(tmp_path: Path) -> None:
    words = page_of(sweep(tmp_path / "run")).words("recommendation")
    assert "Settings of none codec: none Gradient codec delay: none" in words
    assert "powersgd_rank:" not in words  # it does not apply


def test_few_rounds_and_faults_that_did_not_fire_are_told(tmp_path: Path) -> None:
    few = "Limits. It reaches the target after 4 rounds on average, so that one round more or less"
    words = page_of(sweep(tmp_path / "run")).words("recommendation")
    assert few in words and "changes the time to it by 25 %." in words
    assert "planned for its replicates" not in words

    specs = [
        make_spec(trial=n, replicate=seed, configuration=Configuration(codec=codec))
        for n, codec in enumerate(("none", "float16"))
        for seed in (0, 1)
    ]
    logs = (Log(spec, accuracies=(0.95, 0.96)) for spec in specs)  # rounds 2 and 4
    run = write_run(tmp_path / "early", logs, {"time_to_target_s": "minimize"})
    assert "after 2 rounds on average" in page_of(run).words("recommendation")

    run = write_run(tmp_path / "faulted", [], {"samples_per_s": "maximize"})
    for trial, codec in enumerate(("none", "float16")):
        story = kill_and_restart(trial=trial, configuration=Configuration(codec=codec))
        write_over_links(run, story, 10, faults=False)
    words = page_of(run).words("recommendation")
    assert "Of the 1 faults planned for its replicates 0 fired before training ended" in words
    assert few not in words  # no objective is a time to the target


def test_a_configuration_has_the_same_colour_in_every_chart(tmp_path: Path) -> None:
    run = sweep(tmp_path / "run")
    plan = FaultPlan(scenario="calm", peers=2)
    for trial, codec in enumerate(reversed(CODECS[1:])):  # the other way round, without the first
        threshold = 1024 if codec == "size_adaptive" else None
        chosen = Configuration(codec=codec, threshold=threshold)
        spec = make_spec(trial=3 - trial, configuration=chosen, scenario="calm", plan=plan)
        Log(spec, seconds=(2.0 + trial, 0.5, 0.6, 0.7)).write(run)
    first, second = loss_charts(read_run(run, load_results(run)))
    colours = {each.label: each.style for each in first.legend}
    assert len({*colours.values()}) == len(CODECS)
    assert [each.label for each in second.legend] != [each.label for each in first.legend][1:]
    assert {each.label: each.style for each in second.legend}.items() <= colours.items()


@pytest.mark.parametrize(("baseline", "computing"), [(None, 0.7), ("ddp", 3.7)])
def test_evaluation_is_no_part_of_computing(baseline: str | None, computing: float) -> None:
    """The second round takes 1 s, and an evaluation 3 s more: before the round of a baseline."""
    spec = make_spec(baseline=baseline, trial=None if baseline else 0)
    rounds = {(2, 0): {"accumulating_s": 3.8, "background_s": 0.1}}
    log = Log(spec, seconds=(2.0, 1.0), rounds=rounds)
    events = []
    for event in (*log.head(), *log.of_peer(0)):
        at = {1: START + 10.0, 2: START + 14.0}.get(event.get("round", 0))
        events.append({**event, "t": at} if at and event["kind"] == "transition" else event)
    times = round_times(timeline_of(log.spec, events))
    assert times is not None
    assert times.phases["computing"] == pytest.approx(computing)
    assert times.phases["whole round"] == 1.0


def test_the_failure_rate_of_the_map_is_that_of_the_swarms(tmp_path: Path) -> None:
    rates = []
    for baseline in (False, True):
        run = write_run(tmp_path / str(baseline), [], {"samples_per_s": "maximize"})
        for trial, codec in enumerate(("none", "float16", "ddp")[: 3 if baseline else 2]):
            of = {"baseline": codec, "trial": None} if codec == "ddp" else {"trial": trial}
            fields = {} if codec == "ddp" else {"configuration": Configuration(codec=codec)}
            story = kill_and_restart(**of, **fields)
            write_over_links(run, story, 10, faults=codec != "ddp")  # which missed its fault
        points = winner_map(read_run(run, load_results(run))).points
        rates += [point.failures for point in points if point.scenario != NO_FAULTS]
    first, second = rates
    assert first == second > 0
