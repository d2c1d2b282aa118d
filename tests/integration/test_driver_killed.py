"""A driver that is killed while a replicate starts on a shared cluster: the next one goes on."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import optuna
import pytest

from rayhive.events import read_events
from tests.integration.cluster_harness import (
    CONNECT,
    FAKE_FORKSERVER,
    Driver,
    Head,
    driver,
    ray_head,
    users_of,
)

pytestmark = [pytest.mark.cluster]

#: Ends by itself well within this, on a machine that has other work too [s].
PATIENCE = 120.0
#: Instants at which the slow test kills a driver; the environment may ask for others.
INSTANTS = int(os.environ.get("RAYHIVE_TEST_KILLS", "40"))
REPLICATES = 2

SWEEP = (
    """
import json, os, sys
from contextlib import contextmanager
from pathlib import Path
import ray
from rayhive.cluster.cluster import Cluster
from rayhive.cluster.replicate import supervisors
from rayhive.cluster.replicate.supervisor import TrialSupervisor
from rayhive.spec import SweepConfig
from rayhive.sweep import replicate_runner
from rayhive.sweep.signals import Interrupted, Interruption
from rayhive.sweep.progress import SweepProgress
from rayhive.sweep.sweep import run_sweep
from rayhive.sweep.target import target_at
from rayhive.sweep.resolve import resolve
from rayhive.sweep.resolve import WorkloadFacts

address, folder, forkserver, point, number, peers, replicated, rounds = sys.argv[1:]
folder, number = Path(folder), int(number)
config = SweepConfig(
    name=folder.name,
    workload={"name": "pretended", "args": {"fake": {"rounds": int(rounds)}}},
    swarm={
        "peers": int(peers),
        "target_batch_size": 32,
        "matchmaking_time": 0.5,
        "averaging_timeout": 1.0,
    },
    replicates=int(replicated),
    objectives={"samples_per_s": "maximize"},
    budget={"trials": 1, "seconds_per_replicate": 30, "samples_per_replicate": 40},
    storage=f"journal:{folder}.log",
)
study = resolve(config, workload=WorkloadFacts(((2, 3),), 4, "real"))


def die():
    os.kill(os.getpid(), number)


def prepare(spec, before=replicate_runner.prepare):
    found = before(spec)
    if point == "prepared":
        die()
    return found


class Supervisors:
    # stands for ray.remote(TrialSupervisor)
    def __init__(self, remote):
        self.remote_class = remote

    def options(self, **options):
        self.remote_class = self.remote_class.options(**options)
        return self

    def remote(self, *arguments):
        actor = self.remote_class.remote(*arguments)
        if point == "created":
            ray.get(actor.describe.remote(), timeout=60)
        if point in ("registered", "created"):
            die()
        return actor


def give(*arguments, before=supervisors.give):
    found = before(*arguments)
    if point == "given":
        die()
    return found


def remote(*arguments, before=ray.remote, **options):
    found = before(*arguments, **options)
    return Supervisors(found) if arguments == (TrialSupervisor,) else found


def start(self, spec, before=Cluster.start):
    ray.remote, supervisors.give = remote, give
    handle = before(self, spec)
    if point == "started":
        die()
    return handle


replicate_runner.prepare, Cluster.start = prepare, start

"""
    + CONNECT
    + """

try:
    with Interruption() as interruption:
        progress = SweepProgress(config, sys.stdout)
        done = run_sweep(
            study, folder, progress, interruption, target_at(address, connect)
        )
except Interrupted as stop:
    sys.exit(stop.exit_code)
print("done", done.trials, done.failed, flush=True)
"""
)

STOP = """
import json, sys
from rayhive.cluster.control import stop_study
print("stopped", json.dumps(stop_study(*sys.argv[1:])), flush=True)
"""


@pytest.fixture(scope="module")
def head() -> Iterator[Head]:
    path = Path(tempfile.mkdtemp(prefix="rht-", dir="/tmp"))
    try:
        with ray_head(path) as head:
            yield head
        assert users_of(path) == []
    finally:
        shutil.rmtree(path, ignore_errors=True)


def sweep(
    head: Head,
    folder: Path,
    point: str = "",
    number: int = signal.SIGKILL,
    peers: int = 2,
    replicates: int = REPLICATES,
    rounds: int = 3,
) -> list[str]:
    """Return the arguments of a driver that gets a signal at a named point of a start."""
    start = [SWEEP, head.address, str(folder), json.dumps(FAKE_FORKSERVER), point]
    return [*start, *map(str, (int(number), peers, replicates, rounds))]


def finish(running: Driver) -> str:
    """Return the output of a driver once it has ended by itself."""
    try:
        out, _ = running.process.communicate(timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        pytest.fail(f"the driver still runs after {PATIENCE:g} s")
    return out


def check_counted_once(folder: Path, replicates: int = REPLICATES) -> None:
    """Check that the trial was told once, and that each replicate counts once."""
    journal = optuna.storages.journal.JournalFileBackend(f"{folder}.log")
    study = optuna.load_study(
        study_name=folder.name, storage=optuna.storages.JournalStorage(journal)
    )
    (trial,) = study.get_trials()
    assert trial.state.name == "COMPLETE"
    places = sorted(folder.glob("trials/0/*"))
    assert [place.name for place in places] == [f"r{n}-none" for n in range(replicates)]
    for place in places:
        ends = [
            event["state"]
            for log in place.glob("events*.jsonl")
            for event in read_events(log)
            if event["kind"] == "replicate_finished"
        ]
        assert ends.count("completed") == 1 and set(ends) <= {"completed", "stopped"}, ends


@pytest.mark.slow
@pytest.mark.parametrize(
    ("point", "number"),
    [
        ("prepared", signal.SIGKILL),
        ("registered", signal.SIGKILL),
        ("created", signal.SIGKILL),
        ("given", signal.SIGKILL),
        ("started", signal.SIGKILL),
        ("given", signal.SIGTERM),
        ("given", signal.SIGINT),
    ],
)
def test_a_driver_killed_during_a_start_goes_on(
    head: Head, tmp_path: Path, point: str, number: signal.Signals
) -> None:
    folder = tmp_path / f"killed-{point}-{number.name}"
    with driver(*sweep(head, folder, point, number), **head.environment) as first:
        finish(first)
        code = first.process.returncode
        assert code == (-number if number == signal.SIGKILL else 128 + number)
    with driver(*sweep(head, folder), **head.environment) as second:
        assert "done 1 0" in finish(second)
    check_counted_once(folder)


@pytest.mark.slow
def test_a_supervisor_whose_driver_was_killed_can_be_stopped(head: Head, tmp_path: Path) -> None:
    folder = tmp_path / "stopped"
    endless = sweep(head, folder, "given", rounds=10**6)
    with driver(*endless, **head.environment) as first:
        finish(first)
    with driver(STOP, head.address, "stopped", **head.environment) as stopper:
        stopped = json.loads(stopper.line("stopped"))
        assert stopper.process.wait(30) == 0
    assert stopped == ["stopped-t0-r0-none-a0"]
    (log,) = folder.glob("trials/0/*/events.jsonl")
    ends = [e["state"] for e in read_events(log) if e["kind"] == "replicate_finished"]
    assert ends == ["stopped"]


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_driver_killed_at_any_instant_of_a_start_goes_on(head: Head, tmp_path: Path) -> None:
    draw, tiny = random.Random(10), {"peers": 1, "replicates": 1}
    struck = 0
    others = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    for index in range(INSTANTS):
        folder = tmp_path / f"instant-{index}"
        number = others[index // 4 % len(others)] if index % 4 == 3 else signal.SIGKILL
        delay = 4.0 * (index + draw.random()) / INSTANTS
        with driver(*sweep(head, folder, **tiny), **head.environment) as first:
            first.line("connected")
            time.sleep(delay)  # the instant is the point of the test
            os.kill(first.process.pid, number)
            finish(first)
            struck += number == signal.SIGKILL and first.process.returncode == -number
        began = time.monotonic()
        with driver(*sweep(head, folder, **tiny), **head.environment) as second:
            out = finish(second)
            assert "done 1 0" in out, f"{number.name} after {delay:.2f} s:\n{out}"
        check_counted_once(folder, 1)
        took = time.monotonic() - began
        print(f"{index:2d} {number.name:7s} after {delay:.2f} s: went on in {took:.1f} s")
    assert struck, "no driver was still running"
