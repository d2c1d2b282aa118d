"""Studies that a reader would write, and that were refused or taken wrongly before."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from rayhive.cli import main
from rayhive.errors import ConfigError
from rayhive.spec import SweepConfig, WorkloadConfig
from rayhive.sweep.provenance import _data_digests
from rayhive.sweep.resolve import WorkloadFacts, resolve
from rayhive.sweep.resumption import differences
from rayhive.sweep.storage import check_storage, open_study
from rayhive.workloads.loading import load_workload
from tests.fixtures.logs import Log, write_run
from tests.unit.sweep_fakes import SHAPES

FACTS = WorkloadFacts(SHAPES, 32, "real")
BASE: dict[str, Any] = {
    "name": "study",
    "workload": {"name": "digits"},
    "swarm": {"peers": 2, "target_batch_size": 64},
}


def config(**fields: Any) -> SweepConfig:
    return resolve({**BASE, **fields}, workload=FACTS).config


# -- order of what is listed -------------------------------------------------------------------


def test_the_order_of_node_classes_is_kept_when_a_study_is_resumed() -> None:
    classes = {"fast": {"count": 1}, "slow": {"count": 1, "preemptible": True}}

    def study(names: Mapping[str, Any]) -> SweepConfig:
        return config(swarm={**BASE["swarm"], "node_classes": names})

    before, now = study(classes), study(dict(reversed(classes.items())))
    assert not list(differences(before, before, Path("run")))
    (problem,) = differences(before, now, Path("run"))
    assert problem.key == "swarm.node_classes" and "in the order fast, slow" in str(problem)


def test_the_order_of_objectives_is_that_of_the_values_in_the_storage(tmp_path: Path) -> None:
    names = {"time_to_target_s": "minimize", "samples_per_s": "maximize"}
    first, swapped = config(objectives=names), config(objectives=dict(reversed(names.items())))
    open_study(first, tmp_path, "run")
    open_study(swapped, tmp_path, "run")  # nothing was told yet
    study = open_study(first, tmp_path, "run")
    study.tell(study.ask(), [10.0, 500.0])
    with pytest.raises(ConfigError, match=r"in the order time_to_target_s, samples_per_s"):
        open_study(swapped, tmp_path, "run")
    assert open_study(first, tmp_path, "run").metric_names == list(names)


# -- rounds and the budget ---------------------------------------------------------------------


def test_a_round_of_an_enqueued_configuration_fits_into_the_budget() -> None:
    budget = {"samples_per_replicate": 1024}
    assert config(budget=budget, enqueue=[{}, {"local_steps": 16}])
    with pytest.raises(ConfigError) as caught:
        config(budget=budget, enqueue=[{}, {"local_steps": 100}], space={"local_steps": [17]})
    assert [problem.key for problem in caught.value.problems] == [
        "space.local_steps",
        "enqueue.1.local_steps",
    ]


# -- numbers with an exponent ------------------------------------------------------------------


@pytest.mark.parametrize("text", ["7e-1", "[1e-1, 7e-1]", "{low: 1e-1, high: 7e-1}"])
def test_text_like_1e_3_is_a_number_in_a_space(text: str) -> None:
    space = yaml.safe_load(f"{{local_steps: 4, outer_lr: {text}}}")
    found = config(space=space).space.outer_lr
    highest = max(found) if isinstance(found, tuple) else found.high
    assert highest == pytest.approx(0.7)


# -- storages ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "url", ["postgresql://u:p@host:abc/db", "postgresql://u:p@[::1/db", "mysql://u:p@host:x/db"]
)
def test_a_malformed_storage_is_a_mistake_in_the_study(url: str) -> None:
    (problem,) = check_storage(url)
    assert problem.key == "storage" and ":p@" not in str(problem)


# -- the user's own workload -------------------------------------------------------------------

SOURCE = """
import numpy as np

from rayhive.workloads.base import Target
from rayhive.workloads.digits import Digits

MEAN = np.array([0.1, 0.2, 0.3])

class Plain(Digits):
    name = "plain"

class Aimless(Digits):
    name = "aimless"
    def __init__(self):
        super().__init__()
        self.target = None

class Other(Digits):
    name = "other"
    def __init__(self):
        super().__init__()
        self.target = Target("acc", 0.9, "max")

class Empty(Digits):
    name = "empty"
    default_batch_size = 0

class Silent(Digits):
    name = "silent"
    def evaluate(self, module, device=None):
        return {"accuracy": 0.5}
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    (tmp_path / "given_workloads.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield "given_workloads"
    sys.modules.pop("given_workloads", None)


@pytest.mark.parametrize("name", ["Plain", "Aimless"])
def test_arrays_beside_a_workload_and_no_target_are_legal(module: str, name: str) -> None:
    workload = load_workload(None, f"{module}:{name}", {})
    assert isinstance(sys.modules[module].MEAN, np.ndarray)
    given = {"workload": {"import": f"{module}:{name}"}, "objectives": {"final_loss": "minimize"}}
    study = resolve({**BASE, **given})
    assert study.workload.batch_size == workload.default_batch_size


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("Other", "a workload whose evaluate returns acc; it returns "),
        ("Silent", "a workload whose evaluate returns loss; it returns accuracy"),
        ("Empty", "default_batch_size, a number of samples"),
    ],
)
def test_what_a_workload_lacks_is_told_before_anything_starts(
    module: str, name: str, told: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve({**BASE, "workload": {"import": f"{module}:{name}"}})
    assert told in str(caught.value)


# -- fingerprints of data ----------------------------------------------------------------------


def test_files_of_one_name_in_two_folders_have_their_own_fingerprints(tmp_path: Path) -> None:
    files = [tmp_path / folder / "data.bin" for folder in ("a", "b")]
    for file in files:
        file.parent.mkdir()
        file.write_text(file.parent.name)
    workload = WorkloadConfig(name="digits", args={"files": list(map(str, files))})
    before = _data_digests(workload, [])
    files[0].write_text("changed")
    after = _data_digests(workload, [])
    assert list(before) == ["args.files/data.bin", "args.files/data.bin (2)"] == list(after)
    assert [before[key] == after[key] for key in before] == [False, True]


@pytest.mark.parametrize("text", ["/", "..", "."])
def test_a_folder_around_the_working_directory_is_no_data(text: str) -> None:
    assert _data_digests(WorkloadConfig(name="digits", args={"separator": text}), []) == {}


# -- options -----------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["report", "trace"])
@pytest.mark.parametrize(
    ("out", "told"), [("nowhere/file", "a folder that exists"), (".", "this is a folder")]
)
def test_a_file_that_cannot_be_written_is_a_mistake(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: str,
    out: str,
    told: str,
) -> None:
    write_run(tmp_path / "run", [Log()])
    monkeypatch.chdir(tmp_path)
    assert main([command, "run", "--out", out]) == 2
    shown = capsys.readouterr().err
    assert "--out" in shown and told in " ".join(shown.split())
    assert os.listdir(tmp_path) == ["run"]


def test_a_scalar_as_enqueue_is_a_mistake_in_a_scenario_s_study(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("enqueue: 3\n")
    assert main(["scenario", "show", "kill-one", "--config", str(file)]) == 2
    assert "enqueue" in capsys.readouterr().err
