"""The page "Add a column", followed by doing: its file and its lines in a copy of rayhive."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fixtures.pages import section, steps

ROOT = Path(__file__).parents[2]

USE = """
from pathlib import Path

from rayhive.columns import objectives
from rayhive.report.render import results_text
from rayhive.report.results import load_results
from tests.fixtures.logs import Log, make_spec, write_run

logs = [
    Log(spec=make_spec(replicate=n), rounds={(2, 0): {"retries": 1 + n}, (3, 1): {"retries": 2}})
    for n in (0, 1)
]
run = write_run(Path("run"), logs)
print(results_text(run, sort="-retries_per_round", console_width=200))
results = load_results(run)
names = ["retries", "retries_per_round", "retries_per_round_low"]
print(results.configurations[names].dtypes.to_dict())
print(results.configurations[names[:2]].to_dict("list"))
print("objective:", objectives()["retries_per_round"])
"""


@pytest.fixture
def extended(tmp_path: Path) -> Path:
    """Return a folder with a copy of rayhive, to which the columns of the page are added."""
    code = steps("Add a column")
    for folder in ("rayhive", "tests/contract", "tests/fixtures"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=ignored)
    for file in ("pyproject.toml", "docs/results.md", "tests/unit/test_report_docs.py"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / file, tmp_path / file)
    group = tmp_path / "rayhive/metrics/retries.py"
    group.write_text(code["rayhive/metrics/retries.py"], encoding="utf-8")
    with (tmp_path / "rayhive/metrics/__init__.py").open("a", encoding="utf-8") as registry:
        registry.write(code["rayhive/metrics/__init__.py"])
    document = tmp_path / "docs/results.md"
    before, row, after = re.split(
        r"(\| `rejected_peers` .*\n)", document.read_text(encoding="utf-8")
    )
    document.write_text(before + row + code["docs/results.md"] + after, encoding="utf-8")
    return tmp_path


def run(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_columns_of_the_page_appear_everywhere(extended: Path) -> None:
    out = run(extended, "-c", USE)
    assert "retries_per_" in out  # the header of the table, which breaks long names
    assert "'retries': Int64Dtype(), 'retries_per_round': Float64Dtype()" in out
    # 3 and 4 retries in 8 peers' rounds each
    assert "{'retries': [7], 'retries_per_round': [0.4375]}" in out
    assert "objective: minimize" in out


def test_the_columns_of_the_page_pass_the_tests_that_it_names(extended: Path) -> None:
    command = re.findall(r"`pytest (tests/[^`]+)`", section("extending.md", "Add a column"))[0]
    out = run(extended, "-m", "pytest", "-q", "-p", "no:cacheprovider", *command.split())
    assert " failed" not in out and " passed" in out
