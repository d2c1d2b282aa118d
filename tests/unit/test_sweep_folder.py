from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import rayhive
import rayhive.compression
import rayhive.faults  # both fill registries
from rayhive.errors import ConfigError
from rayhive.spec import SweepConfig, load_sweep
from rayhive.sweep import provenance
from rayhive.sweep.provenance import code_revision, collect, git_state
from rayhive.sweep.run_folder import RunFolder


def study(**fields: Any) -> SweepConfig:
    return SweepConfig.model_validate({"name": "a", "workload": {"name": "digits"}, **fields})


def problems(folder: RunFolder, config: SweepConfig) -> dict[str, str]:
    return {problem.key: problem.allowed for problem in folder.check(config)}


def test_a_new_folder_is_made_with_the_resolved_study_and_provenance(run_dir: Path) -> None:
    config, folder = study(replicates=2), RunFolder(run_dir)
    assert problems(folder, config) == {}
    assert not run_dir.exists()
    with folder.opened(config) as run:
        assert load_sweep(run_dir / "sweep.yaml") == config
        provenance = json.loads((run_dir / "provenance.json").read_text())
    assert provenance["run"] == run
    assert provenance["versions"]["rayhive"] == rayhive.__version__
    assert provenance["hardware"]["cores"] >= 1
    assert provenance["link"] == "none"
    assert not folder.has_trials


def test_a_run_keeps_its_identity_and_its_earlier_sessions(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder(run_dir)
    with folder.opened(study()) as first:
        pass
    before = json.loads((run_dir / "provenance.json").read_text())
    with folder.opened(study()) as second:
        pass
    again = json.loads((run_dir / "provenance.json").read_text())
    assert first == second and "earlier" not in again
    assert again["started"] == before["started"]

    monkeypatch.setattr(rayhive, "__version__", "99")
    with folder.opened(study()):
        pass
    later = json.loads((run_dir / "provenance.json").read_text())
    assert later["versions"]["rayhive"] == "99"
    assert [session["versions"]["rayhive"] for session in later["earlier"]] == [
        before["versions"]["rayhive"]
    ]


def test_two_drivers_do_not_share_a_folder(run_dir: Path) -> None:
    folder, config = RunFolder(run_dir), study()
    with folder.opened(config):
        assert "process" in problems(folder, config)["--out"]
        with pytest.raises(ConfigError, match="no other driver uses"), folder.opened(config):
            pass
    assert problems(folder, config) == {}


def test_the_lock_of_a_dead_driver_is_free(run_dir: Path) -> None:
    script = (
        "import os, sys; from pathlib import Path; from rayhive.spec import SweepConfig;"
        "from rayhive.sweep.run_folder import RunFolder;"
        "config = SweepConfig(name='a', workload={'name': 'digits'});"
        "RunFolder(Path(sys.argv[1])).opened(config).__enter__(); os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", script, str(run_dir)], check=False).returncode < 0
    assert (run_dir / "driver.lock").exists()
    with RunFolder(run_dir).opened(study()):
        pass


@pytest.mark.parametrize(
    ("change", "keys"),
    [
        ({}, set()),
        ({"replicates": 4, "budget": {"trials": 30}}, set()),
        ({"replicates": 2}, {"replicates"}),
        ({"budget": {"trials": 3}}, {"budget.trials"}),
        ({"budget": {"seconds_per_replicate": 3}}, {"budget.seconds_per_replicate"}),
        (
            {"swarm": {"peers": 4}, "seed": 3, "space": {"codec": ["none", "float16"]}},
            {"swarm.peers", "seed", "space.codec"},
        ),
        ({"workload": {"name": "digits", "args": {"width": 8}}}, {"workload.args.width"}),
        ({"storage": "sqlite:///x.db"}, {"storage"}),
        (
            {"objectives": {"final_loss": "minimize"}},
            {f"objectives.{name}" for name in ("final_loss", *study().objectives)},
        ),
    ],
)
def test_another_configuration_is_refused_key_by_key(
    run_dir: Path, change: dict[str, Any], keys: set[str]
) -> None:
    folder = RunFolder(run_dir)
    with folder.opened(study()):
        pass
    assert set(problems(folder, study(**change))) == keys


def test_an_unreadable_study_in_the_folder_is_reported(run_dir: Path) -> None:
    run_dir.mkdir()
    (run_dir / "sweep.yaml").write_text("name: [\n")
    assert "its sweep.yaml is not valid" in problems(RunFolder(run_dir), study())["--out"]


def test_a_folder_with_foreign_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    assert "empty or new" in problems(RunFolder(tmp_path), study())["--out"]


def test_a_folder_that_cannot_be_created_is_reported_before_trying(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("x")
    for path in (file, file / "below", file / "far" / "below"):
        assert f"{file} is a file" in problems(RunFolder(path), study())["--out"]
    with pytest.raises(ConfigError, match="can be written"), RunFolder(file / "x").opened(study()):
        pass


def test_a_folder_without_permission_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root has every permission, so the answer of the system is replaced."""
    monkeypatch.setattr("os.access", lambda path, mode: False)
    assert f"{tmp_path} is not" in problems(RunFolder(tmp_path / "run"), study())["--out"]


def test_git_revisions_are_those_of_a_rayhive_checkout_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def git(*arguments: str) -> None:
        name = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", "-C", str(tmp_path), *name, *arguments], check=True)

    git("init", "-q")
    (tmp_path / "rayhive").mkdir()
    (tmp_path / "rayhive" / "__init__.py").write_text("")
    (tmp_path / "other.txt").write_text("")
    git("add", "other.txt")
    git("commit", "-q", "-m", "x")
    assert git_state(tmp_path) == (None, None)  # an environment inside somebody's repository
    git("add", ".")
    git("commit", "-q", "-m", "y")
    revision, dirty = git_state(tmp_path)
    assert revision is not None and len(revision) == 40 and dirty is False
    (tmp_path / "other.txt").write_text("changed")
    assert git_state(tmp_path) == (revision, True)
    monkeypatch.setattr(provenance, "_CHECKOUT", tmp_path)
    assert code_revision.__wrapped__() == f"{revision} with changes"
    git("commit", "-q", "-a", "-m", "z")
    assert code_revision.__wrapped__() == git_state(tmp_path)[0]


def test_provenance_names_shaped_links() -> None:
    link = {"rate_mbit": 20, "delay_ms": 80}
    classes = {"slow": {"count": 2, "link": link}}
    assert "rate_mbit=20" in collect(study(swarm={"node_classes": classes}))["link"]
