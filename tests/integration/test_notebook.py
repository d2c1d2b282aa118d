"""The notebook of the experiments runs as it is, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "experiments" / "notebook.ipynb"


def code_cells() -> list[str]:
    """Return the source of each code cell."""
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


#: Runs the cells one after the other and prints the last expression of each, as a notebook does.
RUNNER = """
import ast, json, sys
space = {"__name__": "__main__"}
for source in json.load(sys.stdin):
    *body, last = ast.parse(source).body
    if not isinstance(last, ast.Expr):
        body, last = [*body, last], None
    exec(compile(ast.Module(body, []), "cell", "exec"), space)
    if last is not None:
        shown = eval(compile(ast.Expression(last.value), "cell", "eval"), space)
        print(repr(shown))
"""


@pytest.mark.cluster
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_notebook_runs_and_shows_its_results(tmp_path: Path, isolated_env: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", RUNNER],
        input=json.dumps(code_cells()),
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=560,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 rows of 2 replicates" in done.stdout
    assert "uniform8" in done.stdout and "peer-1" in done.stdout
    assert "notebook: 2 trials of 1 replicates each" in done.stderr
    assert (tmp_path / "runs/notebook/trials.parquet").is_file()


def test_the_notebook_holds_no_outputs() -> None:
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    assert all(not cell.get("outputs") for cell in cells)
