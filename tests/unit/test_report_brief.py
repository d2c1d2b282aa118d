"""The default table: one block, with a sentence that says which row to take; and differences."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from rayhive.api import load
from rayhive.errors import ConfigError
from rayhive.report.render import results_text
from rayhive.spec import Configuration
from tests.fixtures.logs import Log, make_spec, write_run

LOSS = {"final_loss": "minimize"}
CLEAR = {"none": (0.5, 0.6, 0.7), "float16": (0.9, 1.01, 1.1), "uniform8": (0.8, 0.91, 1.0)}
UNCLEAR = {"none": (0.5, 0.6, 0.9), "float16": (0.9, 0.5, 0.6)}


def make_run(
    folder: Path, losses: dict[str, Sequence[float]], objectives: dict[str, str] = LOSS
) -> Path:
    """Return a run of one configuration for each codec, which ends at these losses."""
    return write_run(
        folder,
        [
            Log(
                spec=make_spec(
                    trial=trial, replicate=number, configuration=Configuration(codec=codec)
                ),
                losses=(2.0, loss),
            )
            for trial, (codec, values) in enumerate(losses.items())
            for number, loss in enumerate(values)
        ],
        objectives,
    )


def test_the_default_table_is_one_block_that_fits_a_terminal(tmp_path: Path) -> None:
    objectives = {"time_to_target_s": "minimize", "payload_bytes_per_sample": "minimize"}
    logs = [
        Log(
            spec=make_spec(
                trial=trial, replicate=n, configuration=Configuration(codec=codec, powersgd_rank=4)
            ),
            seconds=(2.0, factor + 0.1 * n, 0.6, 0.7),
            payload=4000 + 10 * n * trial,
        )
        for trial, (codec, factor) in enumerate({"none": 1.0, "float16": 3.0}.items())
        for n in range(3)
    ]
    text = results_text(write_run(tmp_path / "run", logs, objectives), console_width=100)
    assert text.count("──────────") > 0 and len(re.findall(r"^─+$", text, re.M)) == 1
    assert max(map(len, text.splitlines())) <= 100
    for name in ("time_to_target_s", "payload_bytes_", "pareto_", "not_separable"):
        assert name in text, name
    assert "round_p50_s" not in text and "git_revision" not in text
    assert "--wide" in text


def test_equal_measurements_are_no_certainty(tmp_path: Path) -> None:
    """All replicates reach the target at the same evaluation, by chance."""
    text = results_text(make_run(tmp_path / "run", CLEAR, {"time_to_target_s": "minimize"}))
    assert "Cannot tell which row to take: the replicates show no spread." in text
    rows = json.loads(results_text(tmp_path / "run", "json"))
    assert [row["pareto_probability"] for row in rows] == [None, None, None]


def test_a_clear_winner_is_recommended(tmp_path: Path) -> None:
    text = results_text(make_run(tmp_path / "run", CLEAR))
    assert "Take none: > 99 % sure that it is the lowest final_loss." in text
    rows = json.loads(results_text(tmp_path / "run", "json"))
    assert rows[0]["pareto_probability"] > 0.99
    assert rows[0]["not_separable"] == 0
    assert [row["pareto"] for row in rows] == [True, False, False]


def test_a_run_of_one_configuration_has_no_advice(tmp_path: Path) -> None:
    text = results_text(make_run(tmp_path / "run", {"none": (0.5, 0.6)}), console_width=100)
    assert "Take" not in text and "tell" not in text and "not_separable" not in text
    assert "final_loss" in text and "samples_per_s" in text
    assert json.loads(results_text(tmp_path / "run", "json"))[0]["not_separable"] is None


def test_what_cannot_be_told_is_said(tmp_path: Path) -> None:
    text = results_text(make_run(tmp_path / "run", UNCLEAR))
    assert "Cannot tell which row to take. Each of these may be the lowest final_loss:" in text
    rows = json.loads(results_text(tmp_path / "run", "json"))
    assert [row["not_separable"] for row in rows] == [1, 1]
    assert [row["not_separable_from"] for row in rows] == ["float16", "none"]
    assert "3 replicates support no distribution-free claim at 5 % (it takes 6)" in " ".join(
        text.split()
    )


def test_one_replicate_supports_no_recommendation(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", {"none": (0.5,), "float16": (0.9,)})
    text = " ".join(results_text(run).split())
    assert "Cannot tell which row to take: the replicates show no spread." in text
    assert "Measured as the lowest final_loss: none." in text


def test_without_a_candidate_the_reason_is_told(tmp_path: Path) -> None:
    logs = [
        Log(spec=make_spec(replicate=number), accuracies=(0.1, 0.2 + 0.5 * (number == 0)))
        for number in range(2)
    ]
    run = write_run(tmp_path / "run", logs, {"time_to_target_s": "minimize"})
    text = results_text(run)
    assert "No row to take: 0 of 2 replicates reached the target." in text
    assert "missed (0/2)" in text


def test_columns_and_wide(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", CLEAR)
    text = results_text(run, columns=["round_p50_s", "reached"])
    assert "round_p50_s" in text and "3/3" in text and "pareto_" not in text.split("★ on")[0]
    assert "git_revision: abc1234" in results_text(run, wide=True)
    rows = json.loads(results_text(run, "json", columns=["final_loss", "n"]))
    assert list(rows[0]) == [
        *("configuration", "scenario", "final_loss", "final_loss_low", "final_loss_high", "n")
    ]
    with pytest.raises(ConfigError) as caught:
        results_text(run, columns=["final_los"], sort="samples")
    assert {problem.nearest for problem in caught.value.problems} >= {"final_loss"}


# -- differences -------------------------------------------------------------------------------


def test_differences_are_paired_by_seed(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", CLEAR)
    alone, paired = (json.loads(results_text(run, "json", versus=v)) for v in (None, "float16"))
    assert [row["configuration"] for row in paired] == ["none", "uniform8"]
    first = paired[0]
    assert (first["baseline"], first["pairs"], first["scale"]) == ("float16", 3, "difference")
    assert first["value"] == pytest.approx(-0.4033333)
    assert first["high"] - first["low"] < 0.1 * (
        alone[0]["final_loss_high"] - alone[0]["final_loss_low"]
    )
    assert first["p_adjusted"] < 0.05
    read = list(csv.DictReader(io.StringIO(results_text(run, "csv", versus="float16"))))
    assert [line["configuration"] for line in read] == ["none", "uniform8"]
    frame = load(run).differences("float16")
    assert list(frame["value"]) == [row["value"] for row in paired]


def test_the_table_of_differences_marks_what_differs(tmp_path: Path) -> None:
    text = results_text(make_run(tmp_path / "run", CLEAR), versus="first")
    assert text.startswith("study: 2 rows against none\n")
    assert re.search(r"float16 +\+0\.403 ± 0\.014 \* +3/3", text)
    assert "differs from the baseline at 5 %" in text
    text = results_text(make_run(tmp_path / "other", UNCLEAR), "md", versus="none")
    assert "**" not in text.split("|", 1)[1]
    assert "1 of 1 comparison does not differ significantly: that is no proof of equality" in text


def test_times_are_compared_as_factors(tmp_path: Path) -> None:
    logs = [
        Log(
            spec=make_spec(trial=trial, replicate=n, configuration=Configuration(codec=codec)),
            seconds=(2.0, factor + 0.1 * n, 0.6, 0.7),
        )
        for trial, (codec, factor) in enumerate({"none": 1.0, "float16": 3.0}.items())
        for n in range(3)
    ]
    run = write_run(tmp_path / "run", logs, {"time_to_target_s": "minimize"})
    (row,) = json.loads(results_text(run, "json", versus="none"))
    assert row["scale"] == "factor" and row["low"] < row["value"] < row["high"]
    assert "[factor]" in results_text(run, versus="none")
    logs[-1].accuracies = (0.1, 0.2)
    run = write_run(tmp_path / "missed", logs, {"time_to_target_s": "minimize"})
    assert "(cut)" in results_text(run, versus="none")


def test_an_unknown_baseline_is_refused_with_the_nearest(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", CLEAR)
    with pytest.raises(ConfigError) as caught:
        results_text(run, versus="flaot16", columns=["n"])
    told = {problem.key: problem for problem in caught.value.problems}
    assert told["--versus"].nearest == "float16"
    assert "interval" in told["--columns"].allowed
    with pytest.raises(ConfigError):
        load(run).differences("flaot16")


@pytest.mark.parametrize("width", [66, 70, 80, 100, 140])
def test_the_default_table_is_one_block_at_any_usual_width(tmp_path: Path, width: int) -> None:
    run = make_run(
        tmp_path / "run", UNCLEAR, {"time_to_target_s": "minimize", "final_loss": "minimize"}
    )
    text = results_text(run, console_width=width)
    lines = text.splitlines()
    assert sum(line.startswith("─") for line in lines) == 1
    assert max(map(len, lines)) <= width
    assert "6 replicates, 3 each" in lines[0]
    left_out = [line for line in lines if line.startswith("Left out at this width")]
    assert ("not_separable" in " ".join(left_out)) == (width <= 70)
    assert not any(line.startswith("  %") for line in lines)


@pytest.mark.parametrize("width", [80, 90, 100, 140])
def test_a_table_with_faults_and_baselines_is_one_block(tmp_path: Path, width: int) -> None:
    """As in a study on spot nodes: baselines fail under faults."""
    logs = [
        Log(
            make_spec(trial=trial, replicate=n, scenario=scenario, baseline=baseline, **settings),
            seconds=(
                2.0,
                20 + trial + 0.3 * n * (trial + 1) if trial is not None else 30 + n,
                0.6,
                0.7,
            ),
            payload=400_000 + 9000 * n * (1 + (trial or 0)),
            state="failed" if failing and (n or scenario == "spot-churn") else "completed",
        )
        for trial, baseline, settings, failing in (
            (0, None, {"configuration": Configuration(powersgd_rank=4)}, False),
            (1, None, {"configuration": Configuration(codec="float16", powersgd_rank=4)}, False),
            (None, "elastic", {}, True),
        )
        for scenario in ("none", "spot-churn")
        for n in range(2)
    ]
    objectives = {"time_to_target_s": "minimize", "payload_bytes_per_sample": "minimize"}
    lines = results_text(write_run(tmp_path / "run", logs, objectives), console_width=width)
    text = lines.splitlines()
    assert sum(line.startswith("─") for line in text) == 1
    assert max(map(len, text)) <= width
    left_out = lines.partition("Left out at this width: ")[2]
    assert ("retention" in left_out) == (width < 140)
    merged = "n_failed" in left_out
    assert merged if width == 80 else not merged or width < 140
    assert re.search(rf"spot-churn( +-)+ +{'0/2' if merged else '0 +2'}\b", lines)
    assert "pareto_" in lines


def test_different_numbers_of_replicates_are_always_shown(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", {"none": (0.5, 0.6, 0.7), "float16": (0.9, 0.8)})
    text = results_text(run, console_width=66)
    title, *rest = text.splitlines()
    assert " each" not in title
    assert any(line.split()[:1] == ["[s]"] or " n " in f"{line} " for line in rest)
