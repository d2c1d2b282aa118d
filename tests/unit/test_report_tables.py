"""Tables of unusual rows and columns."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from rayhive.errors import ConfigError
from rayhive.report.render import results_text
from rayhive.spec import Configuration
from tests.fixtures.logs import Log, make_spec, write_run
from tests.fixtures.report_pages import sweep


def test_the_title_counts_the_replicates_of_all_rows(tmp_path: Path) -> None:
    logs = [Log(make_spec(replicate=n)) for n in range(3)]
    other = Configuration(codec="float16")
    logs += [
        Log(make_spec(trial=1, replicate=n, configuration=other), state="timed_out")
        for n in range(2)
    ]
    run = write_run(tmp_path / "run", logs)
    assert results_text(run).splitlines()[0] == "study: 2 rows of 5 replicates"
    Log(make_spec(trial=1, replicate=2, configuration=other)).write(run)
    assert results_text(run).splitlines()[0] == "study: 2 rows of 6 replicates, 3 each"


def test_a_bound_as_a_column_is_shown_with_its_column(tmp_path: Path) -> None:
    run = sweep(tmp_path / "run")
    for name in ("final_loss", "metric.accuracy"):
        whole = results_text(run, columns=[name])
        assert results_text(run, columns=[f"{name}_low"]) == whole
        assert results_text(run, columns=[f"{name}_high", name]) == whole
        (row, *_) = json.loads(results_text(run, "json", columns=[f"{name}_low"]))
        assert list(row) == ["configuration", "scenario", f"{name}_low"]
    assert results_text(run, columns=["final_loss_low"], versus="first") == results_text(
        run, columns=["final_loss"], versus="first"
    )


def test_no_line_of_a_latex_table_begins_with_an_option_of_the_line_before(tmp_path: Path) -> None:
    configurations = [Configuration(codec="size_adaptive", threshold=n) for n in (1000, 1001)]
    logs = [
        Log(make_spec(trial=trial, replicate=n, configuration=configuration))
        for trial, configuration in enumerate(configurations)
        for n in range(2)
    ]
    run = write_run(tmp_path / "run", logs)
    text = results_text(run, "latex", by=["threshold"], columns=["final_loss"])
    assert "{}[elements]" in text
    assert not re.search(r"\\\\\s*[\[*]", text)


def test_a_key_of_zero_is_no_empty_cell(tmp_path: Path) -> None:
    logs = [
        Log(
            make_spec(
                trial=trial,
                replicate=n,
                configuration=Configuration(
                    codec="none", powersgd_rank=4, min_compression_ratio=ratio
                ),
            )
        )
        for trial, ratio in enumerate((0.5, 0.0))
        for n in range(2)
    ]
    run = write_run(tmp_path / "run", logs)
    text = results_text(run, by=["min_compression_ratio"], versus="first", columns=["final_loss"])
    assert re.search(r"^0\.0 ", text, re.M)


def test_options_without_an_effect_beside_wide_are_refused(tmp_path: Path) -> None:
    run = sweep(tmp_path / "run")
    with pytest.raises(ConfigError) as error:
        results_text(run, wide=True, columns=["final_loss"], versus="first")
    assert [problem.key for problem in error.value.problems] == ["--columns", "--versus"]


def test_the_advice_names_a_column_once(tmp_path: Path) -> None:
    run = sweep(tmp_path / "run")
    text = results_text(run, by=["codec", "scenario"])
    assert "Take codec none, scenario none:" in text


def test_the_note_of_survivors_belongs_to_a_column_that_is_shown(tmp_path: Path) -> None:
    run = sweep(tmp_path / "run")
    Log(make_spec(trial=0, replicate=2), state="failed").write(run)
    note = "final_loss x (k/n)"
    assert note in results_text(run, columns=["final_loss"])
    assert note not in results_text(run, columns=["samples_per_s"])


def test_comparisons_without_pairs_are_counted_apart(tmp_path: Path) -> None:
    run = sweep(tmp_path / "run")
    for seed in (7, 8):  # no seed of the others
        configuration = Configuration(codec="none", powersgd_rank=4, min_compression_ratio=0.5)
        Log(make_spec(trial=9, replicate=seed, seed=seed, configuration=configuration)).write(run)
    text = results_text(run, versus="first", columns=["final_loss"])
    assert "1 comparison without values at a common seed." in text
    assert "of 4 comparisons do not differ significantly" in text
