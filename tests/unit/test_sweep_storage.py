from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import optuna
import pytest

from rayhive.errors import ConfigError, RayhiveError
from rayhive.spec import Configuration, Space, SweepConfig
from rayhive.sweep import storage
from rayhive.sweep.resolve import WorkloadFacts, resolve
from rayhive.sweep.run_folder import RunFolder
from rayhive.sweep.samplers import make_sampler
from rayhive.sweep.space import SearchSpace
from rayhive.sweep.storage import check_storage, open_study, usable
from rayhive.sweep.sweep import open_book
from rayhive.sweep.trial_book import REASKS, TrialBook
from tests.unit.sweep_fakes import SHAPES


def config(**fields: Any) -> SweepConfig:
    return SweepConfig.model_validate({"name": "a", "workload": {"name": "digits"}, **fields})


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("sqlite:///{folder}/study.db", None),
        ("journal:///{folder}/study.log", None),
        ("journal:study.log", None),
        ("sqlite:///{folder}/no/where/study.db", "in a folder that exists"),
        ("journal:///{folder}/no/where", "in a folder that exists"),
        ("journal:", "journal:///FILE"),
        ("sqlite://", "outlives the driver"),
        ("sqlite:///:memory:", "outlives the driver"),
        ("nonsense", "a storage that Optuna can open"),
        ("redshift9://host/db", "a storage that Optuna can open"),
        ("oracle://host/db", "a storage that Optuna can open"),
    ],
)
def test_urls_are_checked_without_opening_them(tmp_path: Path, url: str, said: str | None) -> None:
    found = [problem.allowed for problem in check_storage(url.format(folder=tmp_path))]
    assert len(found) == (said is not None)
    assert said is None or said in found[0]
    assert not list(tmp_path.iterdir())


def test_postgresql_needs_its_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    (problem,) = check_storage("postgresql://me:secret@host/trials")
    assert "install psycopg[binary], or rayhive with its extra postgresql" in problem.allowed
    assert "secret" not in str(problem)


def test_redis_needs_its_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "redis", None)
    (problem,) = check_storage("redis://localhost:6379")
    assert "install redis" in problem.allowed


def test_a_redis_that_does_not_answer_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class RedisError(Exception):
        """Derived from Exception alone, as in redis-py."""

    def refuse(url: str) -> Any:
        raise RedisError("Connection refused")

    exceptions = SimpleNamespace(RedisError=RedisError)
    monkeypatch.setitem(sys.modules, "redis", SimpleNamespace(exceptions=exceptions))
    monkeypatch.setattr("rayhive.sweep.storage.make_storage", refuse)
    url = "redis://localhost:6379"
    with pytest.raises(ConfigError, match="Connection refused"):
        open_study(config(storage=url), tmp_path, "run-1")
    with pytest.raises(RayhiveError, match="can't be used: Connection refused"), usable(url):
        refuse(url)


@pytest.mark.parametrize("url", [None, "sqlite:///{folder}/s.db", "journal:///{folder}/s.log"])
def test_a_reopened_study_has_its_trials(tmp_path: Path, url: str | None) -> None:
    study = config(storage=url and url.format(folder=tmp_path))
    first = open_study(study, tmp_path, "run-1")
    first.tell(first.ask(), [1.0, 2.0])
    again = open_study(study, tmp_path, "run-1")
    assert [trial.values for trial in again.get_trials()] == [[1.0, 2.0]]
    assert [direction.name for direction in again.directions] == ["MINIMIZE", "MINIMIZE"]
    assert again.metric_names == list(study.objectives)
    assert again.trials_dataframe()[f"values_{next(iter(study.objectives))}"].tolist() == [1.0]


def test_a_study_of_another_run_folder_is_not_continued(tmp_path: Path) -> None:
    study = config(storage=f"journal:///{tmp_path}/s.log")
    open_study(study, tmp_path / "one", "run-1")
    with pytest.raises(ConfigError, match="of another run folder"):
        open_study(study, tmp_path / "two", "run-2")
    open_study(config(name="b", storage=study.storage), tmp_path / "two", "run-2")


@pytest.mark.parametrize("url", ["sqlite:///{folder}/s.db", "journal:///{folder}/s.log"])
def test_of_two_folders_that_start_at_once_one_gets_the_study(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = config(storage=url.format(folder=tmp_path))
    set_user_attr, found = optuna.Study.set_user_attr, {}

    def begin(run: str) -> None:
        try:
            open_study(study, tmp_path / run, run)
            found[run] = "its own"
        except ConfigError as error:
            found[run] = error.problems[0].allowed

    second = threading.Thread(target=begin, args=["run-2"])

    def set_late(self: optuna.Study, key: str, value: Any) -> None:
        if value == "run-1":  # the second one begins between the creation and the claim
            second.start()
            second.join(0.5)
        set_user_attr(self, key, value)

    monkeypatch.setattr(optuna.Study, "set_user_attr", set_late)
    begin("run-1")
    second.join()
    assert found["run-1"] == "its own"
    assert "without a study 'a' of another run folder" in found["run-2"]


def test_an_empty_study_whose_creator_died_before_the_claim_is_taken_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "CLAIM_S", 0.2)
    study = config(storage=f"sqlite:///{tmp_path}/s.db")
    optuna.create_study(
        storage=study.storage, study_name="a", directions=list(study.objectives.values())
    )
    open_study(study, tmp_path / "one", "run-1")
    with pytest.raises(ConfigError, match="of another run folder"):
        open_study(study, tmp_path / "two", "run-2")


def test_a_study_with_trials_of_nobody_is_refused_at_once(tmp_path: Path) -> None:
    study = config(storage=f"sqlite:///{tmp_path}/s.db")
    optuna.create_study(
        storage=study.storage, study_name="a", directions=list(study.objectives.values())
    ).ask()
    began = time.monotonic()
    with pytest.raises(ConfigError, match="of another run folder"):
        open_study(study, tmp_path / "one", "run-1")
    assert time.monotonic() - began < storage.CLAIM_S


def test_a_storage_that_cannot_be_opened_is_reported(tmp_path: Path) -> None:
    (tmp_path / "s.db").write_text("this is no database, and long enough to be seen as none\n" * 9)
    with pytest.raises(ConfigError, match="storage"):
        open_study(config(storage=f"sqlite:///{tmp_path}/s.db"), tmp_path, "run")


def test_a_storage_without_the_trials_of_the_folder_is_refused(run_dir: Path) -> None:
    study = resolve(config(), workload=WorkloadFacts(SHAPES, 32, "real"))
    run = RunFolder(run_dir)
    run.replicate(0, 0, "none").mkdir(parents=True)
    with pytest.raises(ConfigError, match="the storage with the trials of"):
        open_book(study, run, "run")


def test_a_resumed_sampler_does_not_repeat_itself() -> None:
    def draws(trials: int) -> list[float]:
        study = optuna.create_study(sampler=make_sampler("tpe", 0, trials))
        return [study.ask().suggest_float("x", 0, 1) for _ in range(3)]

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    assert draws(0) == draws(0) != draws(3)


def make_book(space: Space, study: optuna.Study, *enqueue: Configuration) -> TrialBook:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return TrialBook(study, SearchSpace(space, SHAPES), enqueue, seed=0)


def test_random_draws_replace_repeated_suggestions() -> None:
    class Stuck(optuna.samplers.BaseSampler):
        """Always suggests the first choice."""

        def infer_relative_search_space(self, study: Any, trial: Any) -> dict[str, Any]:
            return {}

        def sample_relative(self, study: Any, trial: Any, search_space: Any) -> dict[str, Any]:
            return {}

        def sample_independent(self, study: Any, trial: Any, name: str, distribution: Any) -> Any:
            return distribution.choices[0]

    study = optuna.create_study(sampler=Stuck())
    book = make_book(Space(codec=["none", "float16", "uniform8"]), study)
    found = []
    while (record := book.next()) is not None:
        book.tell(record, [1.0])
        found.append(record.configuration.codec)
    assert found[0] == "none" and sorted(found) == ["float16", "none", "uniform8"]
    assert book.duplicates == 2 * REASKS
    complete = [trial for trial in study.get_trials() if trial.state.name == "COMPLETE"]
    assert sorted(trial.params["codec"] for trial in complete) == sorted(found)


def test_the_sampler_ignores_duplicates() -> None:
    """TPE learns from each distinct configuration once."""
    study = optuna.create_study(sampler=make_sampler("tpe", 0, 0))
    same = [Configuration(codec="size_adaptive", threshold=10**n) for n in (5, 6, 7)]
    book = make_book(Space(codec=["none"]), study, *same, Configuration())
    records = []
    while (record := book.next()) is not None:
        records.append(record)
        book.tell(record, [1.0])
    assert [record.number for record in records] == [0, 3]
    states = [trial.state.name for trial in study.get_trials()]
    assert states == ["COMPLETE", "FAIL", "FAIL", "COMPLETE"]


def test_trials_of_a_dead_driver_are_finished() -> None:
    study = optuna.create_study(sampler=make_sampler("tpe", 0, 0))
    space = Space(codec=["none", "float16"])
    study.ask()  # it died before it knew what it had asked for
    asked = make_book(space, study).next()
    assert asked is not None and asked.number == 1
    book = make_book(space, study)
    assert [(record.number, record.reported) for record in book.records] == [(1, False)]
    assert book.records[0].configuration == asked.configuration
    trials = study.get_trials()
    assert trials[0].state.name == "FAIL" and trials[0].user_attrs == {"orphan": True}


def test_the_sampler_learns_from_enqueued_values_in_the_space() -> None:
    study = optuna.create_study(sampler=make_sampler("tpe", 0, 0))
    inside = Configuration(codec="float16", delay="state")
    outside = Configuration(codec="uniform8", delay="state")
    space = Space(codec=["none", "float16"], delay=["none", "state"])
    book = make_book(space, study, inside, outside)
    assert [book.next().configuration for _ in range(2)] == [inside, outside]  # type: ignore[union-attr]
    params = [trial.params for trial in study.get_trials()]
    assert params == [{"codec": "float16", "delay": "state"}, {"delay": "state"}]


def test_a_second_driver_that_has_told_a_trial_is_named() -> None:
    study = optuna.create_study(sampler=make_sampler("tpe", 0, 0))
    space = Space(codec=["none", "float16"])
    book = make_book(space, study)
    record = book.next()
    assert record is not None
    other = make_book(space, study)  # of a copy of the run folder
    other.tell(other.records[0], [1.0])
    with pytest.raises(RayhiveError, match="trial 0 has got its values from another driver"):
        book.tell(record, [2.0])
