"""Results of a run folder: rows, data frames, Parquet files and the Pareto front."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from rayhive.columns import group_columns, metric_columns, replicate_columns
from rayhive.errors import ConfigError, RayhiveError
from rayhive.metrics.groups.pareto import Pareto
from rayhive.report.results import (
    configuration_frame,
    configuration_types,
    load_results,
    replicate_frame,
)
from rayhive.spec import Configuration
from tests.fixtures.logs import START, Log, make_spec, write_run


def study(run: Path) -> Path:
    """Two configurations of two replicates, and one that diverged."""
    logs = [
        Log(spec=make_spec(trial=trial, replicate=replicate, configuration=configuration))
        for trial, configuration in enumerate([Configuration(), Configuration(codec="float16")])
        for replicate in (0, 1)
    ]
    bad = Log(spec=make_spec(trial=2, configuration=Configuration(codec="uniform8")))
    bad.state = "diverged"
    return write_run(run, [*logs, bad])


def test_a_run_is_read_from_its_events(tmp_path: Path) -> None:
    results = load_results(study(tmp_path / "run"))
    assert results.name == "study"
    assert results.objectives == {
        "time_to_target_s": "minimize",
        "payload_bytes_per_sample": "minimize",
    }
    assert list(results.replicates["trial"]) == [0, 0, 1, 1, 2]
    table = results.configurations
    assert list(table["configuration"]) == ["none", "float16", "uniform8"]
    assert list(table["n"]) == [2, 2, 0]
    assert list(table["n_failed"]) == [0, 0, 1]
    assert list(table["pareto"]) == [True, True, False]


def test_deleting_the_parquet_files_changes_nothing(tmp_path: Path) -> None:
    run = study(tmp_path / "run")
    load_results(run).write_parquet(run)
    files = {path.name for path in run.iterdir()}
    assert files == {"sweep.yaml", "trials", "trials.parquet", "configurations.parquet"}
    before = {name: pd.read_parquet(run / name) for name in files if name.endswith(".parquet")}
    for name in before:
        (run / name).unlink()
    load_results(run).write_parquet(run)
    for name, frame in before.items():
        pd.testing.assert_frame_equal(pd.read_parquet(run / name), frame)


def test_parquet_files_are_replaced_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = study(tmp_path / "run")
    load_results(run).write_parquet(run)
    before = (run / "trials.parquet").read_bytes()

    def tear(frame: pd.DataFrame, path: str, index: bool) -> None:
        Path(path).write_bytes(b"half")
        raise OSError("no space left")

    monkeypatch.setattr(pd.DataFrame, "to_parquet", tear)
    with pytest.raises(OSError, match="no space"):
        load_results(run).write_parquet(run)
    assert (run / "trials.parquet").read_bytes() == before
    assert not [path for path in run.iterdir() if path.name.startswith(".")]


def test_column_types_do_not_depend_on_the_values(tmp_path: Path) -> None:
    results = load_results(study(tmp_path / "run"))
    logged = metric_columns(results.rows)
    assert [column.name for column in logged] == ["metric.accuracy"]
    assert list(results.configurations.columns) == list(configuration_types(results.folded))
    assert list(results.replicates.columns) == [item.name for item in replicate_columns(logged)]
    fixed = results.configurations[list(configuration_types())]
    assert (configuration_frame([]).dtypes == fixed.dtypes).all()
    fixed = results.replicates[[column.name for column in replicate_columns()]]
    assert (replicate_frame([]).dtypes == fixed.dtypes).all()
    both = pd.concat([configuration_frame([]), results.configurations])
    assert (both[results.configurations.columns].dtypes == results.configurations.dtypes).all()
    assert "object" not in set(map(str, results.configurations.dtypes))


def test_peers_whose_tensors_were_refused_are_named_in_the_parquet_files(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [Log(), Log(spec=make_spec(replicate=1))])
    log = run / "trials" / "0" / "r0-none" / "events.jsonl"
    refusal = {"round": 2, "offender": "peer-1", "reason": "norm"}
    event = {"kind": "rejected", "t": START + 3.0, "peer": "peer-0", **refusal}
    with log.open("a", encoding="utf-8") as file:
        file.write(json.dumps(event) + "\n")
    results = load_results(run)
    results.write_parquet(run)
    replicates = pd.read_parquet(run / "trials.parquet")["rejected_peers"]
    assert list(replicates.fillna("")) == ["peer-1 1", ""]
    (told,) = pd.read_parquet(run / "configurations.parquet")["rejected_peers"]
    assert told == "peer-1 1"


def test_intervals_follow_their_column_and_identities_lead() -> None:
    names = list(configuration_types())
    at = names.index("final_loss")
    assert names[at : at + 3] == ["final_loss", "final_loss_low", "final_loss_high"]
    assert "faults_fired_low" not in names
    assert replicate_columns()[:6] == group_columns("replicate")


def test_a_replicate_that_was_run_again_counts_once(tmp_path: Path) -> None:
    """A trial that a dead driver left unfinished is run again with another number."""
    orphan = Log(spec=make_spec(trial=0), state=None)
    kept = Log(spec=make_spec(trial=0, replicate=1), losses=(1.0, 0.9))
    again = [
        Log(spec=make_spec(trial=5, attempt=1, git_revision="other"), losses=(1.0, 0.3)),
        Log(spec=make_spec(trial=5, replicate=1, attempt=1), state=None, losses=(1.0, 0.1)),
    ]
    results = load_results(write_run(tmp_path / "run", [orphan, kept, *again]))
    assert list(results.replicates["trial"]) == [0, 5]
    assert list(results.replicates["attempt"]) == [0, 1]
    assert list(results.replicates["git_revision"]) == ["abc1234", "other"]
    (row,) = results.folded
    assert row["n"] == 2
    assert row["final_loss"] == pytest.approx((0.91 + 0.31) / 2)


def test_folders_without_a_replicate_are_ignored(tmp_path: Path) -> None:
    run = study(tmp_path / "run")
    (run / "trials" / "0" / "notes").mkdir()
    (run / "trials" / "9" / "r0-none").mkdir(parents=True)
    (run / "trials" / "0" / "a file").write_text("")
    assert len(load_results(run).rows) == 5


def test_a_run_without_its_study_has_no_pareto_front(tmp_path: Path) -> None:
    run = study(tmp_path / "run")
    (run / "sweep.yaml").unlink()
    results = load_results(run)
    assert results.name == "run"
    assert results.configurations["pareto"].isna().all()


def test_an_unreadable_study_is_an_error(tmp_path: Path) -> None:
    run = study(tmp_path / "run")
    (run / "sweep.yaml").write_text("a: [")
    with pytest.raises(RayhiveError, match=r"sweep\.yaml"):
        load_results(run)


def test_the_error_for_a_wrong_folder_names_the_nearest_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # a runs/ of the user's own would be searched, too
    study(tmp_path / "quickstart")
    study(tmp_path / "baseline")
    with pytest.raises(ConfigError) as caught:
        load_results(tmp_path / "quikstart")
    (problem,) = caught.value.problems
    assert problem.nearest == str(tmp_path / "quickstart")
    assert str(tmp_path / "baseline") in problem.allowed
    with pytest.raises(ConfigError, match="quickstart"):
        load_results(tmp_path)


def test_the_error_without_runs_names_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="a run folder") as caught:
        load_results(tmp_path / "nothing" / "here")
    assert caught.value.problems[0].nearest is None


def row(time: float | None, payload: float, **fields: object) -> dict[str, object]:
    conditions = {"scenario": "none", "workload": "digits", "peers": 2, "link": None}
    row = {"time_to_target_s": time, "payload_bytes_per_sample": payload, "n": 2, "reached": 2}
    row["n_failed"] = 0
    return {**conditions, **row, **fields}


OBJECTIVES = {"time_to_target_s": "minimize", "payload_bytes_per_sample": "minimize"}


def front(rows: list[dict[str, object]], objectives: dict[str, str] = OBJECTIVES) -> list[object]:
    Pareto().rank(rows, objectives, ())  # type: ignore[arg-type]
    return [row["pareto"] for row in rows]


def test_the_front_has_the_rows_that_are_not_dominated() -> None:
    rows = [row(1.0, 9.0), row(2.0, 5.0), row(2.0, 6.0), row(3.0, 5.0), row(9.0, 1.0)]
    assert front(rows) == [True, True, False, False, True]


def test_equal_rows_do_not_dominate_each_other() -> None:
    assert front([row(1.0, 1.0), row(1.0, 1.0)]) == [True, True]


def test_maximised_objectives_are_compared_by_their_direction() -> None:
    rows = [{**row(1.0, 1.0), "goodput": value} for value in (0.5, 0.9)]
    assert front(rows, {"goodput": "maximize"}) == [False, True]


def test_a_row_without_an_objective_is_not_on_the_front() -> None:
    assert front([row(None, 0.1, reached=0), row(2.0, 5.0)]) == [False, True]
    censored = row(0.1, 0.1, reached=1)
    assert front([censored, row(2.0, 5.0)]) == [False, True]


def test_rows_under_other_conditions_do_not_compete() -> None:
    rows = [row(1.0, 1.0), row(2.0, 2.0, scenario="kill-one"), row(3.0, 3.0, peers=4)]
    assert front(rows) == [True, True, True]


def test_without_objectives_there_is_no_front() -> None:
    assert front([row(1.0, 1.0)], {}) == [None]


def test_importing_the_report_is_light() -> None:
    heavy = ("pandas", "rich", "scipy", "torch", "ray", "optuna", "hivemind")
    code = (
        "import sys, rayhive, rayhive.metrics.rows, rayhive.report.results;"
        f"print([name for name in {heavy!r} if name in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
