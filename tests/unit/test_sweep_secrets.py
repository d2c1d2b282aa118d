"""Passwords in storage URLs appear neither on disk nor in the output."""

from __future__ import annotations

import sys
from pathlib import Path

import optuna
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from rayhive.cli import main, studies
from rayhive.cli.output import complain
from rayhive.errors import ConfigError, Problem, without_secrets
from rayhive.spec import SweepConfig
from rayhive.sweep import storage
from rayhive.sweep import sweep as sweep_run
from rayhive.sweep.run_folder import RunFolder
from rayhive.sweep.signals import Interrupted, Interruption
from rayhive.sweep.storage import check_storage, expanded, open_study
from rayhive.sweep.sweep import preflight, run_sweep
from rayhive.sweep.target import target_at
from tests.unit.sweep_fakes import Recorder, World
from tests.unit.test_sweep_driver import make_study

SECRET = "s3cr3t-w0rd"
URL = f"postgresql://me:{SECRET}@host:5432/trials?sslmode=require&sslpassword={SECRET}"


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        (URL, "postgresql://me:***@host:5432/trials?sslmode=require&sslpassword=***"),
        ("redis://:pw@host:6379/0", "redis://:***@host:6379/0"),
        ("mysql+pymysql://me:p@ss/word@host/db", "mysql+pymysql://me:***@host/db"),
        ("postgresql://me:${DB_PASSWORD}@host/db", "postgresql://me:${DB_PASSWORD}@host/db"),
        ("postgresql://host:5432/db", "postgresql://host:5432/db"),
        ("postgresql://me@host:5432/db", "postgresql://me@host:5432/db"),
        ("sqlite:////tmp/a@b:c/s.db", "sqlite:////tmp/a@b:c/s.db"),
        ("journal:///tmp/s.log", "journal:///tmp/s.log"),
    ],
)
def test_passwords_are_masked(url: str, shown: str) -> None:
    assert without_secrets(url) == shown == without_secrets(shown)
    assert without_secrets(f"--set 'storage={url}' x") == f"--set 'storage={shown}' x"


@given(
    user=st.from_regex(r"[a-z]{0,8}", fullmatch=True),
    password=st.from_regex(r"[A-Za-z0-9@/:$%!.-]{1,20}", fullmatch=True),
)
def test_a_masked_text_holds_no_password(user: str, password: str) -> None:
    assert without_secrets(f"redis://{user}:{password}@host/0") == f"redis://{user}:***@host/0"


def test_a_password_is_not_on_disk_and_not_printed(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    memory = optuna.storages.InMemoryStorage()
    opened: list[str] = []

    def open_storage(url: str) -> optuna.storages.BaseStorage:
        opened.append(url)
        return memory

    monkeypatch.setattr(storage, "make_storage", open_storage)
    monkeypatch.setattr(sweep_run, "check_storage", lambda url: ())
    given, progress = make_study(storage=URL), Recorder()
    with Interruption() as interruption:
        run_sweep(given, run_dir, progress, interruption, target_at(connect=World().connect))
    assert opened == [URL]
    assert not [path for path in run_dir.rglob("*.*") if SECRET in path.read_text("utf-8")]
    written = yaml.safe_load((run_dir / "sweep.yaml").read_text())["storage"]
    assert written == without_secrets(URL)
    assert SECRET not in repr(given) + str(progress.events)

    # the same study goes on, also with another password, and not in another database
    same = make_study(storage=URL.replace(SECRET, "newer"))
    with Interruption() as interruption:
        run_sweep(same, run_dir, Recorder(), interruption, target_at(connect=World().connect))
    with pytest.raises(ConfigError) as caught:
        other = make_study(storage=URL.replace("host", "other"))
        preflight(other, RunFolder(run_dir), target_at())
    assert "storage" in str(caught.value) and SECRET not in str(caught.value)
    with pytest.raises(ConfigError, match="with its password: a run folder keeps none"):
        monkeypatch.undo()
        masked = make_study(storage=written)
        preflight(masked, RunFolder(run_dir), target_at())

    complain(f"to go on: rayhive sweep --set storage={URL}")
    assert SECRET not in capsys.readouterr().err


def test_an_older_run_folder_loses_its_password(run_dir: Path) -> None:
    config = SweepConfig(name="a", workload={"name": "digits"}, storage=URL)
    assert SECRET not in config.to_yaml()
    run_dir.mkdir()
    data = config.model_dump(mode="json", by_alias=True)
    (run_dir / "sweep.yaml").write_text(yaml.safe_dump(data))
    folder = sweep_run.RunFolder(run_dir)
    assert not list(folder.check(config))
    with folder.opened(config):
        assert SECRET not in (run_dir / "sweep.yaml").read_text()


def test_a_variable_of_the_environment_stands_for_a_password(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = "sqlite:///${STUDY_FOLDER}/s.db"
    (problem,) = check_storage(url)
    assert "not set: STUDY_FOLDER" in problem.allowed
    monkeypatch.setenv("STUDY_FOLDER", str(tmp_path))
    assert not list(check_storage(url))
    assert expanded("redis://:${STUDY_FOLDER}@host") == f"redis://:{tmp_path}@host"
    config = SweepConfig(name="a", workload={"name": "digits"}, storage=url)
    open_study(config, tmp_path, "run")
    assert (tmp_path / "s.db").exists() and "${STUDY_FOLDER}" in config.to_yaml()


def test_errors_of_a_database_hold_no_password(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(url: str) -> None:
        raise OSError(f"no login with {SECRET} at {url}")

    monkeypatch.setattr(storage, "make_storage", refuse)
    config = SweepConfig(name="a", workload={"name": "digits"}, storage=URL)
    with pytest.raises(ConfigError, match="no login with") as caught:
        open_study(config, tmp_path, "run")
    assert SECRET not in str(caught.value)
    assert SECRET not in str(Problem("storage", URL, f"something else than {URL}"))


def test_a_damaged_journal_is_reported(tmp_path: Path) -> None:
    (tmp_path / "s.log").write_text("no journal\n")
    config = SweepConfig(name="a", workload={"name": "digits"}, storage=f"journal:{tmp_path}/s.log")
    with pytest.raises(ConfigError, match="storage"):
        open_study(config, tmp_path, "run")


def test_the_resume_command_holds_no_password(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(*arguments: object, **options: object) -> None:
        raise Interrupted("interrupted by SIGINT", 2)

    file = tmp_path / "study.yaml"
    file.write_text(yaml.safe_dump({"name": "a", "workload": {"name": "digits"}}))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sweep_run, "run_sweep", stop)
    command = ["sweep", str(file), "--set", f"storage={URL}"]
    monkeypatch.setattr(sys, "argv", ["rayhive", *command])
    assert studies.command_of_process()[-1] == f"storage={URL}"
    assert main(command) == 130
    said = capsys.readouterr()
    assert "rayhive sweep" in said.err and SECRET not in said.err + said.out
