"""A raylet that is killed without a plan costs one attempt, and nothing that was done."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from rayhive.events import read_events
from tests.integration.cluster_harness import FAKE_FORKSERVER, driver, ray_head, ray_node, users_of

pytestmark = [pytest.mark.cluster]

SWEEP = """
import json, os, signal, sys, threading, time
from contextlib import contextmanager, suppress
from pathlib import Path
import psutil
from rayhive.cluster.cluster import Cluster
from rayhive.spec import SweepConfig
from rayhive.sweep.signals import Interruption
from rayhive.sweep.progress import SweepProgress
from rayhive.sweep.target import target_at
from rayhive.sweep.sweep import run_sweep
from rayhive.sweep.resolve import resolve
from rayhive.sweep.resolve import WorkloadFacts

folder, forkserver, kind, address = Path(sys.argv[1]), json.loads(sys.argv[2]), *sys.argv[3:]
local = address == "local"
# the peers of a node outlive its raylet for seconds; what they leave there, its next agent removes
# a supervisor outlives it by about a second, in which a short replicate would end
fake = {"rounds": 300 if local else 1000, "litter": local}
config = SweepConfig(
    name="killed",
    workload={"name": "pretended", "args": {"fake": fake}},
    swarm={"peers": 2, "matchmaking_time": 0.5, "averaging_timeout": 1.0},
    replicates=2,
    objectives={"samples_per_s": "maximize"},
    budget={"trials": 1, "seconds_per_replicate": 30, "samples_per_replicate": 10**6},
    storage=f"journal:{folder}.log",
)
log = folder / "trials/0/r1-none/events.jsonl"


def kill():
    mark = json.dumps({"kind": kind}, separators=(",", ":")).strip("{}")
    while not (log.exists() and mark in log.read_text()):
        time.sleep(0.01)
    mine = psutil.Process().children(recursive=True)
    for process in mine if address == "local" else psutil.process_iter():
        with suppress(psutil.Error):
            line, port = process.cmdline(), ":" + address.rpartition(":")[2]
            other = port in " ".join(line) and "--head" not in line
            if "raylet" in process.name() and (address == "local" or other):
                process.kill()
                print("killed", process.pid, flush=True)


@contextmanager
def connect(_):
    with Cluster.connect(address, forkserver_command=forkserver) as cluster:
        threading.Thread(target=kill, daemon=True).start()
        yield cluster


with Interruption() as interruption:
    study = resolve(config, workload=WorkloadFacts(((2, 3),), 4, "real"))
    progress = SweepProgress(config, sys.stdout)
    done = run_sweep(study, folder, progress, interruption, target_at(address, connect))
print("done", done.trials, done.failed, flush=True)
"""


@pytest.fixture
def place() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="rht-", dir="/tmp"))
    yield path
    assert users_of(path) == []
    shutil.rmtree(path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "attempts"),
    [("round", 2), ("outcome", 1)],
    ids=["in training", "while it clears up"],
)
def test_a_killed_raylet_is_named_and_the_sweep_goes_on(
    place: Path, tmp_path: Path, kind: str, attempts: int
) -> None:
    folder = tmp_path / "run"
    arguments = (str(folder), json.dumps(FAKE_FORKSERVER), kind, "local")
    with driver(SWEEP, *arguments, RAY_TMPDIR=str(place)) as sweep:
        out, _ = sweep.process.communicate(timeout=240)
    assert "done 1 0" in out, out
    pid = out.partition("killed ")[2].split()[0]
    if attempts > 1:
        assert f"the raylet of the embedded Ray (pid {pid}) was killed by signal 9" in out
    # finished replicates are kept; one with an outcome is not run again
    second = [*["lost"] * (attempts - 1), "completed"]
    assert ends(folder) == {"r0-none": ["completed"], "r1-none": second}


@pytest.mark.slow
def test_a_node_that_goes_without_a_plan_is_not_the_configurations_failure(
    place: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    with ray_head(place) as head, ray_node(head, place, ["--num-cpus=4"]):
        arguments = (str(folder), json.dumps(FAKE_FORKSERVER), "round", head.address)
        with driver(SWEEP, *arguments, **head.environment) as sweep:
            out, _ = sweep.process.communicate(timeout=280)
    assert "killed " in out.partition("starts")[2] and "done 1 0" in out, out
    assert ends(folder) == {"r0-none": ["completed"], "r1-none": ["lost", "completed"]}, out


def ends(folder: Path) -> dict[str, list[str]]:
    """Return how each attempt at each replicate ended."""
    return {
        path.name: [
            event["state"]
            for log in sorted(path.glob("events*.jsonl"))
            for event in read_events(log)
            if event["kind"] == "replicate_finished"
        ]
        for path in folder.glob("trials/0/*")
    }
