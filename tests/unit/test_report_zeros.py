"""A replicate without a round has a throughput of 0, which has no logarithm."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from rayhive.columns import find_column, objectives
from rayhive.metrics.seeds import seed_values
from rayhive.report.differences import all_differences
from rayhive.report.recommendation import recommendations
from rayhive.report.render import results_text
from rayhive.report.results import Results, load_results
from rayhive.report.table import separates
from rayhive.spec import Configuration
from tests.fixtures.logs import Log, make_spec, write_run
from tests.fixtures.report_pages import page_of

SECONDS = (2.0, 0.5, 0.6, 0.7)
REPLICATES = 3


def run(folder: Path, stalled: Sequence[int], objective: str = "samples_per_s") -> Path:
    """Write a slow row, and a fast one of which some replicates have no round."""
    logs = []
    for trial, (codec, speed) in enumerate({"none": 1.0, "float16": 2.0}.items()):
        for replicate in range(REPLICATES):
            spec = make_spec(
                trial=trial, replicate=replicate, configuration=Configuration(codec=codec)
            )
            if trial == 1 and replicate in stalled:
                log = Log(spec, seconds=(), losses=(1.0,), accuracies=(0.1,), state="timed_out")
            else:
                seconds = tuple((1 + replicate / 100) * each / speed for each in SECONDS)
                log = Log(spec, seconds=seconds)
                if trial == 1:
                    log.seconds = (*seconds, *(0.5,) * 4)
            logs.append(log)
    return write_run(folder, logs, {objective: objectives()[objective]})


@pytest.mark.parametrize("stalled", [(0,), (0, 1, 2)])
def test_a_row_with_a_stalled_replicate_is_not_recommended(
    tmp_path: Path, stalled: Sequence[int]
) -> None:
    folder = run(tmp_path / "run", stalled)
    results = load_results(folder)
    (advice,) = recommendations(results)
    assert [each.row["configuration"] for each in advice.candidates] == ["none"]
    ((row, reason),) = advice.left_out
    assert (row["configuration"], reason) == ("float16", "samples_per_s of a replicate is 0")
    assert (row["samples_per_s"], row["samples_per_s_low"], row["pareto"]) == (0.0, None, False)
    assert row["pareto_probability"] is None
    text = results_text(results)
    assert "Take none: the only row of 2 with every objective." in text
    assert "Use float16" not in page_of(folder).words("recommendation")


def test_a_stalled_replicate_is_not_left_out_of_a_comparison(tmp_path: Path) -> None:
    results: Results = load_results(run(tmp_path / "run", [0]))
    values = seed_values(results.folded, "samples_per_s").values
    assert values.shape == (2, REPLICATES)
    assert (values[0] > 0).all() and (values[1] != values[1]).all()
    (change,) = all_differences(results, "none")
    assert (change.pairs, change.value, change.low, change.p) == (0, None, None, None)


def test_a_row_is_not_recommended_by_the_replicates_that_had_a_round(tmp_path: Path) -> None:
    """A replicate without a round has no median round; the mean was that of the others."""
    results = load_results(run(tmp_path / "run", [0], "round_p50_s"))
    (advice,) = recommendations(results)
    assert [each.row["configuration"] for each in advice.candidates] == ["none"]
    ((row, _),) = advice.left_out
    assert (row["configuration"], row["pareto"]) == ("float16", False)
    assert row["round_p50_s"] is not None and row["n_failed"] == 0
    column = find_column("round_p50_s")
    assert column is not None and not separates(row, results.folded, column)
