"""The page "Add an axis", followed by doing: its file and its line in a copy of rayhive."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fixtures.pages import steps

ROOT = Path(__file__).parents[2]

DRIVE = """
import sys
from pathlib import Path
from random import Random

import rayhive
from rayhive.compression.payload import configuration_payload
from rayhive.errors import ConfigError
from rayhive.peer.from_spec import strategy_arguments
from rayhive.report.results import load_results
from rayhive.spec.replicate import PeerSpec
from rayhive.sweep.resolve import resolve
from rayhive.sweep.space import RandomChooser
from tests.fixtures.logs import Log, make_spec, write_run

study = resolve(sys.argv[1])
for override in ("[0]", "{low: 1, high: 9}"):
    try:
        resolve(sys.argv[1], [f"space.powersgd_iterations={override}"])
    except ConfigError as error:
        print("refused:", error.problems[0])
try:
    resolve(sys.argv[1], ["space.powersgd_rank=null"])
except ConfigError as error:
    print("refused:", error.problems[0])

space = study.space
drawn = {space.key(item): item for item in map(space.draw, [RandomChooser(Random(0))] * 40)}
assert len(drawn) == 3 == len(list(space.every()))
for item in sorted(drawn.values(), key=lambda item: item.label):
    spec = PeerSpec(
        run_id="run", peer=0, peers=2, workload=study.config.workload,
        swarm=study.config.swarm, configuration=item,
    )
    factory = strategy_arguments(spec, 32).get("grad_averager_factory")
    given = factory and factory.keywords
    phases = configuration_payload(study.workload.shapes, item).phases
    print(f"{item.label} | {given} | {len(phases)}")

logs = [Log(spec=make_spec(trial=n, configuration=item)) for n, item in enumerate(drawn.values())]
cells = load_results(write_run(Path("run"), logs)).configurations["powersgd_iterations"]
print("column:", cells.dtype, sorted(map(int, cells.dropna())))
"""


@pytest.fixture
def extended(tmp_path: Path) -> Path:
    """Return a folder with a copy of rayhive, to which the axis of the page is added."""
    for folder in ("rayhive", "experiments", "tests/fixtures"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=ignored)
    code = steps("Add an axis")
    (tmp_path / "rayhive/spec/axes/powersgd_iterations.py").write_text(
        code["rayhive/spec/axes/powersgd_iterations.py"], encoding="utf-8"
    )
    registry = tmp_path / "rayhive/spec/axes/__init__.py"
    before, last, after = registry.read_text(encoding="utf-8").partition(
        'REGISTERED.register_lazy("delay", "rayhive.spec.axes.delay:Delay")\n'
    )
    assert last, "the page says below the other axes"
    line = code["rayhive/spec/axes/__init__.py"]
    registry.write_text(before + last + line + after, encoding="utf-8")
    (tmp_path / "study.yaml").write_text(code["yaml"], encoding="utf-8")
    return tmp_path


def test_the_axis_of_the_page_works_from_study_to_strategy(extended: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", DRIVE, "study.yaml"],
        cwd=extended,
        env={**os.environ, "PYTHONPATH": str(extended)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    refused = "space.powersgd_iterations: {} is not valid: a whole number from 1 to 8"
    assert done.stdout.splitlines() == [
        f"refused: {refused.format(0)}",
        f"refused: {refused.format(9.0)}",
        "refused: space.powersgd_iterations: [1, 2] is not valid: absent without powersgd_rank",
        "none | None | 1",
        "none rank2(≥0.5, 1 iterations) | {'averager_rank': 2, 'min_compression_ratio': 0.5, "
        "'num_iters_per_step': 1} | 2",
        "none rank2(≥0.5, 2 iterations) | {'averager_rank': 2, 'min_compression_ratio': 0.5, "
        "'num_iters_per_step': 2} | 4",
        "column: Int64 [1, 2]",
    ]


def test_the_axis_of_the_page_keeps_the_contract(extended: Path) -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"),
            *("-c", str(ROOT / "pyproject.toml"), "--rootdir", str(ROOT)),
            *("-o", f"pythonpath={extended} {ROOT}"),
            str(ROOT / "tests/contract/test_axis_contract.py"),
            *("-k", "powersgd_iterations"),
        ],
        cwd=extended,
        env={**os.environ, "PYTHONPATH": str(extended)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout
