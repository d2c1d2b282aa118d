"""Processes of a sweep are killed at named points and at random; every replicate counts once."""

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
from contextlib import ExitStack, suppress
from pathlib import Path

import optuna
import psutil
import pytest

from benchmarks.killed_study import TITLES, marked_actors
from rayhive.crash_points import AGENT_POINTS, DRIVER_POINTS, SUPERVISOR_POINTS, VARIABLE
from rayhive.events import ReplicateFinished, of_kind, read_events
from tests.integration.cluster_harness import (
    CONNECT,
    FAKE_FORKSERVER,
    Driver,
    Head,
    driver,
    eventually,
    free_port,
    ray_head,
    ray_node,
    users_of,
)

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(1800)]

#: A driver ends by itself well within this, on a machine that has other work too [s].
PATIENCE = 400.0
#: Random instants of each target, on each cluster; the environment may ask for others.
INSTANTS = int(os.environ.get("RAYHIVE_TEST_KILLS", "5"))
#: Instants of one study: more would hit a study that has ended.
INSTANTS_OF_A_STUDY = 5
SEED = int(os.environ.get("RAYHIVE_TEST_SEED", "17"))

SWEEP = (
    """
import json, sys
from contextlib import contextmanager
from pathlib import Path
from rayhive.cluster.cluster import Cluster
from rayhive.spec import SweepConfig
from rayhive.sweep.progress import SweepProgress
from rayhive.sweep.resolve import WorkloadFacts, resolve
from rayhive.sweep.signals import Interrupted, Interruption
from rayhive.sweep.sweep import run_sweep
from rayhive.sweep.target import target_at

address, folder, forkserver, trials, replicates, fake = sys.argv[1:]
config = SweepConfig(
    name="once",
    workload={"name": "pretended", "args": {"fake": json.loads(fake)}},
    swarm={"peers": 2, "target_batch_size": 32, "matchmaking_time": 0.5, "averaging_timeout": 1.0},
    space={"codec": ["none", "float16", "uniform8"][: int(trials)]},
    replicates=int(replicates),
    retries=30,
    objectives={"samples_per_s": "maximize"},
    budget={"trials": int(trials), "seconds_per_replicate": 60, "samples_per_replicate": 10**6},
    storage=f"journal:{folder}.log",
)
study = resolve(config, workload=WorkloadFacts(((2, 3),), 4, "real"))

"""
    + CONNECT
    + """

try:
    with Interruption() as interruption:
        done = run_sweep(
            study,
            Path(folder),
            SweepProgress(config, sys.stdout),
            interruption,
            target_at(address, connect),
        )
except Interrupted as stop:
    print("interrupted", stop, flush=True)
    sys.exit(stop.exit_code)
print("done", done.trials, done.failed, flush=True)
"""
)

LEFT = """
import json, sys, ray
ray.init(address=sys.argv[1], log_to_driver=False)
actors = [actor["name"] for actor in ray.util.list_named_actors(True)]
groups = [
    group["name"]
    for group in ray.util.placement_group_table().values()
    if group["state"] != "REMOVED"
]
print("left", json.dumps([*actors, *groups]), flush=True)
"""


@pytest.fixture
def place() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="rht-", dir="/tmp"))
    yield path
    assert users_of(path) == []
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def armed(tmp_path: Path) -> Path:
    path = tmp_path / "armed"
    path.mkdir()
    return path


def sweep(address: str, folder: Path, trials: int, replicates: int, **fake: object) -> list[str]:
    """Return the arguments of a driver."""
    told = [str(trials), str(replicates), json.dumps(fake)]
    return [SWEEP, address, str(folder), json.dumps(FAKE_FORKSERVER), *told]


def finish(running: Driver) -> tuple[str, int]:
    """Return the output and the exit code of a driver that ends by itself."""
    try:
        out, _ = running.process.communicate(timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        pytest.fail(f"the driver still runs after {PATIENCE:g} s")
    return out, running.process.returncode


def check_once(folder: Path, trials: int, replicates: int) -> None:
    """Check that each trial was told once, and each replicate completed once."""
    backend = optuna.storages.journal.JournalFileBackend(f"{folder}.log")
    study = optuna.load_study(study_name="once", storage=optuna.storages.JournalStorage(backend))
    found = study.get_trials()
    complete = [trial for trial in found if trial.state.name == "COMPLETE"]
    others = [trial for trial in found if trial.state.name != "COMPLETE"]
    assert all(trial.user_attrs.keys() & {"orphan", "duplicate_of"} for trial in others)
    codecs = {trial.user_attrs["configuration"]["codec"] for trial in complete}
    assert len(codecs) == len(complete) == trials
    expected = {f"{trial.number}/r{n}-none" for trial in complete for n in range(replicates)}
    found_ends = ends(folder)
    assert found_ends.keys() == expected
    for name, states in found_ends.items():
        assert states.count("completed") == 1 and states[-1] == "completed", (name, states)
        assert set(states) <= {"completed", "lost", "stopped"}, (name, states)


def ends(folder: Path) -> dict[str, list[str]]:
    """Return how each attempt at each replicate ended, the last attempt last."""
    return {
        f"{path.parent.name}/{path.name}": [
            end.state
            for log in [*sorted(path.glob("events.attempt-*.jsonl")), path / "events.jsonl"]
            for end in of_kind(read_events(log), ReplicateFinished)
        ]
        for path in folder.glob("trials/*/*")
    }


def studies() -> list[int]:
    """Return the number of instants of each study."""
    whole, rest = divmod(INSTANTS, INSTANTS_OF_A_STUDY)
    return [INSTANTS_OF_A_STUDY] * whole + [rest] * (rest > 0)


def left_on(head: Head) -> list[str]:
    """Return the named actors and placement groups of a cluster."""
    with driver(LEFT, head.address, **head.environment) as asker:
        found: list[str] = json.loads(asker.line("left"))
    return found


def test_a_driver_killed_at_each_point_of_one_sweep_on_a_shared_cluster(
    place: Path, tmp_path: Path, armed: Path
) -> None:
    folder = tmp_path / "run"
    with ray_head(place) as head:
        arguments = sweep(head.address, folder, 3, 2)
        for point in DRIVER_POINTS:
            (armed / point).touch()
            with driver(*arguments, **head.environment, **{VARIABLE: str(armed)}) as killed:
                out, code = finish(killed)
            assert code == -signal.SIGKILL and not list(armed.iterdir()), (point, out)
        with driver(*arguments, **head.environment) as last:
            out, code = finish(last)
        assert code == 0, out
        check_once(folder, 3, 2)
        eventually(lambda: left_on(head) == [], 60.0)


@pytest.mark.parametrize("cluster", ["embedded", "shared"])
@pytest.mark.parametrize("points", [SUPERVISOR_POINTS, AGENT_POINTS], ids=["supervisor", "agent"])
def test_supervisors_and_agents_killed_at_each_point(
    place: Path, tmp_path: Path, armed: Path, cluster: str, points: tuple[str, ...]
) -> None:
    folder = tmp_path / "run"
    for point in points:
        (armed / point).touch()
    with ExitStack() as stack:
        variables = {"RAY_TMPDIR": str(place), VARIABLE: str(armed)}
        address, head = "local", None
        if cluster == "shared":
            head = stack.enter_context(ray_head(place, **{VARIABLE: str(armed)}))
            address, variables = head.address, head.environment
        with driver(*sweep(address, folder, 1, 4), **variables) as only:
            out, code = finish(only)
        assert code == 0 and not list(armed.iterdir()), out
        check_once(folder, 1, 4)
        if points is SUPERVISOR_POINTS:
            assert ends(folder)["0/r0-none"] == ["lost"] * 4 + ["completed"]
        if head is not None:
            there = head
            eventually(lambda: left_on(there) == [], 60.0)


def running_replicate(folder: Path, kind: str) -> bool:
    """Return whether the second replicate has an event of a kind."""
    log = folder / "trials/0/r1-none/events.jsonl"
    return log.exists() and any(event.kind == kind for event in read_events(log))


def kill_head(place: Path) -> None:
    """Kill the control process and the raylet of the head."""
    for pid in users_of(place):
        process = psutil.Process(pid)
        if process.name() in ("gcs_server", "raylet"):
            process.kill()


@pytest.mark.parametrize("kind", ["replicate_started", "round"])
def test_a_head_that_is_killed_ends_the_driver_and_the_next_cluster_goes_on(
    place: Path, tmp_path: Path, kind: str
) -> None:
    folder, port = tmp_path / "run", free_port()
    settings = {"rounds": 200}
    with (
        ray_head(place, port=port) as head,
        driver(*sweep(head.address, folder, 1, 3, **settings), **head.environment) as first,
    ):
        eventually(lambda: running_replicate(folder, kind), 200.0)
        kill_head(place)
        out, code = finish(first)
        assert code != 0, out
    with ray_head(place, port=port) as head:
        with driver(*sweep(head.address, folder, 1, 3, **settings), **head.environment) as second:
            out, code = finish(second)
        assert code == 0, out
        check_once(folder, 1, 3)
        eventually(lambda: left_on(head) == [], 60.0)


@pytest.mark.parametrize("cluster", ["embedded", "shared"])
def test_drivers_killed_at_random_instants(place: Path, tmp_path: Path, cluster: str) -> None:
    draw, struck = random.Random(SEED), 0
    with ExitStack() as stack:
        address, variables = "local", {"RAY_TMPDIR": str(place)}
        if cluster == "shared":
            head = stack.enter_context(ray_head(place))
            address, variables = head.address, head.environment
        for study, instants in enumerate(studies()):
            folder = tmp_path / f"run-{study}"
            arguments = sweep(address, folder, 3, 3)
            for _ in range(instants):
                with driver(*arguments, **variables) as killed:
                    killed.line("connected")
                    time.sleep(draw.uniform(0.0, 8.0))  # the instant is the point of the test
                    os.kill(killed.process.pid, signal.SIGKILL)
                    _, code = finish(killed)
                    struck += code == -signal.SIGKILL
            with driver(*arguments, **variables) as last:
                out, code = finish(last)
            assert code == 0, out
            check_once(folder, 3, 3)
    assert struck, "no driver was still running"


@pytest.mark.parametrize("cluster", ["embedded", "shared"])
@pytest.mark.parametrize("target", ["supervisor", "agent"])
def test_supervisors_and_agents_killed_at_random_instants(
    place: Path, tmp_path: Path, target: str, cluster: str
) -> None:
    """Studies run until there were enough instants; the driver goes on by itself."""
    draw, killed, studies = random.Random(SEED), 0, 0
    with ExitStack() as stack:
        address, variables = "local", {"RAY_TMPDIR": str(place)}
        if cluster == "shared":
            head = stack.enter_context(ray_head(place))
            address, variables = head.address, head.environment
        while killed < INSTANTS:
            folder = tmp_path / f"run-{studies}"
            with driver(*sweep(address, folder, 3, 3, rounds=40), **variables) as only:
                while killed < INSTANTS and _kill_one(target, place, draw, only):
                    killed += 1
                out, code = finish(only)
            log = place / "head.log"
            assert code == 0, out + (log.read_text()[-3000:] if log.exists() else "")
            check_once(folder, 3, 3)
            studies += 1
    print(f"{killed} {target}s killed in {studies} studies on the {cluster} cluster")


def _kill_one(target: str, place: Path, draw: random.Random, running: Driver) -> bool:
    """Kill a supervisor or an agent at a random instant; return False if the driver has ended."""
    time.sleep(draw.uniform(0.0, 4.0))  # the instant is the point of the test
    while running.process.poll() is None:
        pids = marked_actors(TITLES[target], f"RAY_TMPDIR={place}")
        if pids:
            with suppress(ProcessLookupError):
                os.kill(draw.choice(pids), signal.SIGKILL)
                return True
        time.sleep(0.02)
    return False


def test_heads_killed_at_random_instants(place: Path, tmp_path: Path) -> None:
    """Each head has a new cluster; every other one takes the driver along, as a lost machine."""
    draw, port = random.Random(SEED), free_port()
    for study, instants in enumerate(studies()):
        folder = tmp_path / f"run-{study}"
        for instant in range(instants):
            with ray_head(place, port=port) as head:
                arguments = sweep(head.address, folder, 3, 3, rounds=40)
                with driver(*arguments, **head.environment) as lost:
                    lost.line("connected")
                    time.sleep(draw.uniform(0.0, 8.0))  # the instant is the point of the test
                    kill_head(place)
                    if instant % 2:
                        os.kill(lost.process.pid, signal.SIGKILL)
                    finish(lost)
        with ray_head(place, port=port) as head:
            with driver(*sweep(head.address, folder, 3, 3, rounds=40), **head.environment) as last:
                out, code = finish(last)
            assert code == 0, out
            check_once(folder, 3, 3)
            eventually(lambda: left_on(head) == [], 60.0)


def test_a_worker_node_that_is_killed_again_and_again(place: Path, tmp_path: Path) -> None:
    """Raylets, agents and supervisors on a node that hosts peers: any process may go."""
    draw = random.Random(SEED)
    with ray_head(place) as head:
        for study, instants in enumerate(studies()):
            folder = tmp_path / f"run-{study}"
            arguments = sweep(head.address, folder, 2, 3, rounds=150)
            with driver(*arguments, **head.environment) as only:
                for _ in range(instants):
                    with ray_node(head, place, ["--num-cpus=4"]):
                        time.sleep(draw.uniform(0.0, 6.0))  # the instant is the point of the test
                        _kill_worker(place)
                out, code = finish(only)
            assert code == 0, out
            check_once(folder, 2, 3)


def _kill_worker(place: Path) -> None:
    """Kill the raylet of the node that is not the head."""
    raylets = [psutil.Process(pid) for pid in users_of(place)]
    raylets = [raylet for raylet in raylets if raylet.name() == "raylet"]
    workers = [raylet for raylet in raylets if " --head" not in " ".join(raylet.cmdline())]
    assert len(raylets) == 2 and len(workers) == 1
    workers[0].kill()
