"""Every command of README and of the documentation is taken, on a cluster without processes.

A command that needs more, such as a cluster or a testbed, has a test elsewhere that runs it. Sweeps
of the experiments measure one replicate of each row.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import yaml

import rayhive.sweep.target
from rayhive.cli import main
from rayhive.cluster.node import capabilities
from rayhive.cluster.testbed import lifecycle
from rayhive.faults.target import CAPABILITIES
from tests.fixtures.pages import DOCS, steps
from tests.unit.sweep_fakes import TINY, World

ROOT = Path(__file__).parents[2]
#: docs/extending.md speaks of parts that test_extending_copy.py adds to a copy.
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted({*DOCS.glob("*.md")} - {DOCS / "extending.md"}),
    *sorted((DOCS / "results").glob("*.md")),
]
_FENCE = re.compile(r"^```[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
#: A command with its arguments; two words alone only name one.
_INLINE = re.compile(r"`(rayhive (?:scenario )?\w+ [^`\n]+)`")
_COMMAND = re.compile(r"([A-Z_]+=\S+ )?(rayhive|make|ray|python|pip) ")
_COMMENT = re.compile(r"\s+# .*$")

#: Words of the pages that stand for something of the reader's.
STAND_FOR = {
    "A": "runs/before",
    "B": "runs/after",
    "FILE": "study.yaml",
    "DIR": "runs/tiny",
    "FOLDER": "exported",
    "TRIAL": "0",
    "TOOL": "tensorboard",
    "NAME": "kill-one",
    "runs/NAME": "runs/tiny",
    "runs/orderings-local-steps": "runs/tiny",
    "runs/tradeoffs": "runs/tiny",
}

#: Starts of commands -> the test that runs them, or the file that has to exist.
ELSEWHERE = {
    "rayhive testbed": "tests/integration/test_testbed_lifecycle.py",
    "rayhive train": "tests/integration/test_train_command.py",
    "rayhive doctor": "tests/unit/test_cli_commands.py",
    "rayhive stop": "tests/unit/test_cli_commands.py",
    "rayhive status --address": "tests/unit/test_cli_commands.py",
    "rayhive replay": "tests/unit/test_cli_replay.py",
    "rayhive export": "tests/unit/test_report_loggers.py",
    "rayhive report --watch": "tests/unit/test_report_command.py",
    "pip install": "pyproject.toml",
    "python train.py": "tests/integration/test_documented_usages.py",
    "ray job submit": "tests/integration/test_cluster_swarm.py",
    "ray submit": "tests/unit/test_cluster_manifests.py",
}


def commands(text: str) -> Iterator[str]:
    """Yield the commands of a page: of blocks of code, and of its lines."""
    for block in _FENCE.findall(text):
        lines = iter(block.splitlines())
        for line in lines:
            found = _COMMENT.sub("", line.removeprefix("$ "))
            if not _COMMAND.match(found):
                continue
            while found.endswith("\\") or found.count("'") % 2:
                found = found.removesuffix("\\") + " " + next(lines).strip()
            yield re.sub(r"^[A-Z_]+=\S+ ", "", " ".join(found.split()))
    yield from _INLINE.findall(_FENCE.sub("", text))


def cases() -> Iterator[object]:
    """Yield every command once, with the first page that has it."""
    seen = set()
    for page in PAGES:
        for command in commands(page.read_text(encoding="utf-8")):
            if command not in seen:
                seen.add(command)
                yield pytest.param(command, id=f"{page.stem}: {command[:60]}")


def words(command: str) -> list[str]:
    """Return the words of a command as a reader would type it, without optional options."""
    typed = re.sub(r" \[-[^][]*\]", "", command).replace("[TRIAL]", "TRIAL")
    typed = re.sub(r" (&|> \S+)$", "", typed)
    return [STAND_FOR.get(word, word) for word in shlex.split(typed, comments=True)]


def shortened(typed: list[str]) -> list[str]:
    """Return the words of a command; a sweep of an experiment has one replicate of each row.

    The sweep of the quickstart goes on with the run of :func:`recorded`.
    """
    if not re.match(r"rayhive sweep experiments/(?!quickstart)", " ".join(typed)):
        return typed
    return [*typed, "--set", "replicates=1"]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a study of the reader's, and the runs that the pages speak of."""
    folder = tmp_path_factory.mktemp("docs")
    study = TINY | {"replicates": 2, "baselines": ["ddp"], "storage": None}
    (folder / "study.yaml").write_text(yaml.safe_dump(study))
    (folder / "experiments").symlink_to(ROOT / "experiments")
    for heading, name in (("The module", "cells.py"), ("The study", "cells.yaml")):
        (folder / name).write_text(steps(heading, "own-module.md")[name])
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(rayhive.sweep.target, "connect_to_ray", World().connect)
        for file in ("study.yaml", "experiments/quickstart.yaml", "cells.yaml"):
            assert main(["sweep", file]) == 0
        other = ("--set", "workload.args.lr=0.003", "--set", "name=cells-lr3")
        assert main(["sweep", "cells.yaml", *other]) == 0
        one = ("--set", "budget.trials=1", "--set", "replicates=1", "--set", "baselines=[]")
        assert main(["sweep", "study.yaml", *one, "--out", "runs/kill-one"]) == 0
    for name in ("before", "after"):
        shutil.copytree(folder / "runs/tiny", folder / "runs" / name)
    return folder


@pytest.fixture
def place(recorded: Path, tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a copy of the folder, on a machine with every capability and testbed."""
    here = tmp_path / "here"
    shutil.copytree(recorded, here, symlinks=True)
    monkeypatch.chdir(here)
    monkeypatch.setattr(capabilities, "here", lambda: dict.fromkeys(CAPABILITIES))
    monkeypatch.setattr(lifecycle, "hosted", lambda *_: nullcontext("192.0.2.1:6379"))
    return here


@pytest.mark.parametrize("command", list(cases()))
def test_a_command_of_the_pages_is_taken(command: str, place: Path) -> None:
    typed = words(command)
    if "s3://" in command:
        return  # tests/integration/test_remote_s3.py
    for start, test in ELSEWHERE.items():
        if command.startswith(start):
            assert (ROOT / test).is_file()
            return
    if typed[0] == "make":
        subprocess.run(
            ["make", "--dry-run", *typed[1:]], cwd=ROOT, check=True, stdout=subprocess.DEVNULL
        )
    elif typed[0] == "python":
        assert (ROOT / typed[1]).is_file()
    elif typed[:3] == ["rayhive", "scenario", "run"]:
        of_run = re.compile(r"--no-twin | --out \S+| --no-twin")
        shown = shlex.split(of_run.sub("", shlex.join(typed[3:])))
        assert main(["scenario", "show", *shown]) == 0  # tests/integration/test_scenario_run.py
    elif typed[0] == "rayhive":
        assert main(shortened(typed)[1:]) == 0
    else:
        pytest.fail(f"no test runs {command!r}")
