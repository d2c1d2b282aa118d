"""The axis and the columns of docs/extending.md, added to a copy of the repository.

Models, tables and data frames derive from axes and columns when rayhive is imported, so a new
process has to import the copy. ``tests/contract/test_extending_page.py`` adds the page's other
parts.
"""

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
OWN_TESTS = ("tests/fixtures/extended_axis.py", "tests/fixtures/extended_column.py")


def insert_after(file: Path, line: str, text: str) -> None:
    """Insert text after the only line of a file that begins with ``line``."""
    whole = file.read_text(encoding="utf-8")
    before, found, after = re.split(rf"^({re.escape(line)}.*\n)", whole, flags=re.MULTILINE)
    if text not in whole:
        file.write_text(before + found + text + after, encoding="utf-8")


def add_axis(copy: Path) -> None:
    code = steps("Add an axis")
    file, registry = list(code)[:2]
    (copy / file).write_text(code[file], encoding="utf-8")
    insert_after(copy / registry, 'REGISTERED.register_lazy("mixing"', code[registry])
    insert_after(copy / "docs/results.md", "| `mixing` |", code["docs/results.md"])
    insert_after(copy / "docs/sweep.md", "| `mixing` |", code["docs/sweep.md"])
    (copy / "study.yaml").write_text(code["yaml"], encoding="utf-8")


def add_columns(copy: Path) -> None:
    code = steps("Add a column")
    file = "rayhive/metrics/groups/retries.py"
    (copy / file).write_text(code[file], encoding="utf-8")
    insert_after(copy / "docs/results.md", "| `rejected_peers` |", code["docs/results.md"])


@pytest.fixture
def extended(tmp_path: Path) -> Path:
    """Return a copy of the repository with both parts."""
    for folder in ("rayhive", "experiments", "tests", "docs"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    add_axis(tmp_path)
    add_columns(tmp_path)
    return tmp_path


@pytest.mark.timeout(600)  # the tests of several files, while a swarm may have the machine
def test_they_work_and_pass_the_tests_that_the_page_names(extended: Path) -> None:
    named = {
        path
        for heading in ("Add an axis", "Add a column")
        for command in re.findall(r"`pytest ([^`]+)`", section("extending.md", heading))
        for path in command.split()
    }
    files = [*OWN_TESTS, *sorted(named), "tests/unit/test_docs_registries.py"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files],
        cwd=extended,
        env={**os.environ, "PYTHONPATH": str(extended)},
        capture_output=True,
        text=True,
        timeout=540,
    )
    assert done.returncode == 0, done.stdout + done.stderr
