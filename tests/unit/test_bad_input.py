"""Bad input, through the real command line: exit code 2, a message, no Ray, nothing written.

All cases of one file share one process, for loading torch takes seconds; what it loaded is told
with each answer.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]

GOOD: dict[str, Any] = {
    "name": "bad",
    "workload": {"name": "digits"},
    "swarm": {"peers": 2, "target_batch_size": 256},
    "space": {"codec": ["none", "float16"]},
    "replicates": 1,
    "budget": {"trials": 2, "seconds_per_replicate": 5},
}

ANSWERS = """
import contextlib, io, json, sys
from rayhive.cli import main
for arguments in json.load(sys.stdin):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(arguments)
    print(json.dumps({"code": code, "err": err.getvalue(), "ray": "ray" in sys.modules}))
"""


@dataclass(frozen=True)
class Case:
    """One kind of bad input.

    Attributes:
        change: Keys that replace those of a good study.
        wanted: What the message has to say.
        options: Further arguments.
    """

    change: dict[str, Any]
    wanted: Sequence[str]
    options: Sequence[str] = ()


CASES: dict[str, Case] = {
    "unknown key": Case({"swram": {"peers": 2}}, ["swram", "unknown key", "mean 'swarm'"]),
    "unknown key below": Case(
        {"swarm": {"peers": 2, "target_batchsize": 256}},
        ["swarm.target_batchsize", "mean 'target_batch_size'"],
    ),
    "local updates and local steps": Case(
        {
            "swarm": {"peers": 2, "target_batch_size": 256, "use_local_updates": True},
            "space": {"local_steps": 4},
        },
        ["swarm.use_local_updates: True", "unknown key"],
    ),
    "ratio above one": Case(
        {"space": {"powersgd_rank": 2, "min_compression_ratio": 1.5}},
        ["space.min_compression_ratio: 1.5", "less than 1"],
    ),
    "rank zero": Case({"space": {"powersgd_rank": 0}}, ["space.powersgd_rank: 0", "at least 1"]),
    "threshold without a codec for it": Case(
        {"space": {"codec": ["none", "float16"], "threshold": 1000}},
        ["space.threshold: 1000", "size_adaptive"],
    ),
    "threshold enqueued without a codec for it": Case(
        {"enqueue": [{"codec": "float16", "threshold": 1000}]},
        [
            "enqueue.0.threshold: 1000",
            "absent without a codec that has a threshold (size_adaptive)",
        ],
    ),
    "zero peers": Case(
        {"swarm": {"peers": 0, "target_batch_size": 256}},
        ["swarm.peers: 0", "greater than or equal to 1"],
    ),
    "round smaller than a batch": Case(
        {"swarm": {"peers": 2, "target_batch_size": 8, "batch_size": 32}},
        ["swarm.target_batch_size: 8", "`batch_size` (32)"],
    ),
    "round smaller than the workload's batch": Case(
        {"swarm": {"peers": 2, "target_batch_size": 8}},
        ["swarm.target_batch_size: 8", "default batch size (32)"],
    ),
    "more peers than samples": Case(
        {"swarm": {"peers": 5000, "target_batch_size": 2**20}},
        ["swarm.peers: 5000", "at most the 1442 samples"],
    ),
    "unknown workload": Case(
        {"workload": {"name": "digit"}}, ["workload.name: 'digit'", "mean 'digits'"]
    ),
    "import that fails": Case(
        {"workload": {"import": "no_such_package.module:Thing"}},
        ["workload.import", "no_such_package"],
    ),
    "no workload": Case({"workload": {}}, ["workload", "exactly one of name and import"]),
    "unknown codec": Case({"space": {"codec": ["flaot16"]}}, ["'flaot16'", "mean 'float16'"]),
    "unknown scenario": Case({"scenarios": ["kill-two"]}, ["scenarios: 'kill-two'", "none"]),
    "unknown objective": Case(
        {"objectives": {"final_los": "minimize"}}, ["objectives.final_los", "mean 'final_loss'"]
    ),
    "override without a value": Case({}, ["--set: 'replicates'"], ["--set", "replicates"]),
    "override of an unknown key": Case(
        {}, ["budget.trails", "mean 'trials'"], ["--set", "budget.trails=3"]
    ),
    "unknown format": Case({}, ["--format: 'jsno'", "mean 'json'"], ["--format", "jsno"]),
    "storage that is no URL": Case({"storage": "postgres//x"}, ["storage: 'postgres//x'"]),
    "storage without its driver": Case(
        {"storage": "oracle://somewhere/db"}, ["storage: 'oracle://somewhere/db'"]
    ),
}
#: Ray is loaded to reach a cluster, so this comes last; it is not started.
LAST = "unreachable address"
CASES[LAST] = Case(
    {}, ["--address: '127.0.0.1:9'", "nothing answers"], ["--address", "127.0.0.1:9"]
)

EVERYTHING_WRONG = """
name: all wrong
workload: {name: digit}
swarm: {peers: 0, target_batch_size: 8, batch_size: 32, matchmaking_tme: 3}
space:
  codec: [flaot16, uniform8]
  threshold: 1000
  powersgd_rank: [0, 2]
  min_compression_ratio: 1.5
  delay: gradient
enqueue: [{codec: float16, threshold: 5}, {codec: none, powersgd_rnk: 1}]
scenarios: [kill-two]
replicates: 0
objectives: {final_los: minimize, round_p50_s: maximize}
budget: {trials: 2.5, seconds_per_replicate: -1}
"""
EVERY_KEY = [
    "name",
    "workload.name",
    "swarm.peers",
    "swarm.target_batch_size",
    "swarm.matchmaking_tme",
    "space.codec",
    "space.threshold",
    "space.powersgd_rank",
    "space.min_compression_ratio",
    "space.delay",
    "enqueue.0.threshold",
    "enqueue.1.powersgd_rnk",
    "scenarios",
    "replicates",
    "objectives.final_los",
    "objectives.round_p50_s",
    "budget.trials",
    "budget.seconds_per_replicate",
    "budget.seed",
]


#: Command lines that need no study of their own, and what their message has to say.
LINES: dict[str, tuple[list[str], Sequence[str]]] = {
    "a missing file": (["sweep", "goood.yaml"], ["FILE", "mean 'good.yaml'"]),
    "a file that is no text": (["plan", "latin.yaml"], ["UTF-8"]),
    "a file that is no YAML": (["plan", "broken.yaml"], ["valid YAML"]),
    "a file that is no study": (["plan", "list.yaml"], ["a mapping of keys"]),
    "a key given twice": (["plan", "twice.yaml"], ["replicates: 'line", "given once"]),
    "a folder below a file": (
        # Root may write everywhere else.
        ["sweep", "good.yaml", "--out", "good.yaml/run"],
        ["--out", "good.yaml is a file"],
    ),
    "a folder of somebody's": (
        ["sweep", "good.yaml", "--out", "notes"],
        ["--out", "a run folder, or one that is empty or new"],
    ),
    "another run's folder": (
        ["sweep", "good.yaml", "--out", "existing"],
        [
            "2 problems",
            "swarm.peers: 2 is not valid: 4, as in the run",
            "replicates: 1 is not valid: at least 3, as in the run",
        ],
    ),
    "results of nothing": (["results", "nowhere"], ["nowhere"]),
    "unknown columns": (
        ["results", "nowhere", "--sort", "final_los", "--by", "cdoec"],
        ["'final_loss'", "'codec'"],
    ),
    "scenario unknown": (["scenario", "show", "nonne"], ["mean 'none'"]),
    "unknown option": (["sweep", "good.yaml", "--adress", "x"], []),
    "no file": (["sweep"], []),
}


def contents(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def lay_out(folder: Path) -> None:
    """Write the files that the command lines name."""
    for number, case in enumerate(CASES.values()):
        (folder / f"{number}.yaml").write_text(yaml.safe_dump({**GOOD, **case.change}))
    (folder / "good.yaml").write_text(yaml.safe_dump(GOOD))
    (folder / "latin.yaml").write_bytes(b"name: caf\xe9\n")
    (folder / "broken.yaml").write_text("name: [\n")
    (folder / "list.yaml").write_text("- 1\n")
    (folder / "twice.yaml").write_text(yaml.safe_dump(GOOD) + "replicates: 2\n")
    (folder / "notes").mkdir()
    (folder / "notes" / "diary.txt").write_text("today\n")
    (folder / "existing").mkdir()
    earlier = {**GOOD, "swarm": {"peers": 4, "target_batch_size": 256}, "replicates": 3}
    (folder / "existing" / "sweep.yaml").write_text(yaml.safe_dump(earlier))


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Run every command line; return exit code, message and whether Ray is loaded."""
    folder = tmp_path_factory.mktemp("bad")
    lay_out(folder)
    before = contents(folder)
    cases = {
        name: ["sweep", f"{number}.yaml", *case.options]
        for number, (name, case) in enumerate(CASES.items())
    }
    lines = {
        "good": ["plan", "good.yaml"],
        **{name: arguments for name, (arguments, _) in LINES.items()},
        **cases,
    }
    assert list(lines)[-1] == LAST
    done = subprocess.run(
        [sys.executable, "-c", ANSWERS],
        input=json.dumps(list(lines.values())),
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=True,
    )
    assert contents(folder) == before, "something was written"
    found = [json.loads(line) for line in done.stdout.splitlines()]
    return dict(zip(lines, found, strict=True))


WANTED = {
    **{name: case.wanted for name, case in CASES.items()},
    **{name: wanted for name, (_, wanted) in LINES.items()},
}


@pytest.mark.parametrize("name", WANTED)
def test_bad_input_is_refused(answers: dict[str, dict[str, Any]], name: str) -> None:
    answer = answers[name]
    assert answer["code"] == 2, answer
    for text in WANTED[name]:
        assert text in answer["err"]
    assert "Traceback" not in answer["err"]
    assert not answer["ray"] or name == LAST


def test_the_good_study_of_the_cases_is_good(answers: dict[str, dict[str, Any]]) -> None:
    """Otherwise the cases would be refused for another reason than theirs."""
    assert answers["good"]["code"] == 0, answers["good"]


def test_every_mistake_is_reported_at_once(tmp_path: Path) -> None:
    file = tmp_path / "wrong.yaml"
    file.write_text(EVERYTHING_WRONG)
    done = subprocess.run(
        [sys.executable, str(ROOT / "experiments/sweep.py"), str(file), "--set=budget.seed=1"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
    )
    assert done.returncode == 2
    assert done.stdout == ""
    told = [line.strip().removeprefix("- ").split(": ")[0] for line in done.stderr.splitlines()]
    assert {key: told.count(key) for key in EVERY_KEY if key not in told} == {}
    assert len(told) - 1 <= len(EVERY_KEY) + 4, done.stderr
    assert contents(tmp_path) == {"wrong.yaml"}
