"""Faulted runs compared with their twins, and their worst cases, in tables."""

from __future__ import annotations

import csv
import io
import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rayhive.metrics.groups.robustness import Robustness
from rayhive.metrics.rows import last_attempt, rows_with_twins, timeline_row
from rayhive.report.page.write import report_html
from rayhive.report.render import results_text
from rayhive.report.results import Results, load_results
from rayhive.spec import Configuration
from rayhive.spec.study import ElasticConfig
from tests.fixtures.faulted import ALL, Story, kill_and_restart, planned
from tests.fixtures.logs import Log, make_spec, timeline_of, write_run

wide_text = partial(results_text, wide=True)
OBJECTIVES = {"samples_per_s": "maximize"}


def calm(seconds: float = 1.0, **fields: object) -> Story:
    """Return the twin: 13 seconds of rounds without faults."""
    story = Story(**fields)  # type: ignore[arg-type]
    story.rounds(*(seconds * n for n in range(1, int(13 / seconds) + 1)), peers=ALL)
    story.finish(13.0, ALL)
    story.evaluate(13.5, ALL, loss=0.05, final=True)
    story.end(14.0)
    return story


def stormy(**fields: object) -> Story:
    story = kill_and_restart(**fields)
    end = story.events.pop()
    story.evaluate(13.5, ("peer-0", "peer-1.1", "peer-2"), loss=0.09, final=True)
    story.events.append(end)
    return story


# -- twins -------------------------------------------------------------------------------------


def test_a_faulted_replicate_is_compared_with_its_twin(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [calm(), stormy()], OBJECTIVES)  # type: ignore[list-item]
    twin, row = load_results(run).rows
    assert (twin["scenario"], row["scenario"]) == ("none", "story")
    assert row["retention"] == pytest.approx((1984 / 13) / (13 * 192 / 13))
    assert row["retention_normalised"] == pytest.approx(1984 / (13 * 192) / (1 - 0.4 / 39))
    assert row["loss_delta"] == pytest.approx(0.04)
    assert row["convergence_penalty"] == 1984 - 13 * 192
    for name in ("retention", "retention_normalised", "loss_delta", "convergence_penalty"):
        assert twin[name] is None, name
    folded = load_results(run).folded
    assert folded[1]["retention"] == row["retention"]
    table = load_results(run).replicates
    assert list(table["retention"].isna()) == [True, False]


def test_a_replicate_is_compared_with_the_twin_of_its_seed_alone(tmp_path: Path) -> None:
    stories = (calm(0.5, replicate=1), stormy(), calm(), stormy(replicate=5))
    rows = rows_with_twins([last_attempt(story.write(tmp_path)) for story in stories])
    retentions = [row["retention"] for row in rows]
    assert retentions == [None, pytest.approx(1984 / (13 * 192)), None, None]


@pytest.mark.parametrize(
    "other",
    [
        {"seed": 9},
        {"replicate": 1, "seed": 0},
        {"configuration": Configuration(codec="float16")},
        {"budget": make_spec().budget.model_copy(update={"seconds_per_replicate": 9.0})},
    ],
    ids=["seed", "replicate", "configuration", "budget"],
)
def test_a_twin_has_the_same_spec_without_faults(tmp_path: Path, other: dict[str, object]) -> None:
    run = write_run(tmp_path / "run", [calm(trial=1, **other), stormy()])  # type: ignore[list-item]
    row = next(row for row in load_results(run).rows if row["scenario"] == "story")
    assert row["retention"] is None


def test_settings_of_elastic_may_be_given_after_the_twin_ran(tmp_path: Path) -> None:
    elastic = ElasticConfig(checkpoint_every_rounds=5)
    run = write_run(tmp_path / "run", [calm(), stormy(elastic=elastic)], OBJECTIVES)  # type: ignore[list-item]
    assert load_results(run).rows[1]["retention"] is not None
    names = ("single", "elastic")
    twins = [
        [
            calm(trial=None, baseline=name),
            stormy(trial=None, baseline=name, elastic=elastic),
        ]
        for name in names
    ]
    found = [
        rows_with_twins([last_attempt(story.write(tmp_path / name)) for story in stories])
        for name, stories in zip(names, twins, strict=True)
    ]
    assert [rows[1]["retention"] is not None for rows in found] == [True, False]


def test_a_finished_replicate_of_another_trial_can_be_the_twin(tmp_path: Path) -> None:
    found = []
    for name, state in (("good", "completed"), ("bad", "failed")):
        twin = calm(trial=4)
        twin.events[-1]["state"] = state
        run = write_run(tmp_path / name, [twin, stormy()])  # type: ignore[list-item]
        found.append(next(r for r in load_results(run).rows if r["scenario"] == "story"))
    assert found[0]["retention"] is not None
    assert found[1]["retention"] is None


# -- robustness --------------------------------------------------------------------------------


def row(configuration: str, scenario: str, value: float | None, **fields: object) -> dict:
    base = {
        "configuration": configuration, "scenario": scenario, "workload": "digits", "peers": 2,
        "link": None, "n": 2, "n_failed": 0, "reached": 2, "samples_per_s": value,
        "retention": None if scenario == "none" else 0.5,
        **dict.fromkeys(("codec", "threshold", "powersgd_rank", "min_compression_ratio", "delay")),
        **dict.fromkeys(("worst_case", "worst_retention", "regret")),
    }  # fmt: skip
    return {**base, **fields}


def marked(*rows: dict, objectives: dict[str, str] = OBJECTIVES) -> list[tuple]:
    Robustness().rank(rows, objectives, ())
    return [(r["worst_case"], r["worst_retention"], r["regret"]) for r in rows]


def test_the_worst_case_and_the_regret() -> None:
    a = [row("a", "none", 100.0), row("a", "kill", 40.0, retention=0.4), row("a", "slow", 90.0)]
    b = [row("b", "none", 80.0), row("b", "kill", 70.0, retention=0.9), row("b", "slow", 60.0)]
    # regrets of a: 0, 30, 0; of b: 20, 0, 30
    found = marked(*a, *b)
    assert found[:3] == [(40.0, 0.4, 30.0)] * 3
    assert found[3:] == [(60.0, 0.5, 30.0)] * 3


def test_the_worst_of_a_minimised_objective_is_its_maximum() -> None:
    rows = [row("a", "none", 1.0), row("a", "kill", 5.0), row("b", "none", 3.0)]
    rows.append(row("b", "kill", 4.0))
    found = marked(*rows, objectives={"samples_per_s": "minimize", "final_loss": "minimize"})
    assert [item[0] for item in found] == [5.0, 5.0, 4.0, 4.0]
    assert [item[2] for item in found] == [1.0, 1.0, 2.0, 2.0]


@pytest.mark.parametrize(
    "broken",
    [{"n": 0, "samples_per_s": None}, {"n_failed": 1}, {"scenario": "none"}],
    ids=["nothing finished", "one was invalid", "scenario missing"],
)
def test_a_configuration_with_an_unknown_scenario_has_no_worst_case(broken: dict) -> None:
    rows = [row("a", "none", 9.0), row("a", "kill", 5.0)]
    hurt = [row("b", "none", 3.0), row("b", "kill", 99.0) | broken]
    found = marked(*rows, *hurt)
    assert found[0] == (5.0, 0.5, 0.0)  # and it is the best of those that did
    assert found[2] == (None, None, None)


def test_an_unknown_objective_leaves_the_worst_retention() -> None:
    rows = [row("a", "none", None), row("a", "kill", 5.0)]
    assert marked(*rows) == [(None, 0.5, None)] * 2
    assert marked(*rows, objectives={}) == [(None, 0.5, None)] * 2


def test_an_objective_relative_to_the_twin_counts_under_the_faulted_scenarios() -> None:
    def worst(of_a: tuple[float | None, ...]) -> list[tuple]:
        rows = [
            row(name, scenario, 9.0, retention=retention)
            for name, retentions in (("a", of_a), ("b", (0.5, 0.6)))
            for scenario, retention in zip(
                ("none", "kill", "slow"), (None, *retentions), strict=True
            )
        ]
        return marked(*rows, objectives={"retention": "maximize"})[::3]

    near = pytest.approx
    assert worst((0.4, 0.9)) == [(0.4, 0.4, near(0.1)), (0.5, 0.5, near(0.3))]
    assert worst((None, 0.9)) == [(None, None, None), (0.5, 0.5, 0.0)]  # a twin is missing


def test_without_faulted_scenarios_there_is_no_worst_case() -> None:
    assert marked(row("a", "none", 1.0), row("b", "none", 2.0)) == [(None, None, None)] * 2


def test_rows_under_other_conditions_are_not_compared_for_regret() -> None:
    few = [row("a", "none", 9.0), row("a", "kill", 5.0)]
    many = [row("a", s, 50.0, peers=8) for s in ("none", "kill")]
    assert [item[2] for item in marked(*few, *many)] == [0.0] * 4


@pytest.mark.parametrize("objective", ["retention", "retention_normalised"])
def test_a_choice_for_unknown_faults_by_an_objective_relative_to_the_twin(
    tmp_path: Path, objective: str
) -> None:
    stories = []
    for trial, codec in enumerate(("none", "float16")):
        for replicate in range(3):
            given: dict[str, Any] = {"trial": trial, "replicate": replicate}
            given["configuration"] = Configuration(codec=codec)
            stories.append(calm(13 / (26 - 10 * trial + replicate), **given))  # s for a round
            stories += [stormy(**given, scenario=name) for name in ("kill", "more")]
    run = write_run(tmp_path / "run", stories, {objective: "maximize"})  # type: ignore[arg-type]
    results = load_results(run)
    for row in results.folded:
        if row["scenario"] == "kill":  # both storms are the same
            assert (row["worst_case"], row["worst_retention"]) == (row[objective], row["retention"])
            assert row["worst_case_low"] < row["worst_case"] < row["worst_case_high"]  # type: ignore[operator]
            assert (row["regret"] == 0) == (row["configuration"] == "float16")
            assert row["regret_low"] is not None
    assert "If the faults are not known in advance" in report_html(run, results)


# -- in tables ---------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two configurations under two scenarios; without faults the second one is slightly slower."""
    slow = Configuration(codec="float16")
    stories = [
        calm(), stormy(), calm(13 / 12, trial=1, configuration=slow),
        stormy(trial=1, configuration=slow),
    ]  # fmt: skip
    return write_run(tmp_path / "run", stories, OBJECTIVES)  # type: ignore[arg-type]


def test_the_formats_have_the_columns_of_faults(run: Path) -> None:
    rows = json.loads(wide_text(run, "json"))
    assert [(r["configuration"], r["scenario"]) for r in rows] == [
        ("none", "none"), ("none", "story"), ("float16", "none"), ("float16", "story"),
    ]  # fmt: skip
    faulted = rows[1]
    assert (faulted["faults_fired"], faulted["faults_verified"]) == (1, 1)
    assert faulted["detect_s"] and faulted["detect_p95_s"] == pytest.approx(1.3)
    assert faulted["worst_case"] == faulted["samples_per_s"]
    assert faulted["worst_retention"] == faulted["retention"]
    assert [r["regret"] for r in rows] == pytest.approx([0.0, 0.0, 192 / 13, 192 / 13])
    parts = [faulted[n] for n in faulted if n.startswith(("badput", "productive", "evaluation"))]
    assert sum(parts) == pytest.approx(faulted["peer_seconds"])
    read = list(csv.DictReader(io.StringIO(wide_text(run, "csv"))))
    assert read[1]["samples_lost"] == "32"
    assert read[0]["samples_lost"] == ""


@pytest.mark.parametrize("format", ["table", "md", "latex"])
def test_a_faulted_run_shows_its_groups(run: Path, format: str) -> None:
    text = wide_text(run, format, console_width=1000).replace("\\_", "_")
    for name in ("recover_", "badput_", "regret", "worst_", "time", "robustness", "faults"):
        assert name in text, name


def test_censored_times_and_violated_invariants_have_notes(tmp_path: Path) -> None:
    story = stormy()
    for event in story.of("round", "peer-1.1"):
        event["samples"] = 0
    story.say(13.6, "invariant", name="no_orphans", ok=False, checked=1, violations=["pid 7"])
    calm_run = write_run(tmp_path / "calm", [calm(), stormy()])  # type: ignore[list-item]
    run = write_run(tmp_path / "run", [calm(), story])  # type: ignore[list-item]
    text = wide_text(run, console_width=1000)
    assert "Of 1 fault the detection, recovery or rejoin was not seen before the end (cens" in text
    assert "In 1 row an invariant was violated: none with scenario story." in text
    assert "censored)" not in wide_text(calm_run, console_width=1000)
    assert "was violated" not in wide_text(calm_run, console_width=1000)


def test_a_run_without_faults_has_no_groups_of_faults(tmp_path: Path) -> None:
    text = wide_text(write_run(tmp_path / "run", [Log()]), "md")
    assert "peer\\_seconds" not in text and "peer_seconds" not in text
    assert "regret" not in text


def test_robustness_with_rows_by_another_setting(run: Path) -> None:
    rows = json.loads(wide_text(run, "json", by=["delay"]))
    assert [(r["scenario"], r["n"]) for r in rows] == [("none", 2), ("story", 2)]
    assert [r["regret"] for r in rows] == [0.0, 0.0]


def test_an_unproved_fault_leaves_no_worst_case(tmp_path: Path) -> None:
    bad = stormy()
    bad.of("replicate_finished")[-1]["state"] = "invalid"
    run = write_run(tmp_path / "run", [calm(), bad], OBJECTIVES)  # type: ignore[list-item]
    rows = json.loads(wide_text(run, "json"))
    assert [(r["n"], r["n_failed"]) for r in rows] == [(1, 0), (0, 1)]
    assert [r["worst_case"] for r in rows] == [None, None]
    assert rows[1]["faults_fired"] is None


def test_a_plan_without_fired_faults_is_in_the_timeline(tmp_path: Path) -> None:
    story = Story([planned(round=99)])
    story.rounds(1.0, peers=ALL)
    story.finish(1.0, ALL)
    story.end(2.0)
    run = write_run(tmp_path / "run", [story])  # type: ignore[list-item]
    (row,) = load_results(run).folded
    assert (row["faults_planned"], row["faults_fired"], row["censored"]) == (1, 0, 0)


def test_a_comparison_with_few_twins_says_with_how_many(tmp_path: Path) -> None:
    stories = [calm(replicate=0), *(stormy(replicate=n) for n in range(3))]
    run = write_run(tmp_path / "run", stories, OBJECTIVES)  # type: ignore[arg-type]
    text = results_text(run, columns=["loss_delta"])
    assert "(1 of 3)" in text
    assert "over the k of n replicates that have a twin" in text
    whole = write_run(tmp_path / "whole", [calm(), stormy()], OBJECTIVES)  # type: ignore[list-item]
    assert " of 1)" not in results_text(whole, columns=["loss_delta"])


def test_a_regret_without_an_upper_bound_has_no_interval(tmp_path: Path) -> None:
    """Two seeds that differ by a factor of 100 bound nothing, with ten rows and three scenarios."""
    rows = []
    for trial in range(10):
        for scenario in ("none", "kill-one", "kill-two"):
            for seed in (0, 1):
                spec = make_spec(
                    trial=trial,
                    replicate=seed,
                    scenario=scenario,
                    configuration=Configuration(codec="size_adaptive", threshold=1000 + trial),
                )
                wild = 100.0 if trial == 1 and seed and scenario != "none" else 1.0
                rate = wild * (100.0 + trial + seed)
                row = timeline_row(timeline_of(spec, Log(spec).events()))
                rows.append({**row, "samples_per_s": rate})
    results = Results("study", OBJECTIVES, tuple(rows))  # type: ignore[arg-type]
    assert all(row["regret"] is not None for row in results.folded)
    for row in results.folded:
        assert row["regret_high"] is None or math.isfinite(row["regret_high"])  # type: ignore[arg-type]
    json.loads(wide_text(results, "json"))
    assert "regret" in wide_text(results)
