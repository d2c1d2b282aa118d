from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rayhive.errors import ConfigError, Problem
from rayhive.workloads.loading import load_workload

SOURCE = """
from typing import Any

from lightning.pytorch import LightningModule

from rayhive.workloads.base import Target, Workload
from rayhive.workloads.digits import Digits

LIMIT = 3

class Tiny(Digits):
    name = "tiny"

class Strict(Digits):
    name = "strict"
    def __init__(self, *, depth: int, width: int = 8) -> None:
        if depth > LIMIT:
            raise ValueError("too deep")
        super().__init__(width=width)

class Half(Workload):
    name = "half"
    def module(self, seed):
        return None

class Nameless(Digits):
    name = None
    def __init__(self) -> None:
        self.target, self.data = 0.9, "imagined"

def make(width: int = 8) -> Workload:
    return Tiny(width=width)

def unannotated(width: int = 8):
    raise AssertionError("it was called")

class Module(LightningModule):
    pass

def other() -> int:
    return 3
"""


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A module in the current folder, as a user has it beside the study."""
    (tmp_path / "my_workloads.py").write_text(SOURCE)
    (tmp_path / "exiting.py").write_text("raise SystemExit(3)")
    (tmp_path / "broken_workloads.py").write_text("raise OSError('no such disk')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    for name in ("my_workloads", "broken_workloads", "exiting"):
        sys.modules.pop(name, None)


def problems(import_path: str, **args: object) -> tuple[Problem, ...]:
    with pytest.raises(ConfigError) as caught:
        load_workload(None, import_path, args)
    return caught.value.problems


@pytest.mark.parametrize("attribute", ["Tiny", "make"])
def test_a_class_or_an_annotated_function_makes_a_workload(attribute: str) -> None:
    workload = load_workload(None, f"my_workloads:{attribute}", {"width": 12})
    assert workload.name == "tiny"
    assert workload.parameter_shapes()[0] == (12, 1, 3, 3)


def test_a_registered_name_makes_its_workload() -> None:
    assert load_workload("digits").name == "digits"
    with pytest.raises(ConfigError, match=r"workload\.name: 'digit' .* did you mean 'digits'"):
        load_workload("digit")


@pytest.mark.parametrize("pair", [(None, None), ("digits", "my_workloads:Tiny")])
def test_exactly_one_of_name_and_import_is_given(pair: tuple[str | None, str | None]) -> None:
    with pytest.raises(ConfigError, match="exactly one of name and import"):
        load_workload(*pair)


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("my_workloads", "package.module:Attribute"),
        ("my_workloads:", "package.module:Attribute"),
        (":Tiny", "package.module:Attribute"),
        ("my_worklods:Tiny", "No module named 'my_worklods'"),
        ("broken_workloads:Tiny", "OSError: no such disk"),
        ("my_workloads:LIMIT", "a LightningModule, a Workload subclass or a function"),
        ("my_workloads:Target", "a LightningModule, a Workload subclass or a function"),
        ("my_workloads:unannotated", "a LightningModule, a Workload subclass or a function"),
        ("os:system", "a LightningModule, a Workload subclass or a function"),
        ("os.path:join\n", "package.module:Attribute"),
        ("exiting:Tiny", "SystemExit: 3"),
        ("my_workloads:Half", "implements evaluate, train_loader"),
        ("my_workloads:other", "a LightningModule, a Workload subclass or a function"),
        ("my_workloads:Nameless", "name, a string; target, a Target or None; data, 'real' or"),
    ],
)
def test_an_import_that_fails_says_why(path: str, words: str) -> None:
    (problem,) = problems(path)
    assert problem.key == "workload.import"
    assert problem.value == path
    assert words in problem.allowed


def test_an_import_names_what_to_call_and_nothing_else_is_called(tmp_path: Path) -> None:
    """Planning a study with ``import: os:system`` used to run the command."""
    (problem,) = problems("os:system", command=f"touch {tmp_path}/ran")
    assert problem.key == "workload.import"
    assert not (tmp_path / "ran").exists()


def test_a_wrong_attribute_names_the_nearest_workload() -> None:
    (problem,) = problems("my_workloads:Tinny")
    assert problem.nearest == "my_workloads:Tiny"
    assert "Digits, Half, Module, Nameless, Strict, Tiny, make" in problem.allowed


def test_arguments_are_checked_against_the_signature() -> None:
    found = {problem.key: problem for problem in problems("my_workloads:Strict", widht=3)}
    assert found.keys() == {"workload.args.widht", "workload.args.depth"}
    assert found["workload.args.widht"].nearest == "width"
    assert found["workload.args.depth"].allowed == "required"


def test_an_exception_in_the_constructor_is_bad_input() -> None:
    (problem,) = problems("my_workloads:Strict", depth=9)
    assert problem.key == "workload.args"
    assert "ValueError: too deep" in problem.allowed


def test_the_workloads_own_complaints_pass_through() -> None:
    assert {problem.key for problem in problems("my_workloads:Tiny", width=5, targt=1)} == {
        "workload.args.width",
        "workload.args.targt",
    }


def test_the_workload_of_the_documentation_trains(tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "docs" / "workloads.md").read_text(encoding="utf-8")
    source = text.split("```python\n")[2].split("```")[0]
    (tmp_path / "my_workloads.py").write_text(source)
    workload = load_workload(None, "my_workloads:MyWorkload", {"samples": 512})
    module = workload.module(seed=0)
    optimizer: Any = module.configure_optimizers()
    loader = workload.train_loader(peer=0, peers=2, batch_size=32, seed=0)
    for number, batch in enumerate(itertools.islice(loader, 60)):
        optimizer.zero_grad()
        module.training_step(batch, number).backward()
        optimizer.step()
    assert workload.target.reached(workload.evaluate(module)["loss"])
