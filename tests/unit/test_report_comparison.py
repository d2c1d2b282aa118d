"""Comparison of two runs, against paired and Welch t-intervals computed by hand."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from rayhive.cli import main
from rayhive.errors import ConfigError
from rayhive.metrics.seeds import seed_values
from rayhive.report.comparison import CENSORED, Comparison, Comparisons, compare
from rayhive.report.results import load_results
from rayhive.spec import Budget, Configuration
from rayhive.spec.study import ElasticConfig
from tests.fixtures.faulted import ALL, REST, Story, planned
from tests.fixtures.logs import Log, make_spec, write_run

#: Seed -> final loss of peer 0; the column is the mean over both peers, 0.01 more.
Losses = dict[int, float]


def run(folder: Path, losses: Losses, *, speed: float = 1.0, **fields: Any) -> Path:
    """Write a run with one replicate for each seed."""
    logs = [
        Log(
            spec=make_spec(replicate=number, seed=seed, **fields),
            losses=(1.0, loss),
            seconds=tuple(speed * (1 + seed / 100) * s for s in (2.0, 0.5, 0.6, 0.7)),
        )
        for number, (seed, loss) in enumerate(losses.items())
    ]
    return write_run(folder, logs, {"final_loss": "minimize"})


def struck(seed: int, recovers: bool) -> Story:
    """Return a replicate in which a peer of three is killed at 4.5 s."""
    story = Story([planned()], seed=seed, replicate=seed)
    story.rounds(1.0, 2.0, 3.0, 4.0, peers=ALL)
    story.fire(4.5, 0, ["peer-1"])
    story.lose(4.6, "peer-1")
    pace = 1.0 if recovers else 1.5
    ends = [5.5 + pace * n for n in range(6)]
    story.rounds(*ends, peers=REST)
    story.finish(ends[-1], REST)
    story.end(ends[-1])
    return story


def of(found: Comparisons, column: str) -> Comparison:
    (row,) = [row for row in found.rows if row.column.name == column]
    return row


def t_interval(values: Sequence[float]) -> tuple[float, float]:
    n, mean = len(values), sum(values) / len(values)
    s = math.sqrt(sum((value - mean) ** 2 for value in values) / (n - 1))
    half = stats.t.ppf(0.975, n - 1) * s / math.sqrt(n)
    return mean - half, mean + half


def test_common_seeds_are_paired(tmp_path: Path) -> None:
    a = run(tmp_path / "a", {1: 0.5, 2: 0.7, 3: 0.9})
    b = run(tmp_path / "b", {3: 0.88, 1: 0.49, 2: 0.67})
    loss = of(compare(a, b), "final_loss")
    assert (loss.paired, loss.n, loss.ratio) == (True, 3, False)
    assert loss.change is not None
    assert loss.change.mean == pytest.approx(-0.02)
    assert (loss.change.low, loss.change.high) == pytest.approx(t_interval([-0.01, -0.03, -0.02]))
    assert loss.p == pytest.approx(stats.ttest_1samp([-0.01, -0.03, -0.02], 0).pvalue)


def test_columns_on_a_log_scale_are_compared_by_their_ratio(tmp_path: Path) -> None:
    seeds = {1: 0.5, 2: 0.5, 3: 0.5}
    a, b = run(tmp_path / "a", seeds), run(tmp_path / "b", seeds, speed=2.0)
    rate = of(compare(a, b, ["samples_per_s"]), "samples_per_s")
    assert rate.ratio and rate.change is not None and rate.a is not None and rate.b is not None
    assert rate.change.mean == pytest.approx(rate.b / rate.a)
    assert rate.verdict == "worse"


def test_runs_without_common_seeds_are_compared_without_pairs(tmp_path: Path) -> None:
    ours, theirs = {1: 0.5, 2: 0.7, 3: 0.9}, {4: 0.1, 5: 0.15}
    found = compare(run(tmp_path / "a", ours), run(tmp_path / "b", theirs), ["final_loss"])
    (loss,) = found.rows
    assert (loss.paired, loss.n) == (False, 2)
    welch = stats.ttest_ind(list(theirs.values()), list(ours.values()), equal_var=False)
    interval = welch.confidence_interval()
    assert loss.change is not None
    assert (loss.change.low, loss.change.high) == pytest.approx((interval.low, interval.high))
    assert any("no seed in common" in note for note in found.notes)


def test_exact_values_differ_also_without_common_seeds(tmp_path: Path) -> None:
    a = run(tmp_path / "a", {1: 0.5, 2: 0.7})
    logs = [Log(make_spec(replicate=n, seed=3 + n), payload=9000) for n in (0, 1)]
    b = write_run(tmp_path / "b", logs)
    for other, verdict in ((b, "worse"), (run(tmp_path / "c", {5: 0.5, 6: 0.7}), "equal")):
        found = of(compare(a, other, ["payload_bytes_per_round"]), "payload_bytes_per_round")
        assert (found.paired, found.verdict) == (False, verdict)


def test_damaged_replicates_are_told(tmp_path: Path) -> None:
    a, b = (run(tmp_path / name, {1: 0.5, 2: 0.7, 3: 0.9}) for name in "ab")
    (log,) = (b / "trials").glob("*/r2-*/events.jsonl")
    log.write_bytes(b"no event\n" + log.read_bytes())
    notes = compare(a, b).notes
    assert any(note.startswith(f"Damaged and left out: {log}, line 1") for note in notes)
    assert any("1 replicate without a partner left out" in note for note in notes)


def test_a_setting_that_is_allowed_to_differ_has_to_exist(tmp_path: Path) -> None:
    a = run(tmp_path / "a", {1: 0.5})
    compare(a, a, allow=["swarm.peers", "swarm", "plan"])
    with pytest.raises(ConfigError, match=r"--allow: 'swarm.peer' .* did you mean 'swarm.peers'"):
        compare(a, a, allow=["swarm.peer"])


def test_both_folders_are_checked(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        compare(tmp_path / "one", tmp_path / "two", ["nothing"])
    assert [problem.key for problem in error.value.problems] == ["--column", "DIR", "DIR"]


def test_holm_counts_every_comparison(tmp_path: Path) -> None:
    a = run(tmp_path / "a", {1: 0.5, 2: 0.7, 3: 0.9})
    b = run(tmp_path / "b", {1: 0.49, 2: 0.67, 3: 0.88}, speed=1.001)
    found = compare(a, b, ["final_loss", "samples_per_s", "round_p50_s"])
    tested = sorted((row for row in found.rows if row.p is not None), key=lambda row: row.p or 0)
    assert len(tested) >= 2
    largest = 0.0
    for rank, row in enumerate(tested):
        largest = max(largest, min(1.0, (len(tested) - rank) * (row.p or 0.0)))
        assert row.p_holm == pytest.approx(largest)
    assert all(row.verdict == "not separable" for row in tested if (row.p_holm or 0) > 0.05)


def test_a_run_is_equal_to_itself(tmp_path: Path) -> None:
    a = run(tmp_path / "a", {1: 0.5, 2: 0.7})
    found = compare(a, a)
    assert {row.verdict for row in found.rows} == {"equal"}
    assert {row.column.name for row in found.rows} >= {"final_loss", "samples_per_s"}


def test_equal_differences_may_be_by_chance(tmp_path: Path) -> None:
    a = run(tmp_path / "a", {1: 0.5, 2: 0.75})
    b = run(tmp_path / "b", {1: 0.25, 2: 0.5})
    loss = of(compare(a, b), "final_loss")
    assert loss.change is not None and loss.change.low is None
    assert loss.verdict == "not separable"


def test_missed_targets_cut_all_times(tmp_path: Path) -> None:
    a = run(tmp_path / "a", {1: 0.5, 2: 0.5})
    logs = [
        Log(spec=make_spec(replicate=n, seed=seed), accuracies=(0.1, 0.2))
        for n, seed in enumerate((1, 2))
    ]
    b = write_run(tmp_path / "b", logs)
    time = of(compare(a, b), "time_to_target_s")
    assert "2 of 4 missed it" in time.note
    assert time.change is not None and time.change.mean >= 1


@pytest.mark.parametrize("state", ["completed", "failed"])
def test_a_run_that_missed_the_target_is_not_equal_to_one_that_reached_it(
    tmp_path: Path, state: str, capsys: pytest.CaptureFixture[str]
) -> None:
    a = write_run(tmp_path / "a", [Log(make_spec(replicate=n)) for n in range(3)])
    missed = [
        Log(make_spec(replicate=n), accuracies=(0.1, 0.2), state=state, started=500.0)
        for n in range(3)
    ]
    b = write_run(tmp_path / "b", missed)
    for column in ("samples_to_target", "time_to_target_s"):
        row = of(compare(a, b, [column]), column)
        assert row.verdict == "not separable" and row.censored == (False, True)
        assert row.change is not None and (row.change.low, row.change.high) == (None, None)
        assert "3 of 6 missed it" in row.note
    assert "512: 3 of 6" in of(compare(a, b, ["samples_to_target"]), "samples_to_target").note
    assert main(["compare", str(a), str(b), "--column", "samples_to_target"]) == 0
    assert "≥ 512" in capsys.readouterr().out


def test_a_failed_replicate_has_no_value_and_is_counted(tmp_path: Path) -> None:
    a = run(tmp_path / "a", {1: 0.5, 2: 0.7, 3: 0.8})
    b = run(tmp_path / "b", {1: 0.4, 2: 0.6})
    Log(spec=make_spec(replicate=2, seed=3), state="diverged").write(b)
    found = compare(a, b)
    assert of(found, "final_loss").n == 2
    assert "1 pair without a value left out" in of(found, "final_loss").note
    assert any("1 replicate of the second run did not finish" in note for note in found.notes)


def test_replicates_without_a_value_are_counted_without_pairs_too(tmp_path: Path) -> None:
    a = run(tmp_path / "a", {1: 0.5, 2: 0.7, 3: 0.8})
    b = run(tmp_path / "b", {4: 0.4, 5: 0.6})
    stalled = make_spec(replicate=2, seed=6)
    Log(stalled, seconds=(), losses=(1.0,), accuracies=(0.1,), state="timed_out").write(b)
    row = of(compare(a, b, ["round_p50_s"]), "round_p50_s")
    assert (row.paired, row.n) == (False, 2)
    assert row.note == "1 replicate without a value left out"


def test_replicates_that_recovered_do_not_stand_for_those_that_did_not(tmp_path: Path) -> None:
    """One of two never was as fast as before; the other's time was compared alone."""
    runs = []
    for name, ends in (("a", ("quick", "quick", "quick")), ("b", ("quick", "quick", "never"))):
        logs = [struck(seed, recovers=end == "quick") for seed, end in enumerate(ends)]
        runs.append(write_run(tmp_path / name, logs, {"final_loss": "minimize"}))
    whole = of(compare(runs[0], runs[0], ["recover_p50_s"]), "recover_p50_s")
    assert whole.n == 3 and whole.verdict == "equal"
    row = of(compare(*runs, ["recover_p50_s"]), "recover_p50_s")
    assert (row.change, row.verdict, row.note) == (None, "not known", CENSORED)
    values = seed_values(load_results(runs[1]).folded, "recover_p50_s").values
    assert values.size == 0 or np.isnan(values).all()


def test_configurations_with_one_label_are_not_mixed(tmp_path: Path) -> None:
    """A label rounds to four digits: the last of two configurations stood for both."""
    rates, logs = (0.70001, 0.70003), []
    for trial, rate in enumerate(rates):
        configuration = Configuration(local_steps=4, outer_lr=rate, outer_momentum=0.9)
        for n in range(2):
            spec = make_spec(trial=trial, replicate=n, configuration=configuration)
            logs.append(Log(spec, losses=(1.0, (1 + trial) * (1 + n / 10))))
    a = write_run(tmp_path / "a", logs, {"final_loss": "minimize"})
    rows = [row for row in compare(a, a).rows if row.column.name == "final_loss"]
    assert [row.a for row in rows] == pytest.approx([1.06, 2.11])
    assert len({row.configuration for row in rows}) == 1


def test_every_reason_against_a_comparison_is_told(tmp_path: Path) -> None:
    a = run(tmp_path / "a", {1: 0.5})
    other = {
        "budget": Budget(seconds_per_replicate=9),
        "configuration": Configuration(codec="float16"),
    }
    b = run(tmp_path / "b", {1: 0.5}, **other)
    Log(spec=make_spec(configuration=Configuration(codec="uniform8"), trial=1)).write(b)
    with pytest.raises(ConfigError) as caught:
        compare(a, b)
    keys = [problem.key for problem in caught.value.problems]
    assert keys == ["budget.seconds_per_replicate", "configuration"]
    with pytest.raises(ConfigError, match=r"--column: 'final_lost'.*did you mean 'final_loss'"):
        compare(a, b, ["final_lost"])
    with pytest.raises(ConfigError, match="a run with finished replicates"):
        compare(a, write_run(tmp_path / "empty", []))


def test_settings_of_a_baseline_that_both_runs_have_must_be_equal(tmp_path: Path) -> None:
    """In a run with other rows besides, whose specs have the settings, too."""
    runs = {}
    for rounds in (10, 50):
        elastic = ElasticConfig(checkpoint_every_rounds=rounds)
        runs[rounds] = run(tmp_path / str(rounds), {1: 0.5}, elastic=elastic)
    compare(*runs.values())
    for rounds, folder in runs.items():
        elastic = ElasticConfig(checkpoint_every_rounds=rounds)
        Log(spec=make_spec(trial=None, baseline="elastic", elastic=elastic)).write(folder)
    with pytest.raises(ConfigError, match=r"elastic\.checkpoint_every_rounds: 50.*10 as in"):
        compare(*runs.values())
    told = compare(*runs.values(), allow=["elastic"]).notes
    assert "elastic.checkpoint_every_rounds differs, as allowed: 10 and 50." in told


def test_single_configurations_may_differ_and_settings_are_allowed_by_name(tmp_path: Path) -> None:
    a = run(tmp_path / "a", {1: 0.5, 2: 0.6})
    other = {
        "budget": Budget(seconds_per_replicate=9),
        "configuration": Configuration(codec="float16"),
    }
    b = run(tmp_path / "b", {1: 0.5, 2: 0.7}, **other)
    found = compare(a, b, allow=["budget"])
    assert {row.configuration for row in found.rows} == {"none → float16"}
    assert "budget.seconds_per_replicate differs, as allowed: 120.0 and 9.0." in found.notes


def test_the_command_prints_changes_and_refusals(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a = run(tmp_path / "a", {1: 0.5, 2: 0.7, 3: 0.9})
    b = run(tmp_path / "b", {1: 0.4, 2: 0.61, 3: 0.8})
    assert main(["compare", str(a), str(b), "--column", "final_loss"]) == 0
    out = capsys.readouterr().out
    assert "-0.09667" in out and "3 pairs" in out and "better" in out
    assert main(["compare", str(a), str(b), "--format", "json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert rows[0]["column"] == "final_loss" and rows[0]["value"] == pytest.approx(-0.29 / 3)
    assert main(["compare", str(a), str(tmp_path)]) == 2
